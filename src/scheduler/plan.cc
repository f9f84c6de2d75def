// make_plan: row tiles, then the one loop that cuts, scores and compares, then the Plan.
// Source of Algorithm 1: FlashInfer (Ye et al., 2025, arXiv:2501.01005).
#include "plait/plan.h"

#include <algorithm>
#include <utility>

#include "host_device/shares.h"
#include "plait/error.h"
#include "scheduler/scheduler.h"

namespace plait {
namespace {

using scheduler::CostModel;
using scheduler::Cuts;
using scheduler::Score;
using scheduler::Scratch;

// Candidates this near to the best or to the lower bound are as good: what the model does not see
// (L2, clocks) is larger. Where several tiles read the same keys, longest first keeps the CTAs on
// the same keys at the same time, which is worth more.
constexpr double kNearlyEqual = 0.01, kNearlyEqualSharedKeys = 0.03;
constexpr double kCloseToBound = 0.03;

// Rows up to which a tile is bound by memory. Where a batch of such tiles is long enough for a
// queue it is taken without more ado: the model knows nothing of what it is for, that CTAs run at
// different speeds, each at its own, and go no faster when others are through. (On an H200 a GPC's
// multiprocessors share its bandwidth, and some GPCs have fewer: every sixth CTA reads 21.5
// bytes/ns, the rest 16.9.)
constexpr int kFewRows = 64;

enum class Way { kLongestFirst, kEqualShares, kPrefixSum, kWithQueue, kLargeThenFill };

struct Recipe {
  const char* name;
  Way way;
  int chunk;  // of longest first; 0: unsplit. With a queue: its percentage
  bool equalised;
};

struct Workload {
  double lower_bound_us;  // no plan is modelled faster
  bool keys_are_shared;   // most of the work is in row blocks of several tiles (prefill)
  bool is_mixed;          // tiles of both shapes, each token in one of them
  bool wants_queue;
  bool has_few_heads;      // CTAs run one or two pieces each
  int longest_keys;        // of a tile
  double longest_head_us;  // of a tile and kv head, unsplit
};

Workload describe(const std::vector<RowTile>& tiles, const CostModel& model, int num_levels) {
  bool has_shape[2] = {};
  i64 total_ps = 0, shared_ps = 0, piece_ps = 0, head_ps = 0;
  int longest_keys = 0, most_rows = 0;
  i64 keys = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const RowTile& tile = tiles[i];
    const i64 ps = tile.head_ps * (tile.seen() == 0 ? 1 : model.rules.num_kv_heads);
    total_ps += ps;
    piece_ps = std::max(piece_ps, smallest_piece_ps(tile, model.shapes[tile.shape], model.rules));
    longest_keys = std::max(longest_keys, tile.seen());
    most_rows = std::max(most_rows, tile.num_rows);
    keys += tile.seen();
    has_shape[tile.shape] = true;
    head_ps = std::max(head_ps, tile.head_ps);
    if ((i > 0 && tiles[i - 1].row_block == tile.row_block) ||
        (i + 1 < tiles.size() && tiles[i + 1].row_block == tile.row_block)) {
      shared_ps += ps;
    }
  }
  // All work spread evenly as if splits were free; and somebody runs the dearest smallest piece.
  const bool once = num_levels == 1 && model.group_size <= model.tile_q[0];
  const bool keys_are_shared = shared_ps * 2 > total_ps;
  const bool wants_queue =
      model.queue_percent > 0 && once && !keys_are_shared && most_rows <= kFewRows &&
      keys * model.rules.num_kv_heads >= i64{model.min_keys_for_queue} * model.num_ctas &&
      total_ps < i64{1} << 46;  // fits LeastLoaded
  return {std::max(total_ps / model.num_ctas, piece_ps) * 1e-6,
          keys_are_shared,
          once && has_shape[0] && has_shape[1],
          wants_queue,
          static_cast<i64>(tiles.size()) * model.rules.num_kv_heads <= 2 * model.num_ctas,
          longest_keys,
          head_ps * 1e-6};
}

constexpr int kMaxRecipes = 32;  // chunks doubled up to 2^30, and unsplit

// Candidates in the order of preference; the loop may stop before the last. Returns how many.
int recipes(const std::vector<RowTile>& tiles, const CostModel& model, const Workload& workload,
            Scheduler scheduler, Recipe (&out)[kMaxRecipes]) {
  int n = 0;
  int chunk = scheduler::algorithm_1_chunk(tiles, model);
  if (scheduler == Scheduler::kLpt) {  // the first that fits: doubled, unsplit at last
    for (; chunk < workload.longest_keys; chunk *= 2) {
      out[n++] = {"algorithm_1", Way::kLongestFirst, chunk, false};
    }
    out[n++] = {"algorithm_1", Way::kLongestFirst, 0, false};
    return n;
  }
  const Recipe unsplit{"unsplit", Way::kLongestFirst, 0, false};
  if (scheduler == Scheduler::kUnsplit) {
    out[0] = unsplit;
    return 1;
  }
  if (scheduler == Scheduler::kPrefixSum) {
    out[0] = {"prefix_sum", Way::kPrefixSum, 0, false};
    return 1;
  }
  if (workload.keys_are_shared) out[n++] = unsplit;
  if (workload.is_mixed) out[n++] = {"large_then_fill", Way::kLargeThenFill, 0, false};
  if (workload.wants_queue) out[n++] = {"with_queue", Way::kWithQueue, model.queue_percent, false};
  out[n++] = {"equal_shares", Way::kEqualShares, 0, false};
  if (!workload.keys_are_shared) out[n++] = unsplit;
  if (chunk < workload.longest_keys) {
    out[n++] = {"algorithm_1", Way::kLongestFirst, chunk, false};
  }
  const auto add_equalised = [&](int keys) {
    if (keys < workload.longest_keys && keys >= model.rules.min_piece) {
      out[n++] = {"equalised", Way::kLongestFirst, keys, true};
    }
  };
  // Longer, so that what remains of a head is no piece of its own: for memory-bound kernels.
  if (workload.has_few_heads && model.num_sms > 0) {
    for (const int parts : {9, 10}) {
      add_equalised(round_up(static_cast<int>(i64{chunk} * parts / 8), model.rules.tile_kv));
    }
  }
  for (int i = 0; i < 2 && !workload.wants_queue; ++i) {
    chunk = round_up(chunk / 2, model.rules.tile_kv);
    add_equalised(chunk);
  }
  return n;
}

// A candidate and what it takes, by Score::rated_us.
struct Rated {
  int num_partial_rows;
  double us;
};

// True if `a` is to be taken rather than `b`: faster, where splitting must be worth `nearly_equal`.
bool better(const Rated& a, const Rated& b, double nearly_equal) {
  const double margin = 1 + nearly_equal;
  if (a.num_partial_rows > b.num_partial_rows) return a.us * margin < b.us;
  if (a.num_partial_rows < b.num_partial_rows) return a.us < b.us * margin;
  return a.us < b.us;
}

// Puts the items of each CTA one after the other. Of equal shares the parts of split heads come
// first, so that they are joined beside the loads of whole heads rather than at the end of all.
// Where the batch has both small (memory-bound) and
// large (compute-bound) tiles and they were dealt longest first, as many CTAs start with the small
// ones as their part of the work is, so that the two kinds run side by side from the start.
void write_items(const Cuts& cuts, const CostModel& model, Scratch& scratch, Plan& plan) {
  const int num_items = static_cast<int>(cuts.items.size());
  std::vector<int>& indptr = plan.cta_item_indptr;
  indptr.assign(model.num_ctas + 1, 0);
  for (const int cta : cuts.cta) {
    if (cta != scheduler::kQueued) ++indptr[cta + 1];
  }
  for (int cta = 0; cta < model.num_ctas; ++cta) indptr[cta + 1] += indptr[cta];
  plan.items.resize(num_items);
  if (cuts.order.empty()) {  // equal shares: list order is CTA order already
    std::copy(cuts.items.begin(), cuts.items.end(), plan.items.begin());  // the queue is last
    for (size_t i = 0; i < cuts.queue.size(); ++i) {
      plan.items[indptr[model.num_ctas] + i] = cuts.items[cuts.queue[i]];
    }
    for (int cta = 0; cta < model.num_ctas; ++cta) {
      const auto begin = plan.items.begin() + indptr[cta];
      const auto end = plan.items.begin() + indptr[cta + 1];
      if (end - begin > 1 && (end - 1)->partial_row >= 0) std::rotate(begin, end - 1, end);
    }
    return;
  }
  std::vector<int>& next = scratch.next;
  next.assign(indptr.begin(), indptr.end() - 1);
  i64 small_ps = 0, total_ps = 0;
  for (const int i : cuts.order) {
    const WorkItem& item = cuts.items[i];
    plan.items[next[cuts.cta[i]]++] = item;
    const i64 ps = scheduler::item_ps(item, plan.row_blocks[item.row_block], plan.visible, model);
    total_ps += ps;
    small_ps += item.shape > 0 ? ps : 0;
  }
  if (small_ps == 0 || small_ps == total_ps) return;
  const double small_part = static_cast<double>(small_ps) / total_ps;
  for (int cta = 0; cta < model.num_ctas; ++cta) {
    const bool small_first =
        static_cast<int>((cta + 1) * small_part) != static_cast<int>(cta * small_part);
    std::stable_partition(plan.items.begin() + indptr[cta], plan.items.begin() + indptr[cta + 1],
                          [&](const WorkItem& item) { return (item.shape > 0) == small_first; });
  }
}

// WorkItem::mask_begin of all items.
void find_mask_begins(const BsrView& view, const CostModel& model, Plan& plan) {
  if (view.request_mask_begin.empty()) return;
  for (WorkItem& item : plan.items) {
    const RowBlock& block = plan.row_blocks[item.row_block];
    const int first = item.first_row / model.group_size;
    const int last = (item.first_row + item.num_rows - 1) / model.group_size;
    for (int i = block.first_token + first; i <= block.first_token + last; ++i) {
      const int request = plan.token_request[plan.row_map.empty() ? i : plan.row_map[i]];
      item.mask_begin = std::min(item.mask_begin, view.request_mask_begin[request]);
    }
  }
}

}  // namespace

