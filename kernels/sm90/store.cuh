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
  // Elements i ... i + 3 of all threads lie side by side, 16 elements in the giver's rows of a
  // panel.
  const auto exchange = [&](int giver, int i) {
    unsigned char* panel = q + (i / 16 * kTileQ + 64 * giver) * kPanelRowBytes;
    return reinterpret_cast<float4*>(panel) + i % 16 / 4 * 128 + threadIdx.x % 128;
  };
  float scale[kSplit][2];  // of each warpgroup's output
#pragma unroll
  for (int i = 0; i < 2 * kSplit; ++i) scale[i / 2][i % 2] = 1.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    ptx::named_barrier(kJoinReady, kThreads);  // what was there has been read
    if (warpgroup > 0 && warpgroup < kSplit) {
#pragma unroll
      for (int i = 0; i < min(kPart, kCount - part * kPart); i += 4) {
        const float* o = &consumer.o[part * kPart + i];
        *exchange(warpgroup, i) = float4{o[0], o[1], o[2], o[3]};
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
    for (int i = 0; i < min(kPart, kCount - part * kPart); i += 4) {
      float* o = &consumer.o[part * kPart + i];
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] *= scale[0][e / 2];
#pragma unroll
      for (int giver = 1; giver < kSplit; ++giver) {
        const float4 given = *exchange(giver, i);
        o[0] += scale[giver][0] * given.x;
        o[1] += scale[giver][0] * given.y;
        o[2] += scale[giver][1] * given.z;
        o[3] += scale[giver][1] * given.w;
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

// Writes this thread's row r as final: 16 bytes a store, or, in kernels of few rows, 4, which NVRTC
// has done with sooner. o: normalised and scaled; zeros of an `empty` row, whatever the variant
// does to outputs.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_final_row(const Params& params, const typename Variant::Params& variant,
                                  const ThreadRows& rows, int r, const SoftmaxState& state,
                                  bool empty,
                                  const float (&o)[padded_dim(kConfig.head_dim_vo) / 2]) {
  using Traits = VariantTraits<Variant>;
  using Out = Storage<kConfig.dtype_out>;
  constexpr int kBlocks = kConfig.head_dim_vo / 8, kQuads = (kBlocks + 3) / 4;
  constexpr bool kFewRows = tile_q(kConfig) <= 64;
  const int t = threadIdx.x % 4;
  const bool exists = rows.valid[r] && has_row(params, rows.token[r]);
  Out* row = static_cast<Out*>(params.out) +
             out_offset(params.out_stride, rows.token[r], rows.qo_head[r]) + (kFewRows ? 2 : 8) * t;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    unsigned w[4] = {};  // columns 2 t and 2 t + 1 of four blocks
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int block = 4 * quad + i;
      if (block >= kBlocks) break;
      float x[2] = {o[4 * block + 2 * r], o[4 * block + 2 * r + 1]};
      if constexpr (Traits::kHasOutputTransform) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const OutputContext context{rows.request[r], rows.position[r], rows.qo_head[r],
                                      8 * block + 2 * t + e};
          if (!empty) x[e] = Variant::output_transform(variant, context, x[e]);
        }
      }
      w[i] = ptx::pack2<kConfig.dtype_out>(x[0], x[1]);
      if (kFewRows && exists) *reinterpret_cast<unsigned*>(row + 8 * block) = w[i];
    }
    if constexpr (kFewRows) continue;
    transpose_quad(w);  // now columns of block 4 quad + t
    if (exists && 4 * quad + t < kBlocks) {
      *reinterpret_cast<uint4*>(row + 32 * quad) = uint4{w[0], w[1], w[2], w[3]};
    }
  }
  if (exists && t == 0) store_lse<Variant>(params, rows.token[r], rows.qo_head[r], lse_of(state));
}

// Writes this thread's row r as partial state `partial_row`. o: normalised.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_partial_row(const Params& params, int partial_row, int r,
                                    const SoftmaxState& state,
                                    const float (&o)[padded_dim(kConfig.head_dim_vo) / 2]) {
  const int t = threadIdx.x % 4;
  float* row = params.partial_out + static_cast<i64>(partial_row) * kConfig.head_dim_vo + 2 * t;
#pragma unroll
  for (int block = 0; block < kConfig.head_dim_vo / 8; ++block) {
    *reinterpret_cast<float2*>(row + 8 * block) =
        float2{o[4 * block + 2 * r], o[4 * block + 2 * r + 1]};
  }
  if (VariantTraits<Variant>::kUseSoftmax && t == 0) {
    params.partial_lse[partial_row] = lse_of(state);
  }
}

