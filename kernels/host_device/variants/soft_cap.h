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
    // tanh without its series near 0: off by 2^-22 of the cap, where products of 16 bits are off by
    // 2^-9 of a logit.
    return p.cap - 2.0f * p.cap * reciprocal(1.0f + exp2(logit * (2.0f * kLog2e * inverse)));
  }
};

}  // namespace plait
