// RMS norm of every row of Q, as Qwen 3 and Gemma 3 have it before RoPE: x / sqrt(mean(x^2) + eps)
// * weight. Source: Zhang and Sennrich, 2019, arXiv:1910.07467.
#pragma once
#include "host_device/row.h"
#include "host_device/variant.h"

namespace plait {

struct RmsNormQ {
  struct Params {
    alignas(8) float eps;            // > 0
    alignas(8) const float* weight;  // [head_dim_qk]
  };
  template <class Row>
  PLAIT_HD static void query_transform(const Params& p, const RowContext&, Row& row) {
    const float square = row.sum([](int, float x) { return x * x; });
    const float factor = reciprocal_sqrt(square * (1.0f / Row::dim) + p.eps);
    row.map([&](int i, float x) { return x * factor * p.weight[i]; });
  }
};

}  // namespace plait
