// Soft cap: logits are bounded smoothly to (-cap, cap), cap * tanh(logit / cap). Gemma 2, Grok.
#pragma once
#include "host_device/variant.h"

namespace plait {

struct SoftCap {
  struct Params {
    alignas(8) float cap;  // > 0, in units of sm_scale * q.k
  };
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext& c, float logit) {
    // No division: its slow path is a call in the middle of a tile. Computed once for all elements.
    const float inverse = reciprocal(p.cap);
    if (c.dtype == Dtype::kFloat32) return p.cap * tanh(logit * inverse);
    // tanh without its series near 0, off by 2^-22 of the cap, or with products in place of a
    // reciprocal, by 2^-18: products of 16 bits are off by 2^-9 of a logit.
    if (!c.on_wgmma) {
      return p.cap - 2.0f * p.cap * reciprocal(1.0f + exp2(logit * (2.0f * kLog2e * inverse)));
    }
    // tanh |x| = (1 - e) / (1 + e). Here 1 / (1 + e), 0 <= e <= 1, is the cubic whose relative
    // error is the least (1.7e-3, a Chebyshev polynomial over 1 + e), squared by Newton's step.
    const float e = exp2(absolute(logit) * (-2.0f * kLog2e * inverse));
    const float guess = 0.9982669f + e * (-0.9428076f + e * (0.66551125f + e * -0.22183709f));
    const float y = (p.cap - p.cap * e) * (guess * (2.0f - (1.0f + e) * guess));
    return copy_sign(y, logit);
  }
};

}  // namespace plait
