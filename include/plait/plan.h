// Plan: how one batch is cut into work items for a fixed number of CTAs. Pure host data and a pure
// host function: equal input gives an equal plan; no pointers; prints itself; any executor runs it.
#pragma once
#include <string>
#include <vector>

#include "plait/node_choice.h"
#include "plait/plan_data.h"

namespace plait {

// A batch as the planner sees it, whatever the format: src/formats makes it.
struct BsrView {
  std::vector<RowBlock> row_blocks;      // level after level
  std::vector<int> token_request, token_position;  // [tokens], by row of q
  std::vector<int> row_map;              // block token -> row of q; empty: identity
  std::vector<int> request_mask_begin;   // first key that custom mask bits cover; empty: no mask
  int num_levels = 1;
  int num_requests = 0;
};

// Modelled microseconds of one tile of `shape` over `keys` visible keys and one kv head:
//   fixed_us + keys * us_per_key. us_per_key is of the whole tile, however many rows it holds.
struct ShapeModel {
  int tile_q = 0;          // packed rows
  int key_split = 1;
  float fixed_us = 0;
  float us_per_key = 0;
};

// What the planner knows of the executor: from the Bounds and the device, never from the batch.
struct PlanTarget {
  int num_ctas = 1;
  int tile_kv = 64;             // pieces are multiples of it, but the last of a head
  int kv_align = 0;             // a window's keys begin at a multiple of it; 0: of tile_kv
  int chunk_keys = 0;           // invariant mode: cuts fall on multiples of this instead, and parts
                                //   of a head are an item for each; 0: off. A multiple of tile_kv
  int group_size = 1, num_kv_heads = 1;
  int num_shapes = 1;
  ShapeModel shapes[2];         // descending tile_q
  float merge_us = 0;           // modelled cost of one partial tile: writing, arriving, merging
  int max_partial_rows = 0;     // capacity of the workspace
  int min_split_keys = 0;       // no piece of a row's keys is shorter, but where a head ends or
                                //   what is queued of it begins
  long long cache_keys = 0;     // keys of one kv head that the last cache holds; 0: all there are
  int num_sms = 0;              // CTA c shares a multiprocessor with c + num_sms; 0: with none
  int queue_percent = 0;        // of the keys of few rows: left to whoever is free first; 0: none
  int min_queued_keys = 0;      // no piece of those is shorter, but where a head ends
  int min_keys_for_queue = 0;   // of the batch, heads times keys a CTA: with less there is no queue
  long long kv_bytes = 0;       // of a key and its value, all heads; for explain(). 0: unknown
  std::string cost_model = "given";  // where the costs come from; part of the plan
};

enum class Scheduler {
  kAuto,  // the candidate with the smallest modelled makespan
  kLpt,   // Algorithm 1 of the paper, forced
  kUnsplit,  // no list of keys is cut
  kPrefixSum,  // shares by prefix sums: what is planned of these lengths on the device
};

// One way to cut the batch, as scored.
struct PlanCandidate {
  std::string name;        // "with_queue", "equal_shares", "large_then_fill", "unsplit",
                           //   "algorithm_1", "equalised", "prefix_sum"
  int chunk = 0;           // keys a chunk; 0: not chunked
  int num_items = 0;
  int num_partial_rows = 0;
  float makespan_us = 0;   // busiest CTA
  float balance = 0;       // busiest CTA / mean, of modelled time
  bool fits = true;        // false: needs more partials than the workspace has, dropped
  bool operator==(const PlanCandidate&) const = default;
};

struct Plan {
  // Choices made.
  std::vector<PlanCandidate> candidates;   // those that were scored
  int chosen = 0;                          // index into candidates
  int num_ctas = 0, num_tokens = 0, num_requests = 0, num_levels = 1;
  int num_partial_rows = 0;
  long long total_keys = 0;                // sum over requests of the keys planned, visible or not
  Visibility visible;
  long long kv_bytes = 0;                  // PlanTarget::kv_bytes
  std::string cost_model;                  // PlanTarget::cost_model
  std::vector<NodeChoice> nodes;           // what compose_radix() decided; empty: not its levels
  // What executors read: see plan_data.h.
  std::vector<RowBlock> row_blocks;
  std::vector<WorkItem> items;             // in CTA order; then the queue: a CTA that is through
  std::vector<int> cta_item_indptr;        // [num_ctas + 1]     draws the next item of it
  std::vector<int> token_request, token_position, row_map;
  std::vector<int> merge_indptr;           // [lists + 1]; empty: nothing is split
  std::vector<int> merge_sources;          // in merge order: by level, then by key
  int lists_per_head = 1;                  // merge lists of a token and kv head
  int num_queued() const {
    return cta_item_indptr.empty() ? 0 : static_cast<int>(items.size()) - cta_item_indptr.back();
  }
  float balance() const { return candidates.empty() ? 1.0f : candidates[chosen].balance; }
  bool operator==(const Plan&) const = default;
};

// Cuts `view` for `target`. Every (row, visible key) is in exactly one item, every token in at
// least one item. Throws ArgumentError only for views that break the rules of plan_data.h.
Plan make_plan(const BsrView& view, const Visibility& visible, const PlanTarget& target,
               Scheduler scheduler = Scheduler::kAuto);
// The same into a plan whose memory is used again; unspecified where it throws.
void make_plan(const BsrView& view, const Visibility& visible, const PlanTarget& target,
               Scheduler scheduler, Plan& plan);

// When an item runs, by the cost model: microseconds after the CTAs have started.
struct ItemTime {
  int cta;  // that runs it; of a queued item, the one that would be free first
  double begin_us, end_us;
};
// The modelled times of plan.items, one each: a CTA runs its items without a pause, and the last
// ends at makespan_us of the candidate chosen. `target`: what the plan was made for, else throws
// ArgumentError where that can be told.
std::vector<ItemTime> timeline(const Plan& plan, const PlanTarget& target);

std::string to_string(const Plan& plan);  // a table of a few lines: choices, CTAs, items, merges

// What a plan shares: its nodes; of levels that compose_radix() did not make, those of their row
// blocks that have the rows of several requests (kGiven).
std::vector<NodeChoice> shared_nodes(const Plan& plan);
std::string explain(const Plan& plan);       // a table, a line a node: bytes, rows, tile, why
std::string explain_json(const Plan& plan);  // the same as one object

}  // namespace plait