// Tells of the unit's partial rows and merges those that are complete thereby. Telling takes its
// time, about 2 us of which nothing is read, and merging 3; so in kernels of few rows a CTA does it
// once for parts that follow one another.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void merge_unit(const Sm90Call<Variant>& call, const Unit& unit, const Unit& next,
                             Smem<kConfig>& smem) {
  const Params& params = call.params;
  const int group_size = params.group_size;
  const auto head_of = [&](int i) {
    const int t = unit.first_row / group_size + i;
    return TokenHead{token_of(*params.plan, unit.first_token, t), unit.kv_head};
  };
  const auto arrive = [&](int num_rows, auto head_of) {
    constexpr int kThreads = 128 * kConfig.num_consumer_warpgroups;
    const auto sync = [] { ptx::named_barrier(kMergeBarrier, kThreads); };
    arrive_and_merge<kConfig, Variant>(params, call.variant, *params.plan, head_of,
                                       unit.first_row % group_size, num_rows, threadIdx.x, kThreads,
                                       reinterpret_cast<int*>(smem.states), sync);
    sync();  // the next unit's states go where the scratch is
  };
  if constexpr (!merges_together(kConfig)) {
    arrive(unit.num_rows, head_of);
  } else {
    static_assert(kConfig.num_consumer_warpgroups == 1);
    Pending<kConfig>& pending = smem.pending[threadIdx.x / 32];
    const int lane = threadIdx.x % 32, rows_before = pending.num_rows;
    const int num_rows = rows_before + unit.num_rows;
#pragma unroll 1
    for (int i = lane; i * group_size < unit.num_rows; i += 32) {
      pending.heads[rows_before / group_size + i] = head_of(i);
    }
    // Where tiles hold no whole group there is one at a time.
    const bool waits = next.partial_row >= 0 && group_size <= kConfig.shapes[0].tile_q &&
                       num_rows <= kMergedTogether * group_size;
    __syncwarp();
    if (lane == 0) pending.num_rows = waits ? num_rows : 0;
    if (!waits) arrive(num_rows, [&](int i) { return pending.heads[i]; });
  }
}

// All consumer warpgroups call it, each for its rows row_begin ... of the unit; `writes` is false
// for one whose rows were joined into another's. next: the unit behind it.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void store_unit(const Sm90Call<Variant>& call, const Unit& unit, int row_begin,
                             bool writes, const SoftmaxState (&state)[2],
                             float (&o)[padded_dim(kConfig.head_dim_vo) / 2], const Unit& next,
                             Smem<kConfig>& smem) {
  constexpr bool kUseSoftmax = VariantTraits<Variant>::kUseSoftmax;
  const bool partial = unit.partial_row >= 0;
  if (writes) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Looked up again, and of one row at a time: registers are scarce.
      const ThreadRows rows = thread_rows(call.params, *call.params.plan, unit, nullptr, row_begin);
      const bool empty = kUseSoftmax && state[r].sum == 0.0f;
      const float scale = (partial ? 1.0f : output_scale<Variant, kConfig.dtype_kv>(call.params)) *
                          (kUseSoftmax ? reciprocal(state[r].sum) : 1.0f);
#pragma unroll
      for (int i = 0; i < kConfig.head_dim_vo / 2; i += 4) {
        o[i + 2 * r] = empty ? 0.0f : o[i + 2 * r] * scale;  // which may be NaN
        o[i + 2 * r + 1] = empty ? 0.0f : o[i + 2 * r + 1] * scale;
      }
      if (!partial) {
        store_final_row<kConfig, Variant>(call.params, call.variant, rows, r, state[r], empty, o);
      } else if (rows.valid[r]) {
        store_partial_row<kConfig, Variant>(call.params, unit.partial_row + rows.row[r], r,
                                            state[r], o);
      }
    }
  }
  if (partial) {
    if constexpr (tile_q(kConfig) > 64 || kConfig.consumer_registers <= 160) {  // few are left
#pragma unroll  // else the compiler keeps it through the merge: only the host knows that the next
      for (float& x : o) x = 0.0f;  // P V does not add to it
    }
    merge_unit<kConfig, Variant>(call, unit, next, smem);
  }
}

}  // namespace plait::sm90
