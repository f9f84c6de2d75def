// How a unit leaves: warps lay down their softmax states and, 64 columns at a time, their output in
// shared memory, where K and V were; warps that split the keys of the same rows join there; rows
// are normalised and written, final or partial, side by side.
#pragma once
#include "sm80/smem.cuh"
#include "sm80/softmax.cuh"
#include "tile/merge.cuh"
#include "tile/store_out.cuh"

namespace plait::sm80 {

// Factors of the warps' outputs of one row, and the row's joined state. Without softmax outputs
// add.
template <int kSplit, bool kUseSoftmax>
struct JoinedRow {
  SoftmaxState state;
  float factors[kSplit];

  PLAIT_DEVICE JoinedRow(const SoftmaxState* states, int tile_q, int row) {
    if constexpr (!kUseSoftmax) {
#pragma unroll
      for (int i = 0; i < kSplit; ++i) factors[i] = 1.0f;
    } else {
#pragma unroll
      for (int i = 0; i < kSplit; ++i) {
        state.max_logit = max(state.max_logit, states[i * tile_q + row].max_logit);
      }
#pragma unroll
      for (int i = 0; i < kSplit; ++i) {
        const SoftmaxState& part = states[i * tile_q + row];
        factors[i] = part.max_logit == kNegInf ? 0.0f : exp2(part.max_logit - state.max_logit);
        // An empty part adds 0, or the NaN of a NaN logit, which must not look like an empty set.
        state.sum += part.max_logit == kNegInf ? part.sum : factors[i] * part.sum;
      }
      const float scale = state.sum == 0.0f ? 0.0f : reciprocal(state.sum);
#pragma unroll
      for (int i = 0; i < kSplit; ++i) factors[i] *= scale;
    }
  }
};

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

template <KernelConfig kConfig, class Variant, class Tile>
PLAIT_DEVICE void store_rows(const VariantCall<Variant>& call, Smem<kConfig>& smem,
                             const Tile& tile, const Softmax<Variant, Tile>& softmax) {
  constexpr bool kUseSoftmax = VariantTraits<Variant>::kUseSoftmax;
  constexpr int kDimVo = kConfig.head_dim_vo, kSplit = Tile::kSplit;
  constexpr int kBlockRows =
      Smem<kConfig>::kBlockRows < Tile::kRowsOfWarp ? Smem<kConfig>::kBlockRows : Tile::kRowsOfWarp;
  const Params& params = call.params;
  const PlanView& plan = *params.plan;
  const WorkItem& item = plan.items[smem.unit.item_index];
  const i64 partial_row = item.partial_row + static_cast<i64>(smem.unit.head) * item.num_rows;
  if constexpr (kUseSoftmax) {
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      const SoftmaxState state = softmax.state(params, r);
      if (Tile::owns_row()) smem.states[Tile::split() * Tile::kTileQ + Tile::row(r)] = state;
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kSlices = (kDimVo + kSliceCols - 1) / kSliceCols;
#pragma unroll 1
  for (int step = 0; step < Tile::kRowBlocks * kSlices; ++step) {
    const int block = step / kSlices, first = step % kSlices * kSliceCols;
    __syncthreads();  // what lay there is read: the last tile, or the slice before
    write_slice<kConfig>(tile, step, smem.slices[warp].x);
    __syncthreads();
    // Four columns a lane; warps that share the rows share their storing.
    constexpr int kGroups = kSliceCols / 4;
#pragma unroll 1
    for (int i = lane + 32 * Tile::split(); i < kBlockRows * kGroups; i += 32 * kSplit) {
      const int in_block = i / kGroups, dim = first + i % kGroups * 4;
      const int row = Tile::first_row() + block * kBlockRows + in_block;
      if (row >= item.num_rows || dim >= kDimVo) continue;
      const JoinedRow<kSplit, kUseSoftmax> joined(smem.states, Tile::kTileQ, row);
      float x[4] = {};
#pragma unroll
      for (int part = 0; part < kSplit; ++part) {
        if (joined.factors[part] == 0.0f) continue;  // its output may hold NaN
        const float4 y = *reinterpret_cast<const float4*>(
            &smem.slices[part * Tile::kRowWarps + warp % Tile::kRowWarps].x[in_block][dim - first]);
        x[0] += joined.factors[part] * y.x;
        x[1] += joined.factors[part] * y.y;
        x[2] += joined.factors[part] * y.z;
        x[3] += joined.factors[part] * y.w;
      }
      const RowInfo& info = smem.rows[row];
      if (item.partial_row < 0) {
        const bool empty = kUseSoftmax && joined.state.sum == 0.0f;
        store_out4<kConfig, Variant>(params, call.variant, plan, info.token, info.qo_head, dim,
                                     empty, x);
      } else {
        store4(params.partial_out + (partial_row + row) * kDimVo + dim, x);
      }
      if (dim == 0) {
        const float lse = lse_of(joined.state);
        if (item.partial_row < 0) {
          store_lse<Variant>(params, info.token, info.qo_head, lse);
        } else if constexpr (kUseSoftmax) {
          params.partial_lse[partial_row + row] = lse;
        }
      }
    }
  }
}

}  // namespace plait::sm80
