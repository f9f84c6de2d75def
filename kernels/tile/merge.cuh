// The merge of split rows inside the launch that computed them. Whoever finishes the last part of a
// (token, kv head) joins all its parts in the order of the plan's list, whatever the order in which
// they were finished: the result's bits do not depend on it. Nobody waits for anybody; the counters
// are zero again at the end. Shared by all kernels.
#pragma once
#include "host_device/fold.h"
#include "host_device/softmax_state.h"
#include "ptx/memory_order.cuh"
#include "tile/rows.cuh"
#include "tile/store_out.cuh"

namespace plait {

// The merge list of these rows. first_head: of the group, where tiles hold no whole one.
template <KernelConfig kConfig>
PLAIT_DEVICE int merge_list(const Params& params, const TokenHead& of, int first_head) {
  constexpr int kTileQ = kConfig.shapes[0].tile_q;
  const int place = of.token * params.num_kv_heads + of.kv_head;
  return place * lists_per_head(kTileQ, params.group_size) + first_head / kTileQ;
}

// The i-th of an item's `head`.
PLAIT_DEVICE TokenHead head_of_item(const Params& params, const PlanView& plan,
                                    const WorkItem& item, int head, int i) {
  const int first = plan.row_blocks[item.row_block].first_token;
  return {token_of(plan, first, item.first_row / params.group_size + i), item.kv_head_begin + head};
}

// Invariant mode: joins the parts of one row, chunk by chunk in the order of its list, and writes
// it. By a warp. sources: of the list; head: what is added to each for this row's head.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE void fold_row(const Params& params, const typename V::Params& variant,
                           const PlanView& plan, const int* sources, int num_sources, int head,
                           int token, int qo_head) {
  constexpr bool kUseSoftmax = VariantTraits<V>::kUseSoftmax;
  constexpr int kDim = kConfig.head_dim_vo, kChunks = (kDim + 127) / 128;  // of 4 elements a lane
  constexpr int kAtOnce = kChunks == 1 ? 4 : 2;                            // parts under way
  const int lane = threadIdx.x % 32;
  FoldedState state;
  float out[kChunks][4] = {};
#pragma unroll 1
  for (int first = 0; first < num_sources; first += kAtOnce) {
    int row[kAtOnce];
    float lse[kAtOnce], part[kAtOnce][kChunks][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = first + i < num_sources ? sources[first + i] + head : -1;
      lse[i] = kNegInf;
      if constexpr (kUseSoftmax) {
        lse[i] = ptx::load_relaxed_if(row[i], params.partial_lse, kNegInf);
      }
      for (int c = 0; c < kChunks; ++c) {
        const int dim = min(128 * c + 4 * lane, kDim - 4);
        ptx::load_relaxed_if(row[i], params.partial_out + i64{row[i]} * kDim + dim, part[i][c]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row[i] < 0) break;
      const FoldFactors factors = kUseSoftmax ? fold(state, lse[i]) : FoldFactors{1.0f, 1.0f};
      for (int c = 0; c < kChunks; ++c) {
        for (int e = 0; e < 4; ++e) {
          out[c][e] =
              kUseSoftmax ? fold(factors, out[c][e], part[i][c][e]) : out[c][e] + part[i][c][e];
        }
      }
    }
  }
  const bool empty = kUseSoftmax && state.sum == 0.0f;
  const float scale = kUseSoftmax ? fold_scale(state) : 1.0f;
  for (int c = 0; c < kChunks; ++c) {
    const int dim = 128 * c + 4 * lane;
    if (dim >= kDim) break;
    const float x[4] = {folded(out[c][0], scale), folded(out[c][1], scale),
                        folded(out[c][2], scale), folded(out[c][3], scale)};
    store_out4<kConfig, V>(params, variant, plan, token, qo_head, dim, empty, x);
  }
  if (lane == 0) store_lse<V>(params, token, qo_head, fold_lse(state));
}

// Tells that partial rows are written, and merges what is complete thereby: those of head_of(0),
// head_of(1), ..., each a TokenHead's group_size rows, or, where a tile holds no whole group, of
// head_of(0) those from `first_head` on; num_rows in all. Called by `num_threads` threads (a
// multiple of 32, warps whole, thread = 0 ... num_threads - 1) that together wrote those rows to
// global memory by plain stores; `sync()` is a barrier among just them. Stores by the async proxy
// (TMA) must have completed, and be fenced, before the call. `last`: shared memory of theirs, an
// int for each TokenHead; may be used again when every thread has passed a later sync().
//
// A warp merges a run of rows, one after the other. The latency of its loads is what that costs:
// what the plan says of the next parts is requested together with the parts before them, and parts
// together with their LSEs.
template <KernelConfig kConfig, class V, class HeadOf, class Sync>
PLAIT_DEVICE void arrive_and_merge(const Params& params, const typename V::Params& variant,
                                   const PlanView& plan, HeadOf head_of, int first_head,
                                   int num_rows, int thread, int num_threads, int* last,
                                   Sync sync) {
  using Traits = VariantTraits<V>;
  constexpr bool kUseSoftmax = Traits::kUseSoftmax;
  constexpr int kDim = kConfig.head_dim_vo;
  // A side of the warp, all of it or half, loads every kSides-th part of a round. Accumulators of
  // the unit stay in their registers meanwhile: more in flight would spill.
  constexpr bool kManyRows = kConfig.shapes[0].tile_q > 64;
  constexpr bool kWgmma = kConfig.shapes[0].mma == Mma::kWgmma;
  constexpr bool kWide = kConfig.head_dim_qk > 128 || kDim > 128;
  constexpr int kSides = kManyRows ? 1 : 2, kSideLanes = 32 / kSides;
  constexpr int kChunks = (kDim + 4 * kSideLanes - 1) / (4 * kSideLanes);  // of 4 elements a lane
  constexpr bool kFunctors = Traits::kHasLogitsTransform || Traits::kHasLogitsMask;
  constexpr bool kFewLeft = kManyRows || kWide || (kWgmma && kFunctors);
  constexpr int kInFlight = kFewLeft ? 4 : kChunks == 1 ? 5 : kWgmma ? 8 : 10;
  constexpr int kSteps = (kInFlight + kChunks - 1) / kChunks, kParts = kSides * kSteps;
  if constexpr (!kWgmma) {
    thread = ptx::known_from_here(thread);
  }
  constexpr float kLowest = -3e38f;  // below any logit, and finite
  const int group_size = params.group_size, lane = thread % 32, side = lane / kSideLanes;
  const int num_warps = num_threads / 32;

  // This warp's rows, counted from the first token's first head on, and what of head_of each lane
  // has (they are at most 32). Its list is read while partial rows are being stored.
  const int rows_of_warp = (num_rows + num_warps - 1) / num_warps;
  const int row = first_head + thread / 32 * rows_of_warp;
  const int end_row = min(row + rows_of_warp, first_head + num_rows);
  const int first_at = row / group_size, at = first_at + lane;
  const bool has_rows = at * group_size < end_row;
  const TokenHead of_lane = has_rows ? head_of(at) : TokenHead{0, 0};
  const int list = merge_list<kConfig>(params, of_lane, first_head);
  const int list_begin = plan.merge_indptr[list], list_end = plan.merge_indptr[list + 1];

  // The row in hand: of which lane, head of the group; and how many there are from it on.
  int row_lane = 0, g = row - first_at * group_size, rows_left = end_row - row;
  // Its next sources, and the partial rows of a round, lane by lane.
  int source = __shfl_sync(~0u, list_begin, 0), end_source = __shfl_sync(~0u, list_end, 0);
  const auto row_of_lane = [&] {  // -1: none
    const bool is_part = (lane < kParts) & (source + lane < end_source);
    return is_part ? plan.merge_sources[source + lane] + g - first_head : -1;
  };
  int partial_row = row_of_lane();

  sync();  // all partial rows are written before one thread releases them
  // One lane for each whose first row is this warp's.
  if (has_rows && max(at * group_size, first_head) >= row) {
    unsigned* counter = params.arrived + list;
    const bool is_last =
        ptx::arrive_acq_rel(counter) + 1 == static_cast<unsigned>(list_end - list_begin);
    if (is_last) *counter = 0;  // for the next run; nobody else arrives here in this one
    last[at] = is_last;
  }
  sync();  // hands the acquired parts on to every thread

  if constexpr (kConfig.chunk_keys > 0) {
#pragma unroll 1
    for (int r = row; r < end_row; ++r) {
      const int i = r / group_size - first_at, group_head = r % group_size;
      const int begin = __shfl_sync(~0u, list_begin, i), end = __shfl_sync(~0u, list_end, i);
      const int token = __shfl_sync(~0u, of_lane.token, i);
      const int kv_head = __shfl_sync(~0u, of_lane.kv_head, i);
      if (!last[first_at + i]) continue;
      fold_row<kConfig, V>(params, variant, plan, plan.merge_sources + begin, end - begin,
                           group_head - first_head, token, kv_head * group_size + group_head);
    }
    return;
  }
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
    const bool complete = last[first_at + row_lane];
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
    const int group_head = g, lane_of_row = row_lane;
    source += kParts;
    const bool done = source >= end_source;
    rows_left -= done;
    g += done;
    const bool next_lane = g == group_size;
    g = next_lane ? 0 : g;
    row_lane += next_lane;
    const int begin_of_next = __shfl_sync(~0u, list_begin, row_lane & 31);
    source = done ? begin_of_next : source;
    end_source = __shfl_sync(~0u, list_end, row_lane & 31);
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
    const int token = __shfl_sync(~0u, of_lane.token, lane_of_row);
    const int qo_head = __shfl_sync(~0u, of_lane.kv_head, lane_of_row) * group_size + group_head;
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
      store_out4<kConfig, V>(params, variant, plan, token, qo_head, dim, empty, x);
    }
    // (-inf where the sum is 0)
    if (lane == 0) store_lse<V>(params, token, qo_head, (max_logit + log2(sum)) * kLn2);
  }
}

}  // namespace plait
