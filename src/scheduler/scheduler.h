// What the steps of the planner hand to each other. In order:
//   row_tiles.cc    the view becomes row tiles: shapes, positions, keys really seen
//   candidates.cc   ways to cut the row tiles into items and to spread them over the CTAs
//   prefix_sum.cc   the one that the planner on the device knows
//   score.cc        modelled time of a finished list of items
//   plan.cc         the visible loop: cut, score, compare; then writes the Plan
//   merge_lists.cc  which partial states every token is joined from
//   split_parts.cc  invariant mode: parts of heads, chunk by chunk
#pragma once
#include <cstdint>
#include <vector>

#include "host_device/cut.h"
#include "plait/plan.h"

namespace plait::scheduler {

// PlanTarget in the units of cut.h.
struct CostModel {
  CutRules rules;
  ShapeCost shapes[2];
  int tile_q[2];
  int num_shapes, group_size, num_ctas;
  i64 cache_keys;
  int queue_percent, min_queued_keys, min_keys_for_queue;
  int num_sms;     // 0 but where multiprocessors have two CTAs
  int chunk_keys;  // as of PlanTarget: then rules.tile_kv, too
};
void check_window(const Visibility& visible);    // throws where positions could overflow
CostModel cost_model(const PlanTarget& target);  // throws ArgumentError on a target that is no GPU

// One candidate: items in list order (row tile, head, key), which is also the merge order.
struct Cuts {
  std::vector<WorkItem> items;
  std::vector<int> cta;    // of each item
  std::vector<int> order;  // items as their CTAs run them; empty: list order
  std::vector<int> queue;  // those of no CTA (kQueued), as they are drawn
  int num_partial_rows = 0;

  void clear() {
    items.clear();
    cta.clear();
    order.clear();
    queue.clear();
  }
};
inline constexpr int kQueued = -1;  // in place of a CTA

// A tile's row block in the list of all keys, block after block, head after head, in which they
// are gone through where they do not fit the cache together.
struct KeyPlace {
  i64 first;  // of the block's head 0
  int keys;   // of a head
};

// Memory of the planner, used again from plan to plan.
struct Scratch {
  std::vector<RowTile> tiles;
  std::vector<RowTile> joined_tiles;
  std::vector<RowTile> large_tiles, small_tiles, own_tiles;
  std::vector<KeyPlace> key_places;
  std::vector<int> token_mark, token_sources;
  Cuts trial, best;
  std::vector<i64> load;
  std::vector<std::uint64_t> keys, tree;
  std::vector<int> next;
};

// Cuts the rows of every block; fills plan.row_blocks, row_map and the token arrays. Afterwards
// every token is in at least one tile, and a token without any visible key in exactly one (per
// part of its group), which is empty.
void make_row_tiles(const BsrView& view, const Visibility& visible, const CostModel& model,
                    Scratch& scratch, Plan& plan);

// Equal shares: the list cut into num_ctas contiguous runs of about equal cost.
void cut_equal_shares(const std::vector<RowTile>& tiles, const CostModel& model, Cuts& cuts);

// The same from prefix sums (host_device/shares.h), as the planner on the device cuts.
void cut_by_prefix_sum(const std::vector<RowTile>& tiles, const CostModel& model, Cuts& cuts);

// Equal shares of most keys; the last ones of all heads, or of some, are a queue of pieces that
// grow shorter (guided self-scheduling), each for the CTA that is free first. For flat formats
// whose tokens are in one tile each: the items of a token are in the order of its keys. percent: of
// the keys, that are queued.
void cut_with_queue(const std::vector<RowTile>& tiles, const CostModel& model, int percent,
                    Scratch& scratch, Cuts& cuts);

// Chunks of `chunk` keys (0: unsplit), longest first onto the least loaded CTA, ties by index;
// where several tiles read the same keys (`keys_are_shared`), for one cacheful of keys after the
// other, so that each is fetched from memory once.
// False, with only cuts.num_partial_rows set, if they need more than `max_partial_rows`.
bool cut_longest_first(const std::vector<RowTile>& tiles, const CostModel& model, int chunk,
                       bool equalised, bool keys_are_shared, int max_partial_rows, Scratch& scratch,
                       Cuts& cuts);
// Large tiles (of the first shape) unsplit and longest first, one cacheful after the other; then
// small ones fill every CTA up to an equal share, as in cut_equal_shares. So a join is one of few
// rows. For flat formats, whose tokens are in one tile each: items are in list order but for this.
bool cut_large_then_fill(const std::vector<RowTile>& tiles, const CostModel& model,
                         int max_partial_rows, Scratch& scratch, Cuts& cuts);
// The chunk of Algorithm 1: keys of the whole list / number of CTAs.
int algorithm_1_chunk(const std::vector<RowTile>& tiles, const CostModel& model);

// Invariant mode: items that are parts of heads, of several chunks, become one for each chunk.
void split_parts(const std::vector<RowBlock>& row_blocks, const Visibility& visible,
                 const CostModel& model, Cuts& cuts);

// Numbers the partial rows of `cuts` (items marked by partial_row 0).
void number_partial_rows(Cuts& cuts);

// Fills plan.merge_indptr and merge_sources from items in merge order.
void make_merge_lists(const std::vector<WorkItem>& items, const CostModel& model, Plan& plan);

// Modelled cost of one finished item.
i64 item_ps(const WorkItem& item, const RowBlock& block, const Visibility& visible,
            const CostModel& model);

struct Score {
  float makespan_us = 0;  // busiest CTA
  float balance = 1;      // busiest CTA / mean
  double rated_us = 0;    // with what the pairs of a multiprocessor do to each other: is compared
};
Score score(const Cuts& cuts, const std::vector<RowBlock>& row_blocks, const Visibility& visible,
            const CostModel& model, Scratch& scratch);

}  // namespace plait::scheduler
