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
PLAIT_HD bool covers(const MergeSource& source, int kv_head) {
  return (kv_head >= source.kv_head_begin) & (kv_head < source.kv_head_begin + source.num_heads);
}
PLAIT_HD bool covers(const MergeSource& source, int kv_head, int g) {
  return covers(source, kv_head) & (g >= source.first_group_head) &
         (g < source.first_group_head + source.num_group_heads);
}
PLAIT_HD int partial_row_of(const MergeSource& source, int kv_head, int g) {
  return source.partial_row + (kv_head - source.kv_head_begin) * source.rows_per_head +
         (g - source.first_group_head);
}

// Of 32 sources of a token from the i-th of its list, lane by lane: the partial row of (kv_head,
// g), -1 where the source has none.
PLAIT_DEVICE int row_of_lane(const PlanView& plan, int i, int end, int kv_head, int g, int lane) {
  if (i + lane >= end) return -1;
  const MergeSource source = plan.merge_sources[i + lane];
  const int row = partial_row_of(source, kv_head, g);
  return covers(source, kv_head, g) ? row : -1;
}

// Where the parts of a row are, by the plan.
struct PartList {
  int begin, end;  // of the token's sources
  int row;         // of the first 32: row_of_lane
};

// The LSE of a partial row; -inf where there is no row.
template <class V>
PLAIT_DEVICE float lse_of_part(const Params& params, int row) {
  if (!VariantTraits<V>::kUseSoftmax || row < 0) return kNegInf;
  return ptx::load_relaxed(params.partial_lse + row);
}

// One warp joins the parts of (token, query head g of the group of kv_head). A head that no source
// covers was final already and is left alone. The latency of its loads is what a merge costs: the
// first parts are under way before anything is done with an LSE.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE void merge_row(const Params& params, const typename V::Params& variant,
                            const PlanView& plan, int token, int kv_head, int g,
                            const PartList& list, int lane) {
  constexpr bool kUseSoftmax = VariantTraits<V>::kUseSoftmax;
  constexpr int kDim = kConfig.head_dim_vo;
  constexpr int kSteps = (kDim + 127) / 128;   // of 32 lanes x 4 elements
  constexpr int kBatch = kSteps == 1 ? 4 : 2;  // parts in flight; with 4, d 256 compiles 5 % longer
  int first = list.begin, row = list.row;
  float logit = lse_of_part<V>(params, row);  // of this lane's source; in base 2 once it is used
  unsigned pending = __ballot_sync(0xffffffffu, row >= 0);
  float max_logit = kNegInf;  // base 2; of sources behind the first 32, until it is used
  bool any = row >= 0, max_is_known = false;
#pragma unroll 1
  for (int i = first + 32; i < list.end; i += 32) {
    const int later = row_of_lane(plan, i, list.end, kv_head, g, lane);
    max_logit = max(max_logit, lse_of_part<V>(params, later) * kLog2e);
    any |= later >= 0;
  }
  if (!__any_sync(0xffffffffu, any)) return;

  float sum = 0.0f;
  float out[kSteps][4] = {};
#pragma unroll 1
  while (true) {
    float parts[kBatch][kSteps][4];
    int from[kBatch];  // lanes
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      from[b] = pending != 0 ? __ffs(pending) - 1 : -1;
      pending &= pending - 1;
      // Where there is no part or element another is loaded, and not used: registers that are set
      // under a condition count as used in the whole kernel.
      const int source_row = max(__shfl_sync(0xffffffffu, row, from[b] & 31), 0);
      for (int s = 0; s < kSteps; ++s) {
        const int dim = min(128 * s + 4 * lane, kDim - 4);
        ptx::load_relaxed(params.partial_out + static_cast<i64>(source_row) * kDim + dim,
                          parts[b][s]);
      }
    }
    if (!max_is_known) {
      max_is_known = true;
      logit *= kLog2e;
      max_logit = max(max_logit, logit);
      for (int step = 16; step > 0; step /= 2) {
        max_logit = max(max_logit, __shfl_xor_sync(0xffffffffu, max_logit, step));
      }
    }
    // Without softmax states add. An empty state is skipped: it is the identity.
    const float weight = !kUseSoftmax       ? (row >= 0 ? 1.0f : 0.0f)
                         : logit == kNegInf ? 0.0f
                                            : exp2(logit - max_logit);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {  // in list order
      const float part_weight = __shfl_sync(0xffffffffu, weight, from[b] & 31);
      if (from[b] < 0 || part_weight == 0.0f) continue;
      sum += part_weight;
      for (int s = 0; s < kSteps; ++s) {
        for (int e = 0; e < 4; ++e) out[s][e] += part_weight * parts[b][s][e];
      }
    }
    if (pending != 0) continue;
    first += 32;
    if (first >= list.end) break;
    row = row_of_lane(plan, first, list.end, kv_head, g, lane);
    logit = lse_of_part<V>(params, row) * kLog2e;
    pending = __ballot_sync(0xffffffffu, row >= 0);
  }

  const int qo_head = kv_head * params.group_size + g;
  const bool empty = kUseSoftmax && sum == 0.0f;
  const float scale = kUseSoftmax ? (empty ? 0.0f : 1.0f / sum) : 1.0f;
  for (int s = 0; s < kSteps; ++s) {
    const int dim = 128 * s + 4 * lane;
    if (dim >= kDim) break;
    for (int e = 0; e < 4; ++e) out[s][e] *= scale;
    store_out4<kConfig, V>(params, variant, plan, token, qo_head, dim, empty, out[s]);
  }
  if (lane == 0) store_lse<V>(params, token, qo_head, lse_of({max_logit, sum}));
}

