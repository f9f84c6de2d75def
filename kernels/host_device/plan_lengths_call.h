// The argument of kernels/plan_lengths.cuh, filled in by the CUDA backend.
#pragma once
#include "host_device/device_lengths.h"

namespace plait {

inline constexpr int kPlanLengthsThreads = 896;  // of its one CTA; of 1024 some would spill
inline constexpr int kMaxPlannedCtas = 640;      // that it cuts for

struct PlanLengthsCall {
  DeviceLengths lengths;
  Visibility visible;
  CutRules rules;
  ShapeCost shapes[2];
  int tile_q[2];
  int num_shapes, group_size, num_ctas, num_sms;  // num_sms: as in scheduler::CostModel
  // The plan: memory for all that the bounds allow (cuda/device_plan.h).
  PlanView* head;
  CtaStart* starts;  // [num_ctas]
  RowBlock* row_blocks;
  WorkItem* items;
  int *token_request, *token_position, *merge_indptr, *merge_sources;
  unsigned* counters;  // num_tickets, then those of arrivals, by merge list
  int num_tickets;
  int max_tiles;
  // Its own.
  i64* tile_end_ps;     // [max_tiles]
  int* block_tile_end;  // [requests]
};

}  // namespace plait
