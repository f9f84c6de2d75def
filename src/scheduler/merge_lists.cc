// Partial states: which rows of the workspace every partial item writes, and the lists of them that
// the rows of every token are joined from, in merge order (level, then key).
#include <utility>

#include "plait/error.h"
#include "scheduler/scheduler.h"

namespace plait::scheduler {

void number_partial_rows(Cuts& cuts) {
  i64 next = 0;  // an int could wrap before the candidate is dropped
  for (WorkItem& item : cuts.items) {
    if (item.partial_row < 0) continue;
    item.partial_row = static_cast<int>(next);
    next += i64{item.num_heads} * item.num_rows;
    if (next > i64{1} << 30) break;
  }
  cuts.num_partial_rows = static_cast<int>(next);
}

void make_merge_lists(const std::vector<WorkItem>& items, const CostModel& model, Plan& plan) {
  const int group_size = model.group_size, tile_q = model.tile_q[0];
  const int num_heads = model.rules.num_kv_heads, per_head = lists_per_head(tile_q, group_size);
  plan.lists_per_head = per_head;
  plan.merge_indptr.clear();
  plan.merge_sources.clear();
  if (plan.num_partial_rows == 0) return;
  const auto for_lists = [&](auto&& visit) {  // visit(list, partial row of its first head)
    for (const WorkItem& item : items) {
      if (item.partial_row < 0) continue;
      const int first_token = item.first_row / group_size;
      const int end_token = (item.first_row + item.num_rows - 1) / group_size + 1;
      const int part = item.first_row % group_size / tile_q;
      for (int token = first_token; token < end_token; ++token) {
        const int i = plan.row_blocks[item.row_block].first_token + token;
        const int row = plan.row_map.empty() ? i : plan.row_map[i];
        int source = item.partial_row + (token - first_token) * group_size;
        for (int h = item.kv_head_begin; h < item.kv_head_begin + item.num_heads; ++h) {
          visit((row * num_heads + h) * per_head + part, source);
          source += item.num_rows;
        }
      }
    }
  };
  // indptr[list + 1] is in turn how many sources a list has, where it begins, and where it ends.
  std::vector<int>& indptr = plan.merge_indptr;
  const i64 num_lists = i64{plan.num_tokens} * num_heads * per_head;
  check(num_lists < i64{1} << 31, "plan: ", plan.num_tokens, " query tokens of ", num_heads,
        " kv heads and ", group_size, " query heads each are more than can be merged");
  indptr.assign(num_lists + 1, 0);
  for_lists([&](int list, int) { ++indptr[list + 1]; });
  int sum = 0;
  for (size_t list = 1; list < indptr.size(); ++list) sum += std::exchange(indptr[list], sum);
  plan.merge_sources.resize(sum);
  for_lists([&](int list, int source) { plan.merge_sources[indptr[list + 1]++] = source; });
}

}  // namespace plait::scheduler
