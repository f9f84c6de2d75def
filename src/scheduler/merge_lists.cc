// Partial states: which rows of the workspace every partial item writes, and the list of sources
// each query token is joined from, in merge order (level, then key).
#include "scheduler/scheduler.h"

namespace plait::scheduler {

void number_partial_rows(int group_size, bool group_is_split, Cuts& cuts) {
  std::vector<WorkItem>& items = cuts.items;
  if (group_is_split) {
    // Several tiles share a token's arrival counter. Its items follow one another in the list; as
    // soon as one is partial, all are, so that the merge finds every head of the group.
    for (size_t begin = 0, end; begin < items.size(); begin = end) {
      const int token = items[begin].first_row / group_size;
      bool partial = false;
      for (end = begin; end < items.size() && items[end].row_block == items[begin].row_block &&
                        items[end].first_row / group_size == token;
           ++end) {
        partial |= items[end].partial_row >= 0;
      }
      for (size_t i = begin; partial && i < end; ++i) items[i].partial_row = 0;
    }
  }
  i64 next = 0;  // an int could wrap before the candidate is dropped
  for (WorkItem& item : items) {
    if (item.partial_row < 0) continue;
    item.partial_row = static_cast<int>(next);
    next += i64{item.num_heads} * item.num_rows;
    if (next > i64{1} << 30) break;
  }
  cuts.num_partial_rows = static_cast<int>(next);
}

void make_merge_lists(const std::vector<WorkItem>& items, int group_size, Scratch& scratch,
                      Plan& plan) {
  plan.token_merge_indptr.clear();
  plan.merge_sources.clear();
  if (plan.num_partial_rows == 0) return;
  const auto for_partial_tokens = [&](auto&& visit) {  // visit(item, token of the block, row of q)
    for (const WorkItem& item : items) {
      if (item.partial_row < 0) continue;
      const int first_token = plan.row_blocks[item.row_block].first_token;
      const int end = (item.first_row + item.num_rows - 1) / group_size + 1;
      for (int token = item.first_row / group_size; token < end; ++token) {
        const int i = first_token + token;
        visit(item, token, plan.row_map.empty() ? i : plan.row_map[i]);
      }
    }
  };
  std::vector<int>& indptr = plan.token_merge_indptr;
  indptr.assign(plan.num_tokens + 1, 0);
  for_partial_tokens([&](const WorkItem&, int, int row) { ++indptr[row + 1]; });
  for (int row = 0; row < plan.num_tokens; ++row) indptr[row + 1] += indptr[row];
  plan.merge_sources.resize(indptr.back());
  std::vector<int>& next = scratch.next;
  next.assign(indptr.begin(), indptr.end() - 1);
  for_partial_tokens([&](const WorkItem& item, int token, int row) {
    const int token_row = token * group_size;  // of the block, as item.first_row is
    const int begin = max(item.first_row, token_row);
    const int end = min(item.first_row + item.num_rows, token_row + group_size);
    plan.merge_sources[next[row]++] = {
        .partial_row = item.partial_row + begin - item.first_row,
        .rows_per_head = item.num_rows,
        .kv_head_begin = item.kv_head_begin,
        .num_heads = item.num_heads,
        .first_group_head = begin - token_row,
        .num_group_heads = end - begin,
    };
  });
}

}  // namespace plait::scheduler
