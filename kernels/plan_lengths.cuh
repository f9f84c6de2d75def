// Plans a batch whose lengths and tables lie on the device: what make_plan() does on the host with
// Scheduler::kPrefixSum, item for item, by the same cuts (host_device/shares.h). One CTA, so that
// no step waits for another one's memory; each step is a loop of all its threads.
#pragma once
#include "planner/cuts.cuh"
#include "planner/items.cuh"
#include "planner/list.cuh"
#include "planner/merge_lists.cuh"
#include "tile/begin.cuh"

namespace plait {

PLAIT_DEVICE void clear_counters(const PlanLengthsCall& call, int num_lists) {
#pragma unroll 1
  for (int i = threadIdx.x; i < call.num_tickets + num_lists; i += blockDim.x) call.counters[i] = 0;
}

PLAIT_DEVICE void write_head(const PlanLengthsCall& call, const Found& found) {
  if (threadIdx.x != blockDim.x / 64 * 32) return;  // of a warp that has little else to do
  PlanView head{};
  head.num_tokens = found.num_tokens;
  head.queue_begin = head.queue_end = found.num_items;
  head.lists_per_head = lists_per_head(call.tile_q[0], call.group_size);
  head.row_blocks = call.row_blocks;
  head.items = call.items;
  head.token_request = call.token_request;
  head.token_position = call.token_position;
  if (found.num_partial_rows > 0) {
    head.merge_indptr = call.merge_indptr;
    head.merge_sources = call.merge_sources;
  }
  head.tables[0] = call.lengths.table;
  *call.head = head;
}

// One CTA of whole warps.
PLAIT_DEVICE void plan_lengths(const PlanLengthsCall& call) {
  begin_kernel();
  Found found{};
  read_requests(call, found);
  measure_tiles(call, found);
  choose_cuts(call, found);
  number_items(call, found);
  const MergeLists merge_lists(call, found.num_tokens * call.rules.num_kv_heads *
                                         lists_per_head(call.tile_q[0], call.group_size));
  const bool joins = found.num_partial_rows > 0;
  if (joins) merge_lists.clear();
  __syncthreads();
  if (joins) merge_lists.count();
  write_items(call, found);
  write_head(call, found);
  clear_counters(call, joins ? merge_lists.num_lists() : 0);
  if (found.has_long_requests) write_tokens(call, found);
  if (!joins) return;
  __syncthreads();
  merge_lists.add_up();
  __syncthreads();
  merge_lists.write_sources();
}

}  // namespace plait

#undef PLAIT_CALLED
