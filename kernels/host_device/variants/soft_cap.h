// Soft cap: logits are bounded smoothly to (-cap, cap), cap * tanh(logit / cap). Gemma 2, Grok.
#pragma once
#include "host_device/variant.h"

namespace plait {

struct SoftCap {
  struct Params {
    alignas(8) float cap;  // > 0, in units of sm_scale * q.k
  };
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
    // One division for all elements of a tile: the compiler sees the same 1 / cap each time.
    return p.cap * tanh(logit * (1.0f / p.cap));
  }
};

}  // namespace plait