// Tells that the partial rows of (item, kv_head) are written, and merges what is complete thereby.
// The item: rows first_row ... of the row block that begins at its `block_token`.
// Called by `num_threads` threads (a multiple of 32, warps whole, thread = 0 ... num_threads - 1)
// that together wrote those rows to global memory by plain stores; `sync()` is a barrier among just
// them. Stores by the async proxy (TMA) must have completed, and be fenced, before the call.
// `last`: shared memory of theirs, an int for each token of a tile; may be used again when every
// thread has passed a later sync().
template <KernelConfig kConfig, class V, class Sync>
PLAIT_DEVICE void arrive_and_merge(const Params& params, const typename V::Params& variant,
                                   const PlanView& plan, int block_token, int first_row,
                                   int num_rows, int kv_head, int thread, int num_threads,
                                   int* last, Sync sync) {
  const int group_size = params.group_size, lane = thread % 32, num_warps = num_threads / 32;
  const int first_token = first_row / group_size;
  const int num_tokens = (first_row + num_rows - 1) / group_size - first_token + 1;
  const int end_row = num_tokens * group_size;
  const auto look_up = [&](int row) {
    if (row >= end_row) return PartList{};
    const int t = row / group_size;
    const int token = token_of(plan, block_token, first_token + t);
    const int begin = plan.token_merge_indptr[token], end = plan.token_merge_indptr[token + 1];
    return PartList{begin, end, row_of_lane(plan, begin, end, kv_head, row - t * group_size, lane)};
  };
  // What the plan says is read while the stores of partial rows are under way.
  PartList list = look_up(thread / 32);

  // A few lanes a token, a power of two, count the arrivals that its counter has to reach.
  int lane_bits = 5;
#pragma unroll 1
  while (lane_bits > 0 && num_tokens << lane_bits > num_threads) --lane_bits;
  const int num_lanes = 1 << lane_bits, lane_of_token = thread & (num_lanes - 1);
#pragma unroll 1
  for (int first = 0; first < num_tokens; first += num_threads >> lane_bits) {
    const int t = first + (thread >> lane_bits);
    const bool valid = t < num_tokens;
    const int token = valid ? token_of(plan, block_token, first_token + t) : 0;
    unsigned expected = 0;
    if (valid) {
      const int end = plan.token_merge_indptr[token + 1];
#pragma unroll 1
      for (int i = plan.token_merge_indptr[token] + lane_of_token; i < end; i += num_lanes) {
        expected += covers(plan.merge_sources[i], kv_head);
      }
    }
#pragma unroll 1
    for (int step = num_lanes / 2; step > 0; step /= 2) {
      expected += __shfl_xor_sync(0xffffffffu, expected, step);
    }
    if (first == 0) sync();  // all partial rows are written before one thread releases them
    if (valid && lane_of_token == 0) {
      unsigned* counter = params.arrived + static_cast<i64>(token) * params.num_kv_heads + kv_head;
      const bool is_last = ptx::arrive_acq_rel(counter) + 1 == expected;
      if (is_last) *counter = 0;  // for the next run; nobody else arrives here in this one
      last[t] = is_last ? token : -1;
    }
  }
  sync();  // hands the acquired parts on to every thread

#pragma unroll 1
  for (int row = thread / 32; row < end_row; row += num_warps) {
    const int t = row / group_size;
    if (last[t] >= 0) {
      merge_row<kConfig, V>(params, variant, plan, last[t], kv_head, row - t * group_size, list,
                            lane);
    }
    list = look_up(row + num_warps);
  }
}

}  // namespace plait
