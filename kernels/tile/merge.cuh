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
PLAIT_HD bool covers(const MergeSource& source, int kv_head) {
  return kv_head >= source.kv_head_begin && kv_head < source.kv_head_begin + source.num_heads;
}
PLAIT_HD bool covers(const MergeSource& source, int kv_head, int g) {
  return covers(source, kv_head) && g >= source.first_group_head &&
         g < source.first_group_head + source.num_group_heads;
}
PLAIT_HD int partial_row_of(const MergeSource& source, int kv_head, int g) {
  return source.partial_row + (kv_head - source.kv_head_begin) * source.rows_per_head +
         (g - source.first_group_head);
}

// Of 32 consecutive sources of a token, lane by lane: the partial row of (kv_head, g), -1 where the
// source has none, and its LSE in base 2.
struct SourceOfLane {
  int row = -1;
  float logit = kNegInf;
};
template <class V>
PLAIT_DEVICE SourceOfLane source_of_lane(const Params& params, const PlanView& plan, int i, int end,
                                         int kv_head, int g) {
  SourceOfLane mine;
  if (i < end) {
    const MergeSource source = plan.merge_sources[i];
    if (covers(source, kv_head, g)) {
      mine.row = partial_row_of(source, kv_head, g);
      if constexpr (VariantTraits<V>::kUseSoftmax) {
        mine.logit = ptx::load_relaxed(params.partial_lse + mine.row) * kLog2e;
      }
    }
  }
  return mine;
}

// One warp joins the parts of (token, query head g of the group of kv_head). A head that no source
// covers was final already and is left alone.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE void merge_row(const Params& params, const typename V::Params& variant,
                            const PlanView& plan, int token, int kv_head, int g, int lane) {
  constexpr bool kUseSoftmax = VariantTraits<V>::kUseSoftmax;
  constexpr int kDim = kConfig.head_dim_vo;
  constexpr int kSteps = (kDim + 127) / 128;  // of 32 lanes x 4 elements
  constexpr int kBatch = 4;  // parts in flight: their latency is what a merge costs
  const int begin = plan.token_merge_indptr[token], end = plan.token_merge_indptr[token + 1];

  float max_logit = kNegInf;  // base 2
  bool any = false;
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const SourceOfLane mine = source_of_lane<V>(params, plan, first + lane, end, kv_head, g);
    max_logit = max(max_logit, mine.logit);
    any |= mine.row >= 0;
  }
  if (!__any_sync(0xffffffffu, any)) return;
  for (int step = 16; step > 0; step /= 2) {
    max_logit = max(max_logit, __shfl_xor_sync(0xffffffffu, max_logit, step));
  }

  float sum = 0.0f;
  float out[kSteps][4] = {};
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const SourceOfLane mine = source_of_lane<V>(params, plan, first + lane, end, kv_head, g);
    // Without softmax states add. An empty state is skipped: it is the identity.
    const float weight = !kUseSoftmax            ? (mine.row >= 0 ? 1.0f : 0.0f)
                         : mine.logit == kNegInf ? 0.0f
                                                 : exp2(mine.logit - max_logit);
    unsigned pending = __ballot_sync(0xffffffffu, mine.row >= 0 && weight != 0.0f);
#pragma unroll 1
    while (pending != 0) {
      float weights[kBatch];
      float parts[kBatch][kSteps][4] = {};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int from = pending != 0 ? __ffs(pending) - 1 : -1;
        pending &= pending - 1;
        const int row = __shfl_sync(0xffffffffu, mine.row, from & 31);
        weights[b] = __shfl_sync(0xffffffffu, weight, from & 31);
        if (from < 0) weights[b] = 0.0f;
        for (int s = 0; s < kSteps; ++s) {
          const int dim = 128 * s + 4 * lane;
          if (from >= 0 && dim < kDim) {
            ptx::load_relaxed(params.partial_out + static_cast<i64>(row) * kDim + dim, parts[b][s]);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {  // in list order
        sum += weights[b];
        for (int s = 0; s < kSteps; ++s) {
          for (int e = 0; e < 4; ++e) out[s][e] += weights[b] * parts[b][s][e];
        }
      }
    }
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
// Called by `num_threads` threads (a multiple of 32, warps whole, thread = 0 ... num_threads - 1)
// that together wrote those rows to global memory by plain stores; `sync()` is a barrier among just
// them. Stores by the async proxy (TMA) must have completed, and be fenced, before the call.
// `last`: shared memory of theirs, an int for each token of a tile; may be used again when every
// thread has passed a later sync().
template <KernelConfig kConfig, class V, class Sync>
PLAIT_DEVICE void arrive_and_merge(const Params& params, const typename V::Params& variant,
                                   const PlanView& plan, const RowBlock& block,
                                   const WorkItem& item, int kv_head, int thread, int num_threads,
                                   int* last, Sync sync) {
  const int group_size = params.group_size;
  const int first_token = item.first_row / group_size;
  const int num_tokens = (item.first_row + item.num_rows - 1) / group_size - first_token + 1;

  sync();  // all partial rows are written before one thread releases them
  // A few lanes a token count the arrivals that its counter has to reach.
  int num_lanes = 32;
#pragma unroll 1
  while (num_lanes > 1 && num_lanes * num_tokens > num_threads) num_lanes /= 2;
  const int tokens_a_pass = num_threads / num_lanes;
#pragma unroll 1
  for (int first = 0; first < num_tokens; first += tokens_a_pass) {
    const int t = first + thread / num_lanes;
    const bool valid = t < num_tokens;
    const int token = valid ? token_of(plan, block, first_token + t) : 0;
    unsigned expected = 0;
    if (valid) {
      const int end = plan.token_merge_indptr[token + 1];
#pragma unroll 1
      for (int i = plan.token_merge_indptr[token] + thread % num_lanes; i < end; i += num_lanes) {
        expected += covers(plan.merge_sources[i], kv_head);
      }
    }
#pragma unroll 1
    for (int step = num_lanes / 2; step > 0; step /= 2) {
      expected += __shfl_xor_sync(0xffffffffu, expected, step);
    }
    if (valid && thread % num_lanes == 0) {
      unsigned* counter = params.arrived + static_cast<i64>(token) * params.num_kv_heads + kv_head;
      const bool is_last = ptx::arrive_acq_rel(counter) + 1 == expected;
      if (is_last) *counter = 0;  // for the next run; nobody else arrives here in this one
      last[t] = is_last ? token : -1;
    }
  }
  sync();  // hands the acquired parts on to every thread

  const int num_rows = num_tokens * group_size;
#pragma unroll 1
  for (int row = thread / 32; row < num_rows; row += num_threads / 32) {
    const int t = row / group_size;
    if (last[t] < 0) continue;
    merge_row<kConfig, V>(params, variant, plan, last[t], kv_head, row - t * group_size,
                          thread % 32);
  }
}

}  // namespace plait
