// The modelled time of a list of work items. Every figure that a plan reports comes from here, from
// the items as they are, never from what a candidate meant to do.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "host_device/shares.h"
#include "plait/error.h"
#include "scheduler/least_loaded.h"
#include "scheduler/scheduler.h"

namespace plait::scheduler {

void check_window(const Visibility& visible) {
  // Positions are at least -2^30 and below 2^30 (row_tiles.cc), so that minus a window they fit an
  // int.
  constexpr int kMaxWindow = 1 << 30;
  check(visible.window_left <= kMaxWindow && visible.sink_tokens <= kMaxWindow,
        "plan: the window is ", visible.window_left, " keys with ", visible.sink_tokens,
        " sink tokens; at most ", kMaxWindow, " are taken of each");
}

CostModel cost_model(const PlanTarget& target) {
  check(target.num_ctas >= 1 && target.num_ctas <= kMaxCtas, "plan: target.num_ctas is ",
        target.num_ctas, ", must be 1 to ", kMaxCtas);
  check(target.tile_kv >= 1, "plan: target.tile_kv is ", target.tile_kv, ", must be at least 1");
  check(target.group_size >= 1 && target.num_kv_heads >= 1, "plan: target.group_size is ",
        target.group_size, " and num_kv_heads ", target.num_kv_heads, ", must be at least 1");
  check(target.num_shapes == 1 || target.num_shapes == 2, "plan: target.num_shapes is ",
        target.num_shapes, ", must be 1 or 2");
  CostModel model{};
  const auto picoseconds = [](float us) { return std::max<i64>(std::llround(us * 1e6), 0); };
  for (int i = 0; i < target.num_shapes; ++i) {
    const ShapeModel& shape = target.shapes[i];
    check(shape.tile_q >= 1 && (i == 0 || shape.tile_q < target.shapes[0].tile_q),
          "plan: target.shapes[", i, "].tile_q is ", shape.tile_q,
          ", must be at least 1 and descend");
    // A key costs something, else a budget would hold endless keys.
    model.shapes[i] = {picoseconds(shape.fixed_us),
                       std::max<i64>(picoseconds(shape.us_per_key), 1)};
    model.tile_q[i] = shape.tile_q;
  }
  check(target.chunk_keys >= 0 && target.chunk_keys % target.tile_kv == 0,
        "plan: target.chunk_keys is ", target.chunk_keys, ", must be a multiple of tile_kv, ",
        target.tile_kv, ", or 0");
  model.chunk_keys = target.chunk_keys;
  const int unit = target.chunk_keys > 0 ? target.chunk_keys : target.tile_kv;  // of cuts
  const int min_piece = std::max(round_up(target.min_split_keys, unit), unit);
  const int kv_align = target.kv_align == 0 || target.chunk_keys > 0 ? unit : target.kv_align;
  check(kv_align > 0 && unit % kv_align == 0, "plan: target.kv_align is ", target.kv_align,
        ", must be 0 or divide target.tile_kv, ", target.tile_kv);
  model.rules = {target.num_kv_heads, unit, kv_align, min_piece, picoseconds(target.merge_us)};
  model.num_shapes = target.num_shapes;
  model.group_size = target.group_size;
  model.num_ctas = target.num_ctas;
  model.cache_keys = target.cache_keys;
  check(target.queue_percent >= 0 && target.queue_percent <= 100, "plan: target.queue_percent is ",
        target.queue_percent, ", must be 0 to 100");
  model.queue_percent = target.queue_percent;
  const bool two_of_sm = target.num_ctas > target.num_sms && target.num_ctas <= 2 * target.num_sms;
  model.num_sms = two_of_sm ? target.num_sms : 0;
  model.min_queued_keys = std::max(round_up(target.min_queued_keys, unit), unit);
  model.min_keys_for_queue = target.min_keys_for_queue;
  return model;
}

i64 item_ps(const WorkItem& item, const RowBlock& block, const Visibility& visible,
            const CostModel& model) {
  const ShapeCost& shape = model.shapes[item.shape];
  if (item.kv_begin == item.kv_end) return shape.fixed_ps;
  int keys = item.kv_end - item.kv_begin;
  if (visible.window_left >= 0 && block.kv_pos_begin < visible.sink_tokens) {
    RowTile tile{};
    tile.min_position = item.min_position;
    tile.max_position = item.max_position;
    find_keys(visible, block, model.rules, tile);
    keys -= std::max(
        0, std::min(item.kv_end, tile.hidden_end) - std::max(item.kv_begin, tile.hidden_begin));
  }
  return item.num_heads * tile_ps(shape, model.rules, keys, item.partial_row >= 0);
}

namespace {

Score summarise(const std::vector<i64>& load) {
  i64 total = 0, busiest = 0;
  for (const i64 ps : load) {
    total += ps;
    busiest = std::max(busiest, ps);
  }
  if (total == 0) return {};
  return {static_cast<float>(busiest * 1e-6),
          static_cast<float>(static_cast<double>(busiest) * load.size() / total)};
}

// Time of the busiest multiprocessor, with the last join.
double paired_us(const std::vector<i64>& load, bool joins, int num_sms) {
  const int num_ctas = static_cast<int>(load.size());
  i64 most_ps = 0;
  for (int cta = 0; cta < num_sms; ++cta) {
    most_ps =
        std::max(most_ps, pair_ps(load[cta], cta + num_sms < num_ctas ? load[cta + num_sms] : 0));
  }
  return (most_ps + (joins ? kLastJoinPs : 0)) * 1e-6;
}

// Queued items 0 to num_items - 1, each to the CTA that is free first: take(i, cta) gives the cost.
template <class Take>
void draw(int num_items, std::vector<i64>& load, std::vector<std::uint64_t>& tree, Take take) {
  if (num_items == 0) return;
  LeastLoaded free_first(tree, load);
  for (int i = 0; i < num_items; ++i) {
    const int cta = free_first.next();
    const i64 ps = take(i, cta);
    free_first.give(static_cast<std::uint64_t>(ps));
    load[cta] += ps;
  }
}

}  // namespace

Score score(const Cuts& cuts, const std::vector<RowBlock>& row_blocks, const Visibility& visible,
            const CostModel& model, Scratch& scratch) {
  std::vector<i64>& load = scratch.load;
  load.assign(model.num_ctas, 0);
  const auto ps = [&](int i) {
    const WorkItem& item = cuts.items[i];
    return item_ps(item, row_blocks[item.row_block], visible, model);
  };
  for (int i = 0; i < static_cast<int>(cuts.items.size()); ++i) {
    if (cuts.cta[i] != kQueued) load[cuts.cta[i]] += ps(i);
  }
  draw(static_cast<int>(cuts.queue.size()), load, scratch.tree,
       [&](int i, int) { return ps(cuts.queue[i]); });
  Score score = summarise(load);
  score.rated_us = model.num_sms == 0 ? score.makespan_us
                                      : paired_us(load, cuts.num_partial_rows > 0, model.num_sms);
  return score;
}

}  // namespace plait::scheduler

