// The meaning of attention in float64, over explicit lists of keys, for the C++ tests; and the same
// computation done plainly in a storage type, whose error sets the tolerance. See
// python/plait/reference.py for the whole of it.
#pragma once
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "host_device/convert.h"

namespace plait::test {

// One query row and the keys it sees, as float64.
struct ReferenceRow {
  std::vector<double> q;
  std::vector<std::vector<double>> k, v;
  std::vector<int> k_pos;  // absolute
  double sm_scale = 1;
  std::function<double(double logit, int k_pos)> logits_transform;  // empty: identity
  bool use_softmax = true;
  int dim_vo = 0;
};
struct ReferenceState {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();
};

// Accumulate: double for the reference, float for the plain computation. `rounded` is applied to
// every weight, as a plain computation in a storage type would store it.
template <class Accumulate, class Round>
ReferenceState attend(const ReferenceRow& row, Round rounded) {
  std::vector<Accumulate> logits(row.k.size());
  for (size_t i = 0; i < row.k.size(); ++i) {
    Accumulate dot = 0;
    for (size_t d = 0; d < row.q.size(); ++d) {
      dot += static_cast<Accumulate>(row.q[d]) * static_cast<Accumulate>(row.k[i][d]);
    }
    logits[i] = static_cast<Accumulate>(row.sm_scale) * dot;
    if (row.logits_transform) {
      logits[i] = static_cast<Accumulate>(row.logits_transform(logits[i], row.k_pos[i]));
    }
  }
  ReferenceState state;
  state.out.assign(row.dim_vo, 0.0);
  Accumulate largest = -std::numeric_limits<Accumulate>::infinity(), sum = 0;
  for (const Accumulate logit : logits) largest = std::max(largest, logit);
  const bool softmax = row.use_softmax;
  if (row.k.empty() || (softmax && std::isinf(largest))) return state;
  std::vector<Accumulate> out(row.dim_vo, 0);
  for (size_t i = 0; i < row.k.size(); ++i) {
    Accumulate weight = softmax ? std::exp(logits[i] - largest) : logits[i];
    sum += weight;
    weight = static_cast<Accumulate>(rounded(weight));
    for (int d = 0; d < row.dim_vo; ++d) out[d] += weight * static_cast<Accumulate>(row.v[i][d]);
  }
  for (int d = 0; d < row.dim_vo; ++d) state.out[d] = softmax ? out[d] / sum : out[d];
  if (softmax) state.lse = largest + std::log(sum);
  return state;
}

inline ReferenceState reference(const ReferenceRow& row) {
  return attend<double>(row, [](double x) { return x; });
}
template <class T>
ReferenceState plain(const ReferenceRow& row) {
  const auto rounded = [](double x) { return to_float(from_float<T>(static_cast<float>(x))); };
  ReferenceState state = attend<float>(row, rounded);
  for (double& x : state.out) x = rounded(x);
  return state;
}

// Half a unit in the last place, relative.
template <class T>
constexpr double epsilon() {
  return sizeof(T) == 4 ? 0x1p-24 : std::is_same_v<T, Bfloat16> ? 0x1p-8 : 0x1p-11;
}

}  // namespace plait::test