void make_plan(const BsrView& view, const Visibility& visible, const PlanTarget& target,
               Scheduler scheduler, Plan& plan) {
  thread_local Scratch scratch;
  const CostModel model = scheduler::cost_model(target);
  scheduler::check_window(visible);
  scheduler::make_row_tiles(view, visible, model, scratch, plan);
  const std::vector<RowTile>& tiles = scratch.tiles;
  const Workload workload = describe(tiles, model, plan.num_levels);
  const double nearly_equal = workload.keys_are_shared ? kNearlyEqualSharedKeys : kNearlyEqual;

  const double alone = model.num_sms > 0 ? kTenthsOfSpeedAlone / 10.0 : 1;
  Recipe list[kMaxRecipes];
  const int num_recipes = recipes(tiles, model, workload, scheduler, list);
  plan.candidates.clear();
  plan.chosen = -1;
  Rated best{};
  for (int i = 0; i < num_recipes; ++i) {
    const Recipe& recipe = list[i];
    if (plan.chosen >= 0 && recipe.way == Way::kLongestFirst && recipe.chunk == 0 &&
        workload.longest_head_us > best.us * (1 + nearly_equal) * alone) {
      continue;  // one head alone takes longer
    }
    Cuts& cuts = scratch.trial;
    PlanCandidate candidate{.name = recipe.name};
    if (recipe.way == Way::kLongestFirst) candidate.chunk = recipe.chunk;
    Rated rated{};
    if (recipe.way == Way::kWithQueue) {
      scheduler::cut_with_queue(tiles, model, recipe.chunk, scratch, cuts);
    } else if (recipe.way == Way::kEqualShares) {
      scheduler::cut_equal_shares(tiles, model, cuts);
    } else if (recipe.way == Way::kPrefixSum) {
      scheduler::cut_by_prefix_sum(tiles, model, cuts);
    } else if (recipe.way == Way::kLargeThenFill) {
      candidate.fits =
          scheduler::cut_large_then_fill(tiles, model, target.max_partial_rows, scratch, cuts);
    } else {
      candidate.fits = scheduler::cut_longest_first(tiles, model, recipe.chunk, recipe.equalised,
                                                    workload.keys_are_shared,
                                                    target.max_partial_rows, scratch, cuts);
    }
    if (candidate.fits) {
      if (model.chunk_keys > 0) scheduler::split_parts(plan.row_blocks, visible, model, cuts);
      scheduler::number_partial_rows(cuts);
      candidate.fits = cuts.num_partial_rows <= target.max_partial_rows;
    }
    candidate.num_partial_rows = cuts.num_partial_rows;
    if (candidate.fits) {
      const Score score = scheduler::score(cuts, plan.row_blocks, visible, model, scratch);
      candidate.num_items = static_cast<int>(cuts.items.size());
      candidate.makespan_us = score.makespan_us;
      candidate.balance = score.balance;
      rated = {cuts.num_partial_rows, score.rated_us};
    }
    const bool take = candidate.fits && (plan.chosen < 0 || better(rated, best, nearly_equal));
    plan.candidates.push_back(std::move(candidate));
    if (take) {
      plan.chosen = static_cast<int>(plan.candidates.size()) - 1;
      std::swap(scratch.trial, scratch.best);
      best = rated;
      const bool close = rated.us <= workload.lower_bound_us * (1 + kCloseToBound);
      if (close || scheduler == Scheduler::kLpt || recipe.way == Way::kWithQueue) break;
    }
  }
  check(plan.chosen >= 0, "plan: the fewest partial rows of any way to cut this batch are ",
        std::min_element(plan.candidates.begin(), plan.candidates.end(),
                         [](const PlanCandidate& a, const PlanCandidate& b) {
                           return a.num_partial_rows < b.num_partial_rows;
                         })
            ->num_partial_rows,
        ", but the workspace holds ", target.max_partial_rows,
        "; give larger bounds, or fewer levels over the same tokens");

  plan.num_ctas = model.num_ctas;
  plan.kv_bytes = target.kv_bytes;
  plan.cost_model = target.cost_model;
  plan.nodes.clear();
  plan.num_partial_rows = scratch.best.num_partial_rows;
  write_items(scratch.best, model, scratch, plan);
  find_mask_begins(view, model, plan);
  scheduler::make_merge_lists(scratch.best.items, model, plan);
}

Plan make_plan(const BsrView& view, const Visibility& visible, const PlanTarget& target,
               Scheduler scheduler) {
  Plan plan;
  make_plan(view, visible, target, scheduler, plan);
  return plan;
}

}  // namespace plait
