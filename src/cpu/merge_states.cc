// merge_states on the CPU: the states of disjoint key sets become the state of their union.
// Source: FlashInfer (Ye et al., 2025, arXiv:2501.01005), "Attention composition".
#include "cpu/thread_pool.h"
#include "executor.h"
#include "host_device/convert.h"
#include "host_device/softmax_state.h"

namespace plait {
namespace {

// One (row, head). `out` and `out_lse` may be one of the states: each element is read before it is
// written.
template <class T>
void merge_row(const MergeParams& p, int row, int head) {
  constexpr int kBlock = 64;  // elements whose sums are on the stack
  const float* lse = p.lse + row * p.lse_stride_row + head * p.lse_stride_head;
  const T* v = static_cast<const T*>(p.v) + row * p.v_stride_row + head * p.v_stride_head;
  T* out = static_cast<T*>(p.out) + row * p.out_stride.token + head * p.out_stride.head;

  float largest = kNegInf;
  for (int n = 0; n < p.num_states; ++n) {
    const float x = lse[n * p.lse_stride_state];
    largest = x > largest || x != x ? x : largest;  // NaN stays
  }
  float sum = 0.0f;
  const auto weight = [&](int n) {
    const float x = lse[n * p.lse_stride_state];
    return x == kNegInf ? 0.0f : exp2((x - largest) * p.log2_per_lse);
  };
  for (int n = 0; n < p.num_states; ++n) sum += weight(n);
  const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;

  for (int first = 0; first < p.head_dim; first += kBlock) {
    const int count = min(kBlock, p.head_dim - first);
    float total[kBlock] = {};
    for (int n = 0; n < p.num_states; ++n) {
      const float w = weight(n) * scale;
      if (w == 0.0f) continue;  // an empty state may hold NaN
      const T* state = v + n * p.v_stride_state + first;
      for (int d = 0; d < count; ++d) total[d] += w * to_float(state[d]);
    }
    for (int d = 0; d < count; ++d) out[first + d] = from_float<T>(total[d]);
  }
  p.out_lse[row * p.out_lse_stride.token + head * p.out_lse_stride.head] =
      sum == 0.0f ? kNegInf : largest + log2(sum) * p.lse_per_log2;
}

template <class T>
void merge_all(const MergeParams& p) {
  const i64 elements = static_cast<i64>(p.num_rows) * p.num_states * p.num_heads * p.head_dim;
  const int max_threads = elements < (1 << 16) ? 1 : 0;
  cpu::thread_pool().run(p.num_rows, max_threads, [&](int row, int) {
    for (int head = 0; head < p.num_heads; ++head) merge_row<T>(p, row, head);
  });
}

}  // namespace

void cpu_merge_states(const MergeParams& params) {
  if (params.dtype == Dtype::kFloat32) {
    merge_all<float>(params);
  } else if (params.dtype == Dtype::kBfloat16) {
    merge_all<Bfloat16>(params);
  } else {
    merge_all<Float16>(params);
  }
}

}  // namespace plait
