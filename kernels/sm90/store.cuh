// How a unit leaves the consumers: warpgroups that split the keys join their states, then rows are
// normalised and written, final or partial, straight from the accumulator fragment.
#pragma once
#include "ptx/sync.cuh"
#include "sm90/compute.cuh"
#include "tile/merge.cuh"

namespace plait::sm90 {

// Joins warpgroup 1's state of the same rows into warpgroup 0's. Both call it.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void join_warpgroups(Consumer<kConfig, Variant>& consumer, SoftmaxState (&state)[2],
                                  float* exchange) {
  constexpr int kCount = kConfig.head_dim_vo / 2;
  constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
  float* mine = exchange + threadIdx.x % 128;  // element i of all threads lie side by side
  ptx::named_barrier(kJoinReady, kThreads);    // warpgroup 0 has read what was there before
  if (threadIdx.x >= 128) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) mine[128 * i] = consumer.o[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      mine[128 * (kCount + 2 * r)] = state[r].max_logit;
      mine[128 * (kCount + 2 * r + 1)] = state[r].sum;
    }
  }
  ptx::named_barrier(kJoinWritten, kThreads);
  if (threadIdx.x >= 128) return;
  OutputScales scales[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
  if constexpr (VariantTraits<Variant>::kUseSoftmax) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = merge(
          state[r], SoftmaxState{mine[128 * (kCount + 2 * r)], mine[128 * (kCount + 2 * r + 1)]});
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const OutputScales& s = scales[i / 2 % 2];
    consumer.o[i] = s.a * consumer.o[i] + s.b * mine[128 * i];
  }
}

// Transposes a 4 x 4 matrix of registers over the four threads of a row: thread t gives w[i] and
// gets thread i's w[t] as w[i].
PLAIT_DEVICE void transpose_quad(unsigned (&w)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool high = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const unsigned received = __shfl_xor_sync(~0u, high ? w[i] : w[i + step], step);
      (high ? w[i] : w[i + step]) = received;
    }
  }
}

// Writes this thread's row r as final: normalised, transformed, 16 bytes a store where aligned.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_final_row(const Params& params, const typename Variant::Params& variant,
                                  const ThreadRows& rows, int r, const SoftmaxState& state,
                                  const float (&o)[kConfig.head_dim_vo / 2]) {
  using Traits = VariantTraits<Variant>;
  using Out = Storage<kConfig.dtype_out>;
  const bool empty = Traits::kUseSoftmax && !(state.sum > 0.0f);
  const float scale = Traits::kUseSoftmax ? (empty ? 0.0f : 1.0f / state.sum) : 1.0f;
  const int t = threadIdx.x % 4;
  Out* row =
      static_cast<Out*>(params.out) + out_offset(params.out_stride, rows.token[r], rows.qo_head[r]);
  const bool aligned = reinterpret_cast<unsigned long long>(row) % 16 == 0;
#pragma unroll
  for (int block = 0; block < kConfig.head_dim_vo / 8; block += 4) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[e] = empty ? 0.0f : o[4 * (block + i) + 2 * r + e] * scale;
        if constexpr (Traits::kHasOutputTransform) {
          const int dim = 8 * (block + i) + 2 * t + e;
          if (!empty) {
            x[e] = Variant::output_transform(
                variant, {rows.request[r], rows.position[r], rows.qo_head[r], dim}, x[e]);
          }
        }
      }
      w[i] = Consumer<kConfig, Variant>::template pack2<kConfig.dtype_out>(x[0], x[1]);
    }
    transpose_quad(w);  // now 8 consecutive elements: of block + t
    if (!rows.valid[r]) continue;
    Out* to = row + 8 * (block + t);
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = uint4{w[0], w[1], w[2], w[3]};
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        to[i] = Out{static_cast<unsigned short>(w[i / 2] >> (16 * (i % 2)))};
      }
    }
  }
  if (rows.valid[r] && t == 0) {
    store_lse<Variant>(params, rows.token[r], rows.qo_head[r], lse_of(state));
  }
}

// Writes this thread's row r as partial state `partial_row`: normalised float32.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_partial_row(const Params& params, int partial_row, int r,
                                    const SoftmaxState& state,
                                    const float (&o)[kConfig.head_dim_vo / 2]) {
  using Traits = VariantTraits<Variant>;
  const bool empty = Traits::kUseSoftmax && !(state.sum > 0.0f);
  const float scale = Traits::kUseSoftmax ? (empty ? 0.0f : 1.0f / state.sum) : 1.0f;
  float* row = params.partial_out + static_cast<i64>(partial_row) * kConfig.head_dim_vo;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < kConfig.head_dim_vo / 8; ++block) {
    const float x = o[4 * block + 2 * r], y = o[4 * block + 2 * r + 1];
    *reinterpret_cast<float2*>(row + 8 * block + 2 * t) =
        empty ? float2{0.0f, 0.0f} : float2{x * scale, y * scale};
  }
  if (Traits::kUseSoftmax && t == 0) params.partial_lse[partial_row] = lse_of(state);
}

// All consumer warpgroups call it, each for its own rows; `writes` is false for one whose rows were
// joined into another's.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_unit(const Sm90Call<Variant>& call, const Unit& unit,
                             const ThreadRows& rows, bool writes, const SoftmaxState (&state)[2],
                             const float (&o)[kConfig.head_dim_vo / 2], int* merge_flags) {
  const bool partial = unit.item->partial_row >= 0;
  if (writes) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!partial) {
        store_final_row<kConfig, Variant>(call.params, call.variant, rows, r, state[r], o);
      } else if (rows.valid[r]) {
        const int head = unit.kv_head - unit.item->kv_head_begin;
        store_partial_row<kConfig, Variant>(
            call.params, unit.item->partial_row + head * unit.item->num_rows + rows.row[r], r,
            state[r], o);
      }
    }
  }
  if (partial) {
    constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
    arrive_and_merge<kConfig, Variant>(call.params, call.variant, *call.params.plan, *unit.block,
                                       *unit.item, unit.kv_head, threadIdx.x, kThreads, merge_flags,
                                       [] { ptx::named_barrier(kMergeBarrier, kThreads); });
  }
}

}  // namespace plait::sm90
