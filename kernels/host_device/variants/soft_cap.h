// Soft cap: logits are bounded smoothly to (-cap, cap), cap * tanh(logit / cap). Gemma 2, Grok.
#pragma once
#include "host_device/variant.h"

namespace plait {

struct SoftCap {
  struct Params {
    alignas(8) float cap;  // > 0, in units of sm_scale * q.k
  };
  PLAIT_HD static Logit logits_transform(const Params& p, const LogitContext& c, Logit logit) {
    // No division: its slow path is a call in the middle of a tile. Computed once for all elements.
    const float inverse = reciprocal(p.cap);
    if (c.dtype == Dtype::kFloat32) return p.cap * tanh(logit * inverse);
    // tanh without its series near 0: off by 2^-22 of the cap, where products of 16 bits are off by
    // 2^-9 of a logit.
    const float power = exp2(logit * (2.0f * kLog2e * inverse));
    return {reciprocal(-1.0f - power), 2.0f * p.cap, p.cap};
  }

  // The same of logits within (-cap, cap), as nearly all are, without powers: (tanh(x) - 1) / 2
  // with tanh(x) / x a polynomial in x^2, least squares at Chebyshev nodes, off by 2^-17 of itself
  // at most.
  PLAIT_HD static float small_logit(const Params& p) { return p.cap; }
  PLAIT_HD static Logit small_logits_transform(const Params& p, const LogitContext&, Logit logit) {
    const float x = logit * reciprocal(p.cap), x2 = x * x;
    float ratio = 4.485680255e-3f;
    ratio = multiply_add(ratio, x2, -2.234260925e-2f);
    ratio = multiply_add(ratio, x2, 6.51417e-2f);
    ratio = multiply_add(ratio, x2, -1.664815395e-1f);
    ratio = multiply_add(ratio, x2, 4.99996245e-1f);
    return {multiply_add(x, ratio, -0.5f), 2.0f * p.cap, p.cap};
  }
};

}  // namespace plait
