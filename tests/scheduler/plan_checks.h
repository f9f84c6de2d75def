// Everything that must hold of a plan, checked by brute force against the view it was made from and
// the mask predicate alone. Any host test may use it: check_plan(view, visible, target, plan).
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "host_device/visibility.h"
#include "plait/plan.h"

namespace plait::testing {

inline int row_of_q(const Plan& plan, const RowBlock& block, int token) {
  const int i = block.first_token + token;
  return plan.row_map.empty() ? i : plan.row_map[i];
}

// Keys of an item's KV tiles that are not skipped: what the executor reads.
inline long long keys_read(const Plan& plan, const PlanTarget& target, const WorkItem& item) {
  const RowBlock& block = plan.row_blocks[item.row_block];
  long long keys = 0;
  for (int begin = item.kv_begin; begin < item.kv_end; begin += target.tile_kv) {
    const int end = std::min(begin + target.tile_kv, item.kv_end);
    if (tile_visibility(plan.visible, item.min_position, item.max_position,
                        block.kv_pos_begin + begin, block.kv_pos_begin + end - 1,
                        item.mask_begin) != TileVisibility::kSkip) {
      keys += end - begin;
    }
  }
  return keys;
}

inline double modelled_us(const Plan& plan, const PlanTarget& target, const WorkItem& item) {
  const ShapeModel& shape = target.shapes[item.shape];
  if (item.kv_begin == item.kv_end) return shape.fixed_us;
  return item.num_heads *
         (shape.fixed_us + keys_read(plan, target, item) * static_cast<double>(shape.us_per_key) +
          (item.partial_row >= 0 ? target.merge_us : 0));
}

inline void check_items(const Plan& plan, const PlanTarget& target) {
  ASSERT_EQ(plan.cta_item_indptr.size(), static_cast<size_t>(target.num_ctas + 1));
  ASSERT_EQ(plan.cta_item_indptr.front(), 0);
  ASSERT_LE(plan.cta_item_indptr.back(), static_cast<int>(plan.items.size()));  // then the queue
  ASSERT_TRUE(std::is_sorted(plan.cta_item_indptr.begin(), plan.cta_item_indptr.end()));
  for (const WorkItem& item : plan.items) {
    const RowBlock& block = plan.row_blocks.at(item.row_block);
    ASSERT_GE(item.shape, 0);
    ASSERT_LT(item.shape, target.num_shapes);
    ASSERT_LE(item.num_rows, target.shapes[item.shape].tile_q);
    for (int s = item.shape + 1; s < target.num_shapes; ++s) {
      ASSERT_GT(item.num_rows, target.shapes[s].tile_q) << "a smaller shape holds the rows";
    }
    ASSERT_GT(item.num_rows, 0);
    ASSERT_GE(item.first_row, 0);
    ASSERT_LE(item.first_row + item.num_rows, block.num_tokens * target.group_size);
    if (target.group_size <= target.shapes[0].tile_q) {
      ASSERT_EQ(item.first_row % target.group_size, 0);
      ASSERT_EQ(item.num_rows % target.group_size, 0);
    } else {
      ASSERT_EQ(item.first_row / target.group_size,
                (item.first_row + item.num_rows - 1) / target.group_size);
    }
    ASSERT_GE(item.kv_head_begin, 0);
    ASSERT_GT(item.num_heads, 0);
    ASSERT_LE(item.kv_head_begin + item.num_heads, target.num_kv_heads);
    ASSERT_EQ(item.kv_begin % (target.kv_align == 0 ? target.tile_kv : target.kv_align), 0);
    ASSERT_GE(item.kv_begin, 0);
    ASSERT_LE(item.kv_begin, item.kv_end);
    ASSERT_LE(item.kv_end, block.kv_len);
    int min_position = 1 << 30, max_position = -(1 << 30);
    for (int row = item.first_row; row < item.first_row + item.num_rows; ++row) {
      const int token = row_of_q(plan, block, row / target.group_size);
      min_position = std::min(min_position, plan.token_position[token]);
      max_position = std::max(max_position, plan.token_position[token]);
    }
    ASSERT_EQ(item.min_position, min_position);
    ASSERT_EQ(item.max_position, max_position);
  }
}

// Partial rows are disjoint, without gaps, within the workspace.
inline void check_partial_rows(const Plan& plan, const PlanTarget& target) {
  ASSERT_LE(plan.num_partial_rows, target.max_partial_rows);
  std::vector<int> writers(plan.num_partial_rows, 0);
  for (const WorkItem& item : plan.items) {
    if (item.partial_row < 0) {
      ASSERT_EQ(item.partial_row, -1);
      continue;
    }
    ASSERT_LE(item.partial_row + item.num_heads * item.num_rows, plan.num_partial_rows);
    for (int i = 0; i < item.num_heads * item.num_rows; ++i) ++writers[item.partial_row + i];
  }
  for (const int count : writers) ASSERT_EQ(count, 1);
}

// What one item computes of one row of one head.
struct Part {
  int level, kv_begin, kv_end;
  int partial_row;  // of this very row; -1: final
  int item;
};

// By (row of q, kv head, head within the group): the parts of all items, by level, then by key.
using Parts = std::map<std::tuple<int, int, int>, std::vector<Part>>;

inline Parts collect_parts(const Plan& plan, const PlanTarget& target) {
  Parts parts;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const WorkItem& item = plan.items[i];
    const RowBlock& block = plan.row_blocks[item.row_block];
    for (int h = 0; h < item.num_heads; ++h) {
      for (int r = 0; r < item.num_rows; ++r) {
        const int row = item.first_row + r;
        const int partial_row =
            item.partial_row < 0 ? -1 : item.partial_row + h * item.num_rows + r;
        parts[{row_of_q(plan, block, row / target.group_size), item.kv_head_begin + h,
               row % target.group_size}]
            .push_back({block.level, item.kv_begin, item.kv_end, partial_row, static_cast<int>(i)});
      }
    }
  }
  for (auto& entry : parts) {
    std::sort(entry.second.begin(), entry.second.end(), [](const Part& a, const Part& b) {
      return std::tie(a.level, a.kv_begin) < std::tie(b.level, b.kv_begin);
    });
  }
  return parts;
}

