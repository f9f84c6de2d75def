// Soft cap: logits are bounded smoothly to (-cap, cap), cap * tanh(logit / cap). Gemma 2, Grok.
#pragma once
#include "host_device/variant.h"

namespace plait {

struct SoftCap {
  struct Params {
    alignas(8) float cap;  // > 0, in units of sm_scale * q.k
  };
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
    // No division: its slow path is a call in the middle of a tile. Computed once for all elements.
    return p.cap * tanh(logit * reciprocal(p.cap));
  }
};

}  // namespace plait