namespace plait {

std::vector<ItemTime> timeline(const Plan& plan, const PlanTarget& target) {
  const scheduler::CostModel model = scheduler::cost_model(target);
  check(plan.num_ctas == model.num_ctas, "timeline: the plan is for ", plan.num_ctas,
        " CTAs, the target has ", model.num_ctas);
  std::vector<ItemTime> times(plan.items.size());
  std::vector<i64> load(model.num_ctas, 0);
  const auto run = [&](int i, int cta) {
    const WorkItem& item = plan.items[i];
    check(item.shape < model.num_shapes, "timeline: items[", i, "] has shape ", item.shape,
          ", the target ", model.num_shapes, " shapes");
    const i64 ps = scheduler::item_ps(item, plan.row_blocks[item.row_block], plan.visible, model);
    times[i] = {cta, load[cta] * 1e-6, (load[cta] + ps) * 1e-6};
    return ps;
  };
  for (int cta = 0; cta < model.num_ctas; ++cta) {
    for (int i = plan.cta_item_indptr[cta]; i < plan.cta_item_indptr[cta + 1]; ++i) {
      load[cta] += run(i, cta);
    }
  }
  const int first_queued = plan.cta_item_indptr.back();
  std::vector<std::uint64_t> tree;
  scheduler::draw(plan.num_queued(), load, tree,
                  [&](int i, int cta) { return run(first_queued + i, cta); });
  return times;
}

}  // namespace plait