// Every (row, head) is in an item; every visible key of it in exactly one; no key in two.
inline void check_coverage(const BsrView& view, const Visibility& visible, const PlanTarget& target,
                           const Plan& plan, const Parts& parts) {
  const int num_tokens = static_cast<int>(view.token_position.size());
  std::vector<std::vector<const RowBlock*>> blocks_of(num_tokens);
  for (const RowBlock& block : view.row_blocks) {
    for (int i = block.first_token; i < block.first_token + block.num_tokens; ++i) {
      blocks_of[view.row_map.empty() ? i : view.row_map[i]].push_back(&block);
    }
  }
  ASSERT_EQ(plan.num_tokens, num_tokens);
  ASSERT_EQ(parts.size(), static_cast<size_t>(num_tokens) * target.num_kv_heads * target.group_size)
      << "some (token, head) is in no item";
  std::vector<char> count;
  for (const auto& [place, list] : parts) {
    const int token = std::get<0>(place);
    for (int level = 0; level < view.num_levels; ++level) {
      const RowBlock* block = nullptr;
      for (const RowBlock* b : blocks_of[token]) block = b->level == level ? b : block;
      count.assign(block == nullptr ? 0 : block->kv_len, 0);
      for (const Part& part : list) {
        if (part.level != level || part.kv_begin == part.kv_end) continue;
        ASSERT_LE(part.kv_end, static_cast<int>(count.size()));
        for (int k = part.kv_begin; k < part.kv_end; ++k) ++count[k];
      }
      for (int k = 0; k < static_cast<int>(count.size()); ++k) {
        const bool seen =
            plait::visible(visible, view.token_position[token], block->kv_pos_begin + k);
        ASSERT_TRUE(seen ? count[k] == 1 : count[k] <= 1)
            << "token " << token << " kv head " << std::get<1>(place) << " level " << level
            << " key " << k << " is in " << int{count[k]} << " items";
      }
    }
  }
}

