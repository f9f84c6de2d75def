// The merge of split rows inside the launch that computed them, once the last part of a (token, kv
// head) is finished: all its parts are joined in the order of the plan's list, whoever does it and
// in whatever order they were finished, so that the result's bits do not depend on it. The counters
// are zero again at the end. Shared by all kernels.
//
// Few rows are merged by the CTA that has arrived last. Many, which are complete at once (the last
// part of a prefix that many requests share), would keep it busy for long: they are merged by
// whoever claims them, it and CTAs with parts of the same lists, which linger for a while at their
// end. Nobody waits for anybody: who lingers gives up, and who has arrived last goes on until all
// that was complete is claimed.
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
    float lse[kAtOnce], part[kAtOnce][kChunks][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // behind the last one that again
      const int row = sources[min(first + i, num_sources - 1)] + head;
      lse[i] = kUseSoftmax ? ptx::load_relaxed(params.partial_lse + row) : 0.0f;
      for (int c = 0; c < kChunks; ++c) {
        const int dim = min(128 * c + 4 * lane, kDim - 4);
        ptx::load_relaxed(params.partial_out + i64{row} * kDim + dim, part[i][c]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= num_sources) break;
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

// Heads whose parts this CTA has left, and what is known of them: how many parts there are while
// some are missing, less than 0 once all are there, 0 once nothing is left to be done.
struct Claims {
  int* parts;    // [num_heads]
  int* claimed;  // [kMostClaims], then how many
  int num_heads, start;

  PLAIT_DEVICE int& num_claimed() { return claimed[kMostClaims]; }

  // By one warp: claims some of what is complete, from head `start` on; -1: there is nothing more
  // for this CTA. Of n heads of m parts it takes n / m, since as many CTAs may be after them.
  template <class ListOf>
  PLAIT_DEVICE void take(unsigned* arrived, bool lingers, ListOf list_of) {
    const int lane = threadIdx.x % 32;
    const unsigned below = (1u << lane) - 1;
    constexpr int kMostPolls = 24;  // of about 0.8 us each
#pragma unroll 1
    for (int poll = 0;; ++poll) {
      bool misses = false, left = false;
      int count = 0;
#pragma unroll 1
      for (int first = 0; first < num_heads && count == 0; first += 32) {
        const bool exists = first + lane < num_heads;
        const int i = exists ? (start + first + lane) % num_heads : 0;
        const int of_head = exists ? parts[i] : 0, all = of_head < 0 ? -of_head : of_head;
        unsigned* counter = arrived + list_of(i);
        bool complete = false, over = false;
        if (of_head < 0 || (lingers && of_head > 0)) {  // others may have been here
          const unsigned now = ptx::load_relaxed(counter);
          complete = now == static_cast<unsigned>(all);
          over = now == 0;
        }
        const unsigned all_complete = __ballot_sync(~0u, complete);
        const int leader = all_complete == 0 ? 0 : __ffs(all_complete) - 1;
        const int n = __popc(all_complete), m = max(__shfl_sync(~0u, all, leader), 1);
        const int most = min((n + m - 1) / m, kMostClaims);
        const bool takes = complete && __popc(all_complete & below) < most;
        const bool claims = takes && ptx::claim_acquire(counter, static_cast<unsigned>(all));
        const unsigned all_claimed = __ballot_sync(~0u, claims);
        if (claims) claimed[__popc(all_claimed & below)] = i;
        if (exists && of_head != 0) parts[i] = takes || over ? 0 : complete ? -all : of_head;
        count = __popc(all_claimed);
        misses |= __any_sync(~0u, of_head > 0 && !complete && !over) != 0;
        left |= __any_sync(~0u, complete) != 0;
      }
      const bool ends = !left && (!lingers || !misses || poll == kMostPolls);
      if (count > 0 || ends) {
        __syncwarp();
        if (lane == 0) num_claimed() = count > 0 ? count : -1;
        return;
      }
      if (!left) ptx::sleep_shortly();
    }
  }
};

// Tells that partial rows are written, and merges what is complete thereby: those of head_of(0),
// head_of(1), ..., each a TokenHead's group_size rows, or, where a tile holds no whole group, of
// head_of(0) those from `first_head` on; num_rows in all. Called by `num_threads` threads (a
// multiple of 32, warps whole, thread = 0 ... num_threads - 1) that together wrote those rows to
// global memory by plain stores; `sync()` is a barrier among just them. Stores by the async proxy
// (TMA) must have completed, and be fenced, before the call. `scratch`: shared memory of theirs,
// merge_scratch(TokenHeads) ints; may be used again when every thread has passed a later sync().
// lingers: the CTA has nothing else to do.
//
// A warp merges a run of rows, one after the other. The latency of its loads is what that costs:
// what the plan says of the next parts is requested together with the parts before them, and parts
// together with their LSEs.
template <KernelConfig kConfig, class V, class HeadOf, class Sync>
PLAIT_DEVICE void arrive_and_merge(const Params& params, const typename V::Params& variant,
                                   const PlanView& plan, HeadOf head_of, int first_head,
                                   int num_rows, int thread, int num_threads, int* scratch,
                                   bool lingers, Sync sync) {
  using Traits = VariantTraits<V>;
  constexpr bool kUseSoftmax = Traits::kUseSoftmax;
  constexpr int kDim = kConfig.head_dim_vo;
  // A side of the warp, all of it or half, loads every kSides-th part of a round. As many are in
  // flight as there are registers for.
  constexpr bool kManyRows = kConfig.shapes[0].tile_q > 64;
  constexpr bool kWgmma = kConfig.shapes[0].mma == Mma::kWgmma;
  constexpr bool kWide = kConfig.head_dim_qk > 128 || kDim > 128;
  constexpr int kSides = kManyRows ? 1 : 2, kSideLanes = 32 / kSides;
  constexpr int kChunks = (kDim + 4 * kSideLanes - 1) / (4 * kSideLanes);  // of 4 elements a lane
  constexpr bool kFunctors = Traits::kHasLogitsTransform || Traits::kHasLogitsMask;
  constexpr bool kFewLeft = kManyRows || kWide || (kWgmma && kFunctors);
  constexpr bool kManyLeft = kWgmma && kConfig.consumer_registers > 160 && !Traits::kCustomMask;
  constexpr int kInFlight = kFewLeft ? 4 : kChunks == 1 ? 5 : kManyLeft ? 16 : kWgmma ? 8 : 10;
  constexpr int kSteps = (kInFlight + kChunks - 1) / kChunks, kParts = kSides * kSteps;
  constexpr int kHalf = kSteps > 5 ? kSteps / 2 : kSteps;  // most lists are short
  thread = ptx::known_from_here(thread);
  constexpr float kLowest = -3e38f;  // below any logit, and finite
  const int group_size = params.group_size, lane = thread % 32, side = lane / kSideLanes;
  const int num_warps = num_threads / 32;

  // This warp's rows, counted from the first token's first head on, and what of head_of each lane
  // has (they are at most 32). Its list is read while partial rows are being stored.
  int row, end_row, first_at, list_begin, list_end, list;
  bool has_rows;
  TokenHead of_lane;
  // The row in hand: of which lane, head of the group; and how many there are from it on. Its next
  // sources, and the partial rows of a round, lane by lane.
  int row_lane, g, rows_left, source, end_source, partial_row;
  // (Behind the last source another one of the list: loads without a condition, whose weight is 0.
  // Conditional ones ptxas may wait for one by one.)
  const auto row_of_lane = [&] {
    const int place = max(min(source + lane, end_source - 1), 0);
    return plan.merge_sources[place] + g - first_head;
  };
  const auto next_parts = [&](bool done) {  // of this row or of the next one
    source += kParts;
    rows_left -= done;
    g += done;
    const bool next_lane = g == group_size;
    g = next_lane ? 0 : g;
    row_lane += next_lane;
    const int begin_of_next = __shfl_sync(~0u, list_begin, row_lane & 31);
    source = done ? begin_of_next : source;
    end_source = __shfl_sync(~0u, list_end, row_lane & 31);
    partial_row = row_of_lane();
  };
  const auto share_out = [&](int rows, auto place_of) {
    const int rows_of_warp = (rows + num_warps - 1) / num_warps;
    row = first_head + thread / 32 * rows_of_warp;
    end_row = min(row + rows_of_warp, first_head + rows);
    first_at = row / group_size;
    const int at = first_at + lane;
    has_rows = at * group_size < end_row;
    of_lane = has_rows ? head_of(place_of(at)) : TokenHead{0, 0};
    list = merge_list<kConfig>(params, of_lane, first_head);
    list_begin = plan.merge_indptr[list];
    list_end = plan.merge_indptr[list + 1];
    row_lane = 0;
    g = row - first_at * group_size;
    rows_left = end_row - row;
    source = __shfl_sync(~0u, list_begin, 0);
    end_source = __shfl_sync(~0u, list_end, 0);
    partial_row = row_of_lane();
  };
  share_out(num_rows, [](int i) { return i; });

  sync();  // all partial rows are written before one thread releases them
  // Beyond two rows a warp others may help.
  const bool offers = !kManyRows && num_rows > 2 * num_warps;
  const int num_heads = (first_head + num_rows + group_size - 1) / group_size;
  Claims claims{scratch, scratch + num_heads, num_heads, 0};
  // One lane for each whose first row is this warp's.
  const int at = first_at + lane;
  int before = 0;  // how many had arrived
  if (has_rows && max(at * group_size, first_head) >= row) {
    unsigned* counter = params.arrived + list;
    const int parts = list_end - list_begin;
    before = static_cast<int>(offers ? ptx::arrive_acq_rel(counter)
                                     : ptx::arrive_and_wrap_acq_rel(counter, parts - 1u));
    claims.parts[at] = before + 1 == parts ? -parts : parts;
  }
  sync();  // hands the acquired parts on to every thread

#pragma unroll 1
  while (true) {
    if (offers) [[unlikely]] {
      if (thread < 32) {
        claims.start = __shfl_sync(~0u, before, 0) % num_heads;
        claims.take(params.arrived, lingers,
                    [&](int i) { return merge_list<kConfig>(params, head_of(i), first_head); });
      }
      sync();
      const int count = claims.num_claimed();
      if (count < 0) break;
      share_out(min(count * group_size, num_rows), [&](int i) { return claims.claimed[i]; });
    }
    const auto is_complete = [&](int i) { return offers || claims.parts[first_at + i] < 0; };
    if constexpr (kConfig.chunk_keys > 0) {
#pragma unroll 1
      for (int r = row; r < end_row; ++r) {
        const int i = r / group_size - first_at, group_head = r % group_size;
        const int begin = __shfl_sync(~0u, list_begin, i), end = __shfl_sync(~0u, list_end, i);
        const int token = __shfl_sync(~0u, of_lane.token, i);
        const int kv_head = __shfl_sync(~0u, of_lane.kv_head, i);
        if (!is_complete(i)) continue;
        fold_row<kConfig, V>(params, variant, plan, plan.merge_sources + begin, end - begin,
                             group_head - first_head, token, kv_head * group_size + group_head);
      }
      rows_left = 0;
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
      if (!is_complete(row_lane)) {
        next_parts(true);
        continue;
      }
      // Without softmax states add. An empty state has weight 0, and zeros.
      const bool is_part = (lane < kParts) & (source + lane < end_source);
      float weight = is_part ? 1.0f : 0.0f, logit = kNegInf;
      if constexpr (kUseSoftmax) {
        const float lse = ptx::load_relaxed(params.partial_lse + partial_row);
        logit = is_part ? lse : kNegInf;
      }
      float part[kSteps][kChunks][4];
      const bool has_second_half = kHalf < kSteps && source + kSides * kHalf < end_source;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i == kHalf && !has_second_half) break;
        const i64 offset = i64{__shfl_sync(~0u, partial_row, kSides * i + side)} * kDim;
        for (int c = 0; c < kChunks; ++c) {
          const float* columns =
              4 * kSideLanes * (c + 1) <= kDim ? first_columns + 4 * kSideLanes * c : last_columns;
          ptx::load_relaxed(columns + offset, part[i][c]);
        }
      }
      const int group_head = g, lane_of_row = row_lane;
      const bool done = source + kParts >= end_source;
      next_parts(done);

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
        if (i == kHalf && !has_second_half) break;
        const float part_weight = __shfl_sync(~0u, weight, kSides * i + side);
        sum += part_weight;
        for (int c = 0; c < kChunks; ++c) {
          for (int e = 0; e < 4; ++e) out[c][e] += part_weight * part[i][c][e];
        }
      }

      is_first = done;
      if (!done) continue;
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
    if (!offers) break;
    sync();  // what was claimed may be written over
  }
}

}  // namespace plait
