// ALiBi: logits + slope * (k_pos - q_pos), a penalty that grows with the distance, by query head; 0
// at the query's own position. Source: Press et al., 2022, arXiv:2108.12409.
#pragma once
#include "host_device/variant.h"

namespace plait {

struct Alibi {
  struct Params {
    alignas(8) const float* slopes;  // [num_qo_heads]
  };
  PLAIT_HD static Logit logits_transform(const Params& p, const LogitContext& c, Logit logit) {
    return logit + p.slopes[c.qo_head] * c.distance;
  }
};

}  // namespace plait
