// How a unit leaves: warps lay down their softmax states and, 64 columns at a time, their output in
// shared memory, where K and V were; warps that split the keys of the same rows join there; rows
// are normalised and written, final or partial, side by side.
#pragma once
#include "host_device/fold.h"
#include "sm80/smem.cuh"
#include "sm80/softmax.cuh"
#include "tile/merge.cuh"
#include "tile/store_out.cuh"

namespace plait::sm80 {

// The states that the warps of row `row` of the tile have left become one, the first, and factors
// what each warp's output is multiplied with, so that their sum is the row's. Without softmax
// outputs add.
template <int kSplit>
PLAIT_DEVICE void join_states(SoftmaxState* states, float* factors, int tile_q, int row) {
  SoftmaxState joined;
#pragma unroll
  for (int i = 0; i < kSplit; ++i) {
    joined.max_logit = max(joined.max_logit, states[i * tile_q + row].max_logit);
  }
  float factor[kSplit];
#pragma unroll
  for (int i = 0; i < kSplit; ++i) {
    const SoftmaxState& part = states[i * tile_q + row];
    factor[i] = part.max_logit == kNegInf ? 0.0f : exp2(part.max_logit - joined.max_logit);
    // An empty part adds 0, or the NaN of a NaN logit, which must not look like an empty set.
    joined.sum += part.max_logit == kNegInf ? part.sum : factor[i] * part.sum;
  }
  const float scale = joined.sum == 0.0f ? 0.0f : reciprocal(joined.sum);
#pragma unroll
  for (int i = 0; i < kSplit; ++i) factors[i * tile_q + row] = factor[i] * scale;
  states[row] = joined;
}

// This warp's part of slice `step`: rows block after block, columns within each.
template <KernelConfig kConfig, class Tile>
PLAIT_DEVICE void write_slice(const Tile& tile, int step, float (*slice)[kSliceStride]) {
  constexpr int kSlices = (kConfig.head_dim_vo + kSliceCols - 1) / kSliceCols;
  constexpr int kRows = Tile::kRows / Tile::kRowBlocks;  // of a thread and block
  constexpr int kCount = Tile::kOutputsOfSlice;
#pragma unroll
  for (int at = 0; at < Tile::kRowBlocks * kSlices; ++at) {  // registers have no index
    if (at != step) continue;
    const int block = at / kSlices, first = at % kSlices * kCount;
#pragma unroll
    for (int r = block * kRows; r < (block + 1) * kRows; ++r) {
      float* to = slice[Tile::row(r) - Tile::row(block * kRows) + Tile::row(0) - Tile::first_row()];
#pragma unroll
      for (int i = 0; i < kCount && first + i < Tile::kOutputs; i += 2) {
        *reinterpret_cast<float2*>(&to[Tile::column(i)]) =
            float2{tile.o[r][first + i], tile.o[r][first + i + 1]};
      }
    }
  }
}

// Invariant mode: what a CTA keeps of its rows between their chunks. An element's thread is the
// same for all chunks; states are read by all, behind a barrier.
template <KernelConfig kConfig>
struct Folds {
  float* out;          // [rows, head_dim_vo]
  FoldedState* state;  // [rows]
  PLAIT_DEVICE explicit Folds(const Params& params)
      : out(params.folds + i64{blockIdx.x} * fold_floats(kConfig)),
        state(reinterpret_cast<FoldedState*>(out + max_tile_q(kConfig) * kConfig.head_dim_vo)) {}
};

// is_first, is_last: of the item's chunks, whose fold is kept meanwhile; elsewhere both.
template <KernelConfig kConfig, class Variant, class Tile>
PLAIT_DEVICE void store_rows(const VariantCall<Variant>& call, Smem<kConfig>& smem,
                             const Tile& tile, const Softmax<Variant, Tile>& softmax, bool is_first,
                             bool is_last) {
  constexpr bool kUseSoftmax = VariantTraits<Variant>::kUseSoftmax;
  constexpr int kDimVo = kConfig.head_dim_vo, kSplit = Tile::kSplit, kTileQ = Tile::kTileQ;
  constexpr int kBlockRows =
      Smem<kConfig>::kBlockRows < Tile::kRowsOfWarp ? Smem<kConfig>::kBlockRows : Tile::kRowsOfWarp;
  const Params& params = call.params;
  const PlanView& plan = *params.plan;
  const WorkItem& item = plan.items[smem.unit.item_index];
  const int num_rows = smem.unit.num_rows;
  const bool partial = item.partial_row >= 0;
  constexpr bool kFolds = kConfig.chunk_keys > 0;
  static_assert(!kFolds || kSplit == 1, "in invariant mode no warps split keys");
  const i64 partial_row = item.partial_row + static_cast<i64>(smem.unit.head) * num_rows;
  if constexpr (kUseSoftmax) {
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      const SoftmaxState state = softmax.state(r);
      if (Tile::owns_row()) smem.states[Tile::split() * kTileQ + Tile::row(r)] = state;
    }
    __syncthreads();
#pragma unroll 1
    for (int row = threadIdx.x; row < kTileQ; row += num_threads(kConfig)) {
      join_states<kSplit>(smem.states, smem.factors, kTileQ, row);
      if (row >= num_rows) break;
      float lse = lse_of(smem.states[row]);
      if constexpr (kFolds) {
        FoldedState& state = Folds<kConfig>(params).state[row];
        if (is_first) state = {};
        const FoldFactors factors = fold(state, lse);
        smem.states[row] = {factors.before, factors.chunk};
        if (!is_last) continue;
        lse = fold_lse(state);
      }
      if (partial) {
        params.partial_lse[partial_row + row] = lse;
      } else {
        store_lse<Variant>(params, smem.rows[row].token, smem.rows[row].qo_head, lse);
      }
    }
  }
  __syncthreads();  // that is there, and the last tile is read
  // Warps that share the rows share their storing, four columns a lane.
  constexpr int kSlices = (kDimVo + kSliceCols - 1) / kSliceCols, kGroups = kSliceCols / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto meet = [] {
    if constexpr (kSplit == 1)
      __syncwarp();
    else
      __syncthreads();
  };
#pragma unroll 1
  for (int step = 0; step < Tile::kRowBlocks * kSlices; ++step) {
    const int col = lane % kGroups * 4, dim = step % kSlices * kSliceCols + col;
    const int first_row = Tile::first_row() + step / kSlices * kBlockRows;
    meet();  // the slice before is read
    write_slice<kConfig>(tile, step, smem.slices[warp].x);
    meet();
    const int end = dim < kDimVo ? min(kBlockRows, num_rows - first_row) : 0;
#pragma unroll 1
    for (int i = lane / kGroups + 32 / kGroups * Tile::split(); i < end;
         i += 32 / kGroups * kSplit) {
      const int row = first_row + i;
      float x[4] = {};
#pragma unroll
      for (int part = 0; part < kSplit; ++part) {
        const float factor = kUseSoftmax ? smem.factors[part * kTileQ + row] : 1.0f;
        const float4 y = *reinterpret_cast<const float4*>(
            &smem.slices[part * Tile::kRowWarps + warp % Tile::kRowWarps].x[i][col]);
        if (factor == 0.0f) continue;  // its output may hold NaN
        x[0] += factor * y.x;
        x[1] += factor * y.y;
        x[2] += factor * y.z;
        x[3] += factor * y.w;
      }
      bool empty = kUseSoftmax && smem.states[row].sum == 0.0f;
      if constexpr (kFolds) {
        const Folds<kConfig> folds(params);
        float4& kept = *reinterpret_cast<float4*>(&folds.out[row * kDimVo + dim]);
        const float4 before = is_first ? float4{0, 0, 0, 0} : kept;
        const float before_of[4] = {before.x, before.y, before.z, before.w};
        const FoldFactors factors{smem.states[row].max_logit, smem.states[row].sum};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = kUseSoftmax ? fold(factors, before_of[e], x[e]) : before_of[e] + x[e];
        }
        if (!is_last) {
          kept = float4{x[0], x[1], x[2], x[3]};
          continue;
        }
        FoldedState state;
        if constexpr (kUseSoftmax) state = folds.state[row];
        empty = kUseSoftmax && state.sum == 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = folded(x[e], kUseSoftmax ? fold_scale(state) : 1.0f);
      }
      if (partial) {
        store4<true>(params.partial_out + (partial_row + row) * kDimVo + dim, x);
      } else {
        store_out4<kConfig, Variant>(params, call.variant, plan, smem.rows[row].token,
                                     smem.rows[row].qo_head, dim, empty, x);
      }
    }
  }
}

}  // namespace plait::sm80
