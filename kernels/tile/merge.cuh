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

// Does `source` hold head `g` of the group of `kv_head`; does it hold any head of the group?
// (Without branches, so that the fields are loaded together.)
PLAIT_HD bool is_in(int x, int begin, int count) {
  return static_cast<unsigned>(x - begin) < static_cast<unsigned>(count);
}
PLAIT_HD bool covers(const MergeSource& source, int kv_head) {
  return is_in(kv_head, source.kv_head_begin, source.num_heads);
}
PLAIT_HD bool covers(const MergeSource& source, int kv_head, int g) {
  return covers(source, kv_head) & is_in(g, source.first_group_head, source.num_group_heads);
}
PLAIT_HD int partial_row_of(const MergeSource& source, int kv_head, int g) {
  return source.partial_row + (kv_head - source.kv_head_begin) * source.rows_per_head +
         (g - source.first_group_head);
}

// The parts of a (token, kv head): how many, and the sources among which they are. A token's list
// has those of every kv head, of which a plan without levels has one after the other.
struct Parts {
  int count = 0;
  unsigned first = ~0u;
  int last = -1;
};

// Of `token`, by `num_lanes` lanes of a warp (a power of two), of which this is `lane`. Other lanes
// of the warp may look for another token's, or, with token < 0, for nobody's.
PLAIT_DEVICE Parts find_parts(const PlanView& plan, int token, int kv_head, int lane,
                              int num_lanes) {
  constexpr int kBatch = 4;  // loads in flight
  Parts parts;
  if (token >= 0) {
    const int end = plan.token_merge_indptr[token + 1];
#pragma unroll 1
    for (int i = plan.token_merge_indptr[token] + lane; i < end; i += kBatch * num_lanes) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int at = i + b * num_lanes;
        const bool is_part = (at < end) & covers(plan.merge_sources[min(at, end - 1)], kv_head);
        parts.count += is_part;
        const int found = is_part ? at : -1;
        parts.first = static_cast<unsigned>(found) < parts.first ? found : parts.first;
        parts.last = max(parts.last, found);
      }
    }
  }
#pragma unroll 1
  for (int step = num_lanes >> 1; step > 0; step >>= 1) {
    const unsigned first = __shfl_xor_sync(~0u, parts.first, step);
    parts.first = first < parts.first ? first : parts.first;
    parts.last = max(parts.last, __shfl_xor_sync(~0u, parts.last, step));
    parts.count += __shfl_xor_sync(~0u, parts.count, step);
  }
  return parts;
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
  const int num_tokens = (first_row + num_rows - 1) / group_size - first_token + 1;

  // This warp's rows, and their tokens (at most 32: a warp's share of a tile), a few lanes each.
  const int rows_of_warp = (num_tokens * group_size + num_warps - 1) / num_warps;
  const int row = thread / 32 * rows_of_warp;
  const int end_row = min(row + rows_of_warp, num_tokens * group_size);
  const int warp_token = row / group_size;
  const int lane_bits = __clz(max((end_row - 1) / group_size - warp_token, 0)) - 27;
  const int t = warp_token + (lane >> lane_bits);
  const int token = t * group_size < end_row ? token_of(plan, block_token, first_token + t) : -1;
  // What the plan says is read while the stores of partial rows are under way.
  const int lane_of_token = lane & ((1 << lane_bits) - 1);
  const Parts parts = find_parts(plan, token, kv_head, lane_of_token, 1 << lane_bits);

  // The row in hand: token of the warp's, head of the group; and how many there are from it on.
  int row_t = 0, g = row - warp_token * group_size, rows_left = end_row - row;
  // Its next sources, and the partial rows of a round, lane by lane.
  int source = static_cast<int>(__shfl_sync(~0u, parts.first, 0));
  int last_source = __shfl_sync(~0u, parts.last, 0);
  const auto source_of_lane = [&] {
    return plan.merge_sources[max(min(source + lane, last_source), 0)];
  };
  const auto row_of_lane = [&](const MergeSource& of_lane) {  // -1: none
    const bool is_part = (lane < kParts) & (source + lane <= last_source);
    const int row = partial_row_of(of_lane, kv_head, g);
    return is_part & covers(of_lane, kv_head, g) ? row : -1;
  };
  const MergeSource first_source = source_of_lane();

  sync();  // all partial rows are written before one thread releases them
  // One lane for each token whose first row is this warp's.
  if (token >= 0 && lane_of_token == 0 && t * group_size >= row) {
    unsigned* counter = params.arrived + static_cast<i64>(token) * params.num_kv_heads + kv_head;
    const bool is_last = ptx::arrive_acq_rel(counter) + 1 == static_cast<unsigned>(parts.count);
    if (is_last) *counter = 0;  // for the next run; nobody else arrives here in this one
    last[t] = is_last;
  }
  sync();  // hands the acquired parts on to every thread

  int partial_row = row_of_lane(first_source);
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
    const int qo_head = kv_head * group_size + g, lane_of_row = row_t << lane_bits;
    source += kParts;
    const bool done = source > last_source;
    rows_left -= done;
    g += done;
    const bool next_token = g == group_size;
    g = next_token ? 0 : g;
    row_t += next_token;
    const int lane_of_next = row_t << lane_bits & 31;
    const int first_of_next = static_cast<int>(__shfl_sync(~0u, parts.first, lane_of_next));
    source = done ? first_of_next : source;
    last_source = __shfl_sync(~0u, parts.last, lane_of_next);
    partial_row = row_of_lane(source_of_lane());

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
    if constexpr (kSides == 2) {  // both get the sum, and store every second chunk
      sum += __shfl_xor_sync(~0u, sum, 16);
      for (int c = 0; c < kChunks; ++c) {
        for (int e = 0; e < 4; ++e) out[c][e] += __shfl_xor_sync(~0u, out[c][e], 16);
      }
    }
    const int row_token = __shfl_sync(~0u, token, lane_of_row);
    const bool empty = kUseSoftmax && sum == 0.0f;
    const float inverse = kUseSoftmax ? reciprocal(sum) : 1.0f, scale = empty ? 0.0f : inverse;
    for (int c = 0; c < kChunks; c += kSides) {
      const int dim = 4 * kSideLanes * c + 4 * lane;
      if (dim >= kDim) break;
      float x[4];
      for (int e = 0; e < 4; ++e) {
        x[e] = (side == 0 ? out[c][e] : out[min(c + 1, kChunks - 1)][e]) * scale;
      }
      store_out4<kConfig, V>(params, variant, plan, row_token, qo_head, dim, empty, x);
    }
    // (-inf where the sum is 0)
    if (lane == 0) store_lse<V>(params, row_token, qo_head, (max_logit + log2(sum)) * kLn2);
  }
}

}  // namespace plait