// No piece is shorter than min_split_keys, but the last of a row's keys in a level and the last of
// those that are not queued; of those none is shorter than min_queued_keys.
inline void check_split_lengths(const PlanTarget& target, const Plan& plan, const Parts& parts) {
  for (const auto& entry : parts) {
    const std::vector<Part>& list = entry.second;
    for (size_t i = 0; i + 1 < list.size(); ++i) {
      if (list[i].level != list[i + 1].level) continue;
      const int first_queued = plan.cta_item_indptr.back();
      const bool queued = list[i].item >= first_queued,
                 queue_begins = list[i + 1].item >= first_queued;
      if (!queued && queue_begins) continue;
      ASSERT_TRUE(!queued || queue_begins) << "keys behind queued ones";
      ASSERT_GE(keys_read(plan, target, plan.items[list[i].item]),
                queued ? target.min_queued_keys : target.min_split_keys);
    }
  }
}

// The rows of a (token, kv head), or of each part of a group that tiles split, are final, by one
// item, and in no list; or all their items are partial and the list names exactly their partial
// rows, in order, one source an item.
inline void check_merge_lists(const PlanTarget& target, const Plan& plan, const Parts& parts) {
  const int tile_q = target.shapes[0].tile_q;
  const int per_head = (target.group_size + tile_q - 1) / tile_q;
  ASSERT_EQ(plan.lists_per_head, per_head);
  const size_t num_lists = static_cast<size_t>(plan.num_tokens) * target.num_kv_heads * per_head;
  if (plan.merge_indptr.empty()) {
    ASSERT_TRUE(plan.merge_sources.empty());
    ASSERT_EQ(plan.num_partial_rows, 0);
  } else {
    ASSERT_EQ(plan.merge_indptr.size(), num_lists + 1);
    ASSERT_EQ(plan.merge_indptr.front(), 0);
    ASSERT_EQ(plan.merge_indptr.back(), static_cast<int>(plan.merge_sources.size()));
    ASSERT_TRUE(std::is_sorted(plan.merge_indptr.begin(), plan.merge_indptr.end()));
  }
  for (size_t list = 0; list < num_lists; ++list) {
    const int place = static_cast<int>(list / per_head), part = static_cast<int>(list % per_head);
    const int token = place / target.num_kv_heads, head = place % target.num_kv_heads;
    std::vector<int> sources;
    if (!plan.merge_indptr.empty()) {
      sources.assign(plan.merge_sources.begin() + plan.merge_indptr[list],
                     plan.merge_sources.begin() + plan.merge_indptr[list + 1]);
    }
    std::set<int> items;
    for (int g = part * tile_q; g < std::min((part + 1) * tile_q, target.group_size); ++g) {
      const std::vector<Part>& found = parts.at({token, head, g});
      std::vector<int> rows, listed;
      for (const Part& p : found) {
        items.insert(p.item);
        if (p.partial_row >= 0) rows.push_back(p.partial_row);
      }
      for (const int source : sources) listed.push_back(source + g - part * tile_q);
      ASSERT_EQ(rows, listed) << "token " << token << " kv head " << head << " group head " << g;
      ASSERT_TRUE(rows.empty() ? found.size() == 1 : rows.size() == found.size())
          << "token " << token << " kv head " << head << " is both final and partial";
    }
    ASSERT_TRUE(sources.empty() || items.size() == sources.size());
  }
}

