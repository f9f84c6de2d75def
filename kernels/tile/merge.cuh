// The merge of split rows inside the launch that computed them. Whoever finishes the last part of a
// (token, kv head) joins all its parts in the order of the plan's list, whatever the order in which
// they were finished: the result's bits do not depend on it. Nobody waits for anybody; the counters
// are zero again at the end. Shared by all kernels.
#pragma once
#include "host_device/softmax_state.h"
#include "ptx/memory_order.cuh"
#include "tile/rows.cuh"
#include "tile/store_out.cuh"

namespace plait {

// The merge list of a tile's rows of `token`. first_row: the tile's; says which part of the group
// they are, where that is split.
template <KernelConfig kConfig>
PLAIT_DEVICE int merge_list(const Params& params, int token, int kv_head, int first_row) {
  constexpr int kTileQ = kConfig.shapes[0].tile_q;
  const int place = token * params.num_kv_heads + kv_head;
  return place * lists_per_head(kTileQ, params.group_size) + first_row % params.group_size / kTileQ;
}

// Tells that the partial rows of (item, kv_head) are written, and merges what is complete thereby.
// The item: rows first_row ... of the row block that begins at its `block_token`.
// Called by `num_threads` threads (a multiple of 32, warps whole, thread = 0 ... num_threads - 1)
// that together wrote those rows to global memory by plain stores; `sync()` is a barrier among just
// them. Stores by the async proxy (TMA) must have completed, and be fenced, before the call.
// `last`: shared memory of theirs, an int for each token of a tile; may be used again when every
// thread has passed a later sync().
//
// A warp merges a run of rows, one after the other. The latency of its loads is what that costs:
// what the plan says of the next parts is requested together with the parts before them, and parts
// together with their LSEs.
template <KernelConfig kConfig, class V, class Sync>
PLAIT_DEVICE void arrive_and_merge(const Params& params, const typename V::Params& variant,
                                   const PlanView& plan, int block_token, int first_row,
                                   int num_rows, int kv_head, int thread, int num_threads,
                                   int* last, Sync sync) {
  constexpr bool kUseSoftmax = VariantTraits<V>::kUseSoftmax;
  constexpr int kDim = kConfig.head_dim_vo;
  // A side of the warp, all of it or half, loads every kSides-th part of a round. Accumulators of
  // the unit stay in their registers meanwhile: more in flight would spill.
  constexpr bool kManyRows = kConfig.shapes[0].tile_q > 64;
  constexpr bool kWide = kConfig.head_dim_qk > 128 || kDim > 128;
  constexpr int kSides = kManyRows ? 1 : 2, kSideLanes = 32 / kSides;
  constexpr int kChunks = (kDim + 4 * kSideLanes - 1) / (4 * kSideLanes);  // of 4 elements a lane
  constexpr int kInFlight = kManyRows || kWide ? 4 : kChunks == 1 ? 5 : 10;
  constexpr int kSteps = (kInFlight + kChunks - 1) / kChunks, kParts = kSides * kSteps;
  if constexpr (kConfig.shapes[0].mma != Mma::kWgmma) {
    thread = ptx::known_from_here(thread);
  }
  constexpr float kLowest = -3e38f;  // below any logit, and finite
  const int group_size = params.group_size, lane = thread % 32, side = lane / kSideLanes;
  const int num_warps = num_threads / 32;
  const int first_token = first_row / group_size;
  // Head of the first row, which is not 0 only where a tile holds no whole group.
  const int first_head = first_row - first_token * group_size;

  // This warp's rows, counted from the first token's, and the token of each lane (they are at most
  // 32: a warp's share of a tile) with its list. It is read while partial rows are being stored.
  const int rows_of_warp = (num_rows + num_warps - 1) / num_warps;
  const int row = first_head + thread / 32 * rows_of_warp;
  const int end_row = min(row + rows_of_warp, first_head + num_rows);
  const int warp_token = row / group_size, t = warp_token + lane;
  const int token = t * group_size < end_row ? token_of(plan, block_token, first_token + t) : -1;
  const int list = merge_list<kConfig>(params, max(token, 0), kv_head, first_row);
  const int list_begin = plan.merge_indptr[list], list_end = plan.merge_indptr[list + 1];

  // The row in hand: token of the warp's, head of the group; and how many there are from it on.
  int row_t = 0, g = row - warp_token * group_size, rows_left = end_row - row;
  // Its next sources, and the partial rows of a round, lane by lane.
  int source = __shfl_sync(~0u, list_begin, 0), end_source = __shfl_sync(~0u, list_end, 0);
  const auto row_of_lane = [&] {  // -1: none
    const bool is_part = (lane < kParts) & (source + lane < end_source);
    return is_part ? plan.merge_sources[source + lane] + g - first_head : -1;
  };
  int partial_row = row_of_lane();

  sync();  // all partial rows are written before one thread releases them
  // One lane for each token whose first row is this warp's.
  if (token >= 0 && max(t * group_size, first_head) >= row) {
    unsigned* counter = params.arrived + list;
    const bool is_last =
        ptx::arrive_acq_rel(counter) + 1 == static_cast<unsigned>(list_end - list_begin);
    if (is_last) *counter = 0;  // for the next run; nobody else arrives here in this one
    last[t] = is_last;
  }
  sync();  // hands the acquired parts on to every thread

  bool is_first = true;                // of a row's rounds
  float max_logit = 0.0f, sum = 0.0f;  // base 2
  float out[kChunks][4] = {};
  // This lane's in each row. The last chunk may end before the side does: then some load others'.
  const int column = 4 * (lane % kSideLanes);
  const float* first_columns = params.partial_out + column;
  const float* last_columns =
      params.partial_out + min(4 * kSideLanes * (kChunks - 1) + column, kDim - 4);
#pragma unroll 1
  while (rows_left > 0) {
    const bool complete = last[warp_token + row_t];
    partial_row = complete ? partial_row : -1;
    // Without softmax states add. An empty state has weight 0, and zeros.
    float weight = partial_row >= 0 ? 1.0f : 0.0f, logit = kNegInf;
    if constexpr (kUseSoftmax) {
      logit = ptx::load_relaxed_if(partial_row, params.partial_lse, kNegInf);
    }
    float part[kSteps][kChunks][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int from = __shfl_sync(~0u, partial_row, kSides * i + side);
      const i64 offset = i64{from} * kDim;
      for (int c = 0; c < kChunks; ++c) {
        const float* columns =
            4 * kSideLanes * (c + 1) <= kDim ? first_columns + 4 * kSideLanes * c : last_columns;
        ptx::load_relaxed_if(from, columns + offset, part[i][c]);
      }
    }

    // What comes next, of this row or of the next one.
    const int qo_head = kv_head * group_size + g, lane_of_row = row_t;
    source += kParts;
    const bool done = source >= end_source;
    rows_left -= done;
    g += done;
    const bool next_token = g == group_size;
    g = next_token ? 0 : g;
    row_t += next_token;
    const int begin_of_next = __shfl_sync(~0u, list_begin, row_t & 31);
    source = done ? begin_of_next : source;
    end_source = __shfl_sync(~0u, list_end, row_t & 31);
    partial_row = row_of_lane();

    float keep = 1.0f;
    if constexpr (kUseSoftmax) {
      logit *= kLog2e;
      const float before = is_first ? kLowest : max_logit;
      max_logit = max(before, logit);
#pragma unroll 1
      for (int step = 16; step > 0; step /= 2) {
        max_logit = max(max_logit, __shfl_xor_sync(~0u, max_logit, step));
      }
      keep = exp2(before - max_logit);
      weight = exp2(logit - max_logit);
    }
    sum = is_first ? 0.0f : sum * keep;
    for (int c = 0; c < kChunks; ++c) {
      for (int e = 0; e < 4; ++e) out[c][e] = is_first ? 0.0f : out[c][e] * keep;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float part_weight = __shfl_sync(~0u, weight, kSides * i + side);
      sum += part_weight;
      for (int c = 0; c < kChunks; ++c) {
        for (int e = 0; e < 4; ++e) out[c][e] += part_weight * part[i][c][e];
      }
    }

    is_first = done;
    if (!(done & complete)) continue;
    if constexpr (kSides == 2) sum += __shfl_xor_sync(~0u, sum, 16);
    const int row_token = __shfl_sync(~0u, token, lane_of_row);
    const bool empty = kUseSoftmax && sum == 0.0f;
    const float inverse = kUseSoftmax ? reciprocal(sum) : 1.0f, scale = empty ? 0.0f : inverse;
    for (int c = 0; c < kChunks; c += kSides) {
      float x[4];
      for (int e = 0; e < 4; ++e) {
        x[e] = out[c][e];
        if constexpr (kSides == 2) {  // each side gives the other one what that stores: every
          const float next = out[min(c + 1, kChunks - 1)][e];  // second chunk
          x[e] = (side == 0 ? x[e] : next) + __shfl_xor_sync(~0u, side == 0 ? next : x[e], 16);
        }
        x[e] *= scale;
      }
      const int dim = 4 * kSideLanes * c + 4 * lane;
      if (dim >= kDim) break;
      store_out4<kConfig, V>(params, variant, plan, row_token, qo_head, dim, empty, x);
    }
    // (-inf where the sum is 0)
    if (lane == 0) store_lse<V>(params, row_token, qo_head, (max_logit + log2(sum)) * kLn2);
  }
}

}  // namespace plait
