// How a unit leaves the consumers: warpgroups that split the keys join their states, then rows are
// normalised and written, final or partial, straight from the accumulator fragment.
#pragma once
#include "ptx/sync.cuh"
#include "sm90/compute.cuh"
#include "tile/merge.cuh"

namespace plait::sm90 {

// Joins the states of the same 64 rows of all warpgroups that split the keys into warpgroup 0's.
// All warpgroups call it. The output of warpgroup w goes through rows 64 w ... of Q's buffer `q`,
// of which the first 64 alone are in use, as much at a time as they hold.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void join_warpgroups(Consumer<kConfig, Variant>& consumer, unsigned char* q,
                                  SoftmaxState (&state)[2]) {
  constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
  constexpr int kCount = padded_dim(kConfig.head_dim_vo) / 2;
  constexpr int kPart = 16 * panels_of(kConfig.head_dim_qk), kParts = (kCount + kPart - 1) / kPart;
  constexpr int kTileQ = Smem<kConfig>::kTileQ, kSplit = key_split(kConfig);
  static_assert(kTileQ >= 64 * kSplit);
  const int warpgroup = threadIdx.x / 128;
  // Element i of all threads lie side by side, 16 elements in the giver's rows of each panel.
  const auto exchange = [&](int giver, int i) {
    unsigned char* panel = q + (i / 16 * kTileQ + 64 * giver) * kPanelRowBytes;
    return reinterpret_cast<float*>(panel) + i % 16 * 128 + threadIdx.x % 128;
  };
  float scale[kSplit][2];  // of each warpgroup's output
#pragma unroll
  for (int i = 0; i < 2 * kSplit; ++i) scale[i / 2][i % 2] = 1.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    ptx::named_barrier(kJoinReady, kThreads);  // what was there has been read
    if (warpgroup > 0 && warpgroup < kSplit) {
#pragma unroll
      for (int i = 0; i < min(kPart, kCount - part * kPart); ++i) {
        *exchange(warpgroup, i) = consumer.o[part * kPart + i];
      }
    }
    ptx::named_barrier(kJoinWritten, kThreads);
    if (warpgroup > 0) continue;
    if (part == 0 && VariantTraits<Variant>::kUseSoftmax) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int giver = 1; giver < kSplit; ++giver) {
          const OutputScales s = merge(state[r], consumer.state(r, giver));
#pragma unroll
          for (int before = 0; before < giver; ++before) scale[before][r] *= s.a;
          scale[giver][r] = s.b;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < min(kPart, kCount - part * kPart); ++i) {
      float& o = consumer.o[part * kPart + i];
      o *= scale[0][i / 2 % 2];
#pragma unroll
      for (int giver = 1; giver < kSplit; ++giver) {
        o += scale[giver][i / 2 % 2] * *exchange(giver, i);
      }
    }
  }
  __syncwarp();  // one lane arrives for all (release_q), whose loads must be done
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
                                  const float (&o)[padded_dim(kConfig.head_dim_vo) / 2]) {
  using Traits = VariantTraits<Variant>;
  using Out = Storage<kConfig.dtype_out>;
  constexpr int kBlocks = kConfig.head_dim_vo / 8, kQuads = (kBlocks + 3) / 4;
  const bool empty = Traits::kUseSoftmax && state.sum == 0.0f;
  const float scale = output_scale<Variant, kConfig.dtype_kv>(params) *
                      (Traits::kUseSoftmax ? (empty ? 0.0f : reciprocal(state.sum)) : 1.0f);
  const int t = threadIdx.x % 4;
  const bool exists = rows.valid[r] && has_row(params, rows.token[r]);
  Out* row = static_cast<Out*>(params.out) +
             out_offset(params.out_stride, rows.token[r], rows.qo_head[r]) + 8 * t;
  const bool aligned = reinterpret_cast<unsigned long long>(row) % 16 == 0;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    unsigned w[4] = {};  // columns 2 t and 2 t + 1 of four blocks
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int block = 4 * quad + i;
      if (block >= kBlocks) break;
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[e] = empty ? 0.0f : o[4 * block + 2 * r + e] * scale;
        if constexpr (Traits::kHasOutputTransform) {
          const OutputContext context{rows.request[r], rows.position[r], rows.qo_head[r],
                                      8 * block + 2 * t + e};
          if (!empty) x[e] = Variant::output_transform(variant, context, x[e]);
        }
      }
      w[i] = ptx::pack2<kConfig.dtype_out>(x[0], x[1]);
    }
    transpose_quad(w);  // now columns of block 4 quad + t
    if (!exists || 4 * quad + t >= kBlocks) continue;
    if (aligned) {
      *reinterpret_cast<uint4*>(row + 32 * quad) = uint4{w[0], w[1], w[2], w[3]};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        row[32 * quad + 2 * i] = Out{static_cast<unsigned short>(w[i])};
        row[32 * quad + 2 * i + 1] = Out{static_cast<unsigned short>(w[i] >> 16)};
      }
    }
  }
  if (!exists) return;
  if (t == 0) store_lse<Variant>(params, rows.token[r], rows.qo_head[r], lse_of(state));
}

// Writes this thread's row r as partial state `partial_row`: normalised float32.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_partial_row(const Params& params, int partial_row, int r,
                                    const SoftmaxState& state,
                                    const float (&o)[padded_dim(kConfig.head_dim_vo) / 2]) {
  using Traits = VariantTraits<Variant>;
  const bool empty = Traits::kUseSoftmax && state.sum == 0.0f;
  const float scale = Traits::kUseSoftmax ? (empty ? 0.0f : reciprocal(state.sum)) : 1.0f;
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
                             const float (&o)[padded_dim(kConfig.head_dim_vo) / 2],
                             int* merge_scratch) {
  const bool partial = unit.partial_row >= 0;
  if (writes) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!partial) {
        store_final_row<kConfig, Variant>(call.params, call.variant, rows, r, state[r], o);
      } else if (rows.valid[r]) {
        store_partial_row<kConfig, Variant>(call.params, unit.partial_row + rows.row[r], r,
                                            state[r], o);
      }
    }
  }
  if (partial) {
    constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
    const auto sync = [] { ptx::named_barrier(kMergeBarrier, kThreads); };
    arrive_and_merge<kConfig, Variant>(call.params, call.variant, *call.params.plan,
                                       unit.first_token, unit.first_row, unit.num_rows,
                                       unit.kv_head, threadIdx.x, kThreads, merge_scratch, sync);
    sync();  // the next unit's states go where the scratch is
  }
}

}  // namespace plait::sm90