// Every item lies on its CTA's time line behind the one before, as long as it is modelled; each
// line ends at `load`, the last at the makespan.
inline void check_timeline(const PlanTarget& target, const Plan& plan,
                           const std::vector<double>& load) {
  const std::vector<ItemTime> times = timeline(plan, target);
  ASSERT_EQ(times.size(), plan.items.size());
  std::vector<double> end(target.num_ctas, 0);
  for (size_t i = 0; i < times.size(); ++i) {  // queued items come last, as they are drawn
    const int cta = times[i].cta;
    ASSERT_TRUE(cta >= 0 && cta < target.num_ctas);
    if (static_cast<int>(i) < plan.cta_item_indptr.back()) {
      ASSERT_TRUE(plan.cta_item_indptr[cta] <= static_cast<int>(i) &&
                  static_cast<int>(i) < plan.cta_item_indptr[cta + 1]);
    } else {
      ASSERT_EQ(times[i].begin_us, *std::min_element(end.begin(), end.end()));
    }
    const double us = modelled_us(plan, target, plan.items[i]);
    ASSERT_EQ(times[i].begin_us, end[cta]);
    ASSERT_NEAR(times[i].end_us - times[i].begin_us, us, 1e-3 * us + 1e-5);
    end[cta] = times[i].end_us;
  }
  // Who draws a queued item where two are free at once is rounding's choice.
  for (int cta = 0; cta < target.num_ctas && plan.num_queued() == 0; ++cta) {
    ASSERT_NEAR(end[cta], load[cta], 1e-3 * load[cta] + 1e-5);
  }
  ASSERT_EQ(static_cast<float>(*std::max_element(end.begin(), end.end())),
            plan.candidates.at(plan.chosen).makespan_us);
}

// The figures that the plan reports follow from its items.
inline void check_figures(const PlanTarget& target, const Plan& plan) {
  ASSERT_GE(plan.chosen, 0);
  const PlanCandidate& chosen = plan.candidates.at(plan.chosen);
  ASSERT_TRUE(chosen.fits);
  ASSERT_EQ(chosen.num_items, static_cast<int>(plan.items.size()));
  ASSERT_EQ(chosen.num_partial_rows, plan.num_partial_rows);
  std::vector<double> load(target.num_ctas, 0);
  double total = 0;
  for (int cta = 0; cta < target.num_ctas; ++cta) {
    for (int i = plan.cta_item_indptr[cta]; i < plan.cta_item_indptr[cta + 1]; ++i) {
      load[cta] += modelled_us(plan, target, plan.items[i]);
    }
  }
  for (size_t i = plan.cta_item_indptr.back(); i < plan.items.size(); ++i) {  // as CTAs are free
    *std::min_element(load.begin(), load.end()) += modelled_us(plan, target, plan.items[i]);
  }
  check_timeline(target, plan, load);
  for (const double us : load) total += us;
  const double busiest = *std::max_element(load.begin(), load.end());
  ASSERT_NEAR(chosen.makespan_us, busiest, 1e-3 * busiest + 1e-5);
  const double balance = total > 0 ? busiest * target.num_ctas / total : 1;
  ASSERT_NEAR(chosen.balance, balance, 2e-3 * balance);
}

inline void check_plan(const BsrView& view, const Visibility& visible, const PlanTarget& target,
                       const Plan& plan) {
  check_items(plan, target);
  if (::testing::Test::HasFatalFailure()) return;
  check_partial_rows(plan, target);
  if (::testing::Test::HasFatalFailure()) return;
  const Parts parts = collect_parts(plan, target);
  check_coverage(view, visible, target, plan, parts);
  if (::testing::Test::HasFatalFailure()) return;
  check_split_lengths(target, plan, parts);
  if (::testing::Test::HasFatalFailure()) return;
  check_merge_lists(target, plan, parts);
  if (::testing::Test::HasFatalFailure()) return;
  check_figures(target, plan);
}

}  // namespace plait::testing
