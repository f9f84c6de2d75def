// ⊕ over given attention states: out, lse of n disjoint key sets become those of their union. One
// warp a (row, head); states are joined in order, so the bits do not depend on anything else. Any
// strides, any alignment. May run in place: a warp has read its states before it writes.
#pragma once
#include "host_device/convert.h"
#include "host_device/softmax_state.h"
#include "host_device/utility_calls.h"
#include "tile/begin.cuh"

namespace plait {

// Any grid of whole warps.
template <Dtype kDtype>
PLAIT_DEVICE void merge_states(const MergeStatesCall& call) {
  begin_kernel();
  using T = Storage<kDtype>;
  const int lane = threadIdx.x % 32;
  const i64 num_warps = static_cast<i64>(gridDim.x) * (blockDim.x / 32);
  const i64 first = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  for (i64 i = first; i < call.num_rows * call.num_heads; i += num_warps) {
    const i64 row = i / call.num_heads;
    const int head = static_cast<int>(i % call.num_heads);
    const float* lse = call.lse + row * call.lse_stride_row + head * call.lse_stride_head;
    const T* v =
        static_cast<const T*>(call.v) + row * call.v_stride_row + head * call.v_stride_head;

    float max_lse = kNegInf;
    int num_present = 0, present = 0;
    for (int s = 0; s < call.num_states; ++s) {
      const float x = lse[s * call.lse_stride_state];
      if (x == kNegInf) continue;  // the identity: its v is never read
      max_lse = max(max_lse, x);
      ++num_present;
      present = s;
    }
    float sum = 0.0f;
    for (int s = 0; s < call.num_states; ++s) {
      const float x = lse[s * call.lse_stride_state];
      if (x != kNegInf) sum += exp2((x - max_lse) * call.log2_per_lse);
    }

    T* out = static_cast<T*>(call.out) + row * call.out_stride.token + head * call.out_stride.head;
    for (int dim = lane; dim < call.head_dim; dim += 32) {
      if (num_present == 0) {
        out[dim] = from_float<T>(0.0f);
      } else if (num_present == 1) {  // bit for bit, whatever the state
        out[dim] = v[present * call.v_stride_state + dim];
      } else {
        float x = 0.0f;
        for (int s = 0; s < call.num_states; ++s) {
          const float y = lse[s * call.lse_stride_state];
          if (y == kNegInf) continue;
          x += exp2((y - max_lse) * call.log2_per_lse) * to_float(v[s * call.v_stride_state + dim]);
        }
        out[dim] = from_float<T>(x / sum);
      }
    }
    __syncwarp();  // out_lse may be an lse
    if (lane == 0 && call.out_lse != nullptr) {
      call.out_lse[row * call.out_lse_stride.token + head * call.out_lse_stride.head] =
          num_present == 0   ? kNegInf
          : num_present == 1 ? lse[present * call.lse_stride_state]
                             : max_lse + log2(sum) * call.lse_per_log2;
    }
  }
}

}  // namespace plait
