// The queue of a plan: its last items belong to no CTA and go to whoever is free, one by one, since
// CTAs of a GPU run at different speeds. Who executes an item changes no bit of the result. Shared
// by all kernels.
// Source: self-scheduling of loops (Polychronopoulos and Kuck, 1987, "Guided Self-Scheduling").
#pragma once
#include "host_device/config.h"
#include "ptx/memory_order.cuh"

namespace plait {

PLAIT_DEVICE bool has_queue(const Params& params) {
  return params.plan->queue_begin < params.plan->queue_end;
}

// Draws an item: its index, or -1 where none is left. By one thread, and no more by this CTA once
// that was -1: so every CTA of the grid draws one ticket beyond the queue, and whoever draws the
// last of them leaves the counter at 0 for the next run.
PLAIT_DEVICE int draw_item(const Params& params) {
  const PlanView& plan = *params.plan;
  const unsigned length = plan.queue_end - plan.queue_begin;
  if (length == 0) return -1;
  const unsigned ticket = ptx::add_relaxed(params.tickets);
  if (ticket == length + gridDim.x - 1) *params.tickets = 0;
  return ticket < length ? plan.queue_begin + static_cast<int>(ticket) : -1;
}

// The item that follows `item` - 1 in this CTA: one of its own, then drawn ones; -1: none. By all
// threads; `place`: an int of shared memory, which nobody has used since a barrier.
PLAIT_DEVICE int next_item(const Params& params, int item, int* place) {
  const CtaStart& start = params.starts[blockIdx.x];
  if (item < start.item_end) return item;
  if (!has_queue(params)) return -1;
  if (threadIdx.x == 0) *place = draw_item(params);
  __syncthreads();
  return *place;
}

}  // namespace plait
