// Invariant mode: the state of every chunk of keys is folded by itself, in the order of the chunks
// (host_device/fold.h), so whatever part of a head a CTA takes leaves a partial row for each chunk.
// Here such parts become items of one chunk each, one behind the other in the same CTA; executors
// go through the chunks of a whole head themselves.
#include <algorithm>
#include <utility>

#include "host_device/tile_list.h"
#include "scheduler/scheduler.h"

namespace plait::scheduler {

void split_parts(const std::vector<RowBlock>& row_blocks, const Visibility& visible,
                 const CostModel& model, Cuts& cuts) {
  const int num_items = static_cast<int>(cuts.items.size());
  std::vector<int> first(num_items + 1);  // of the new items, by old one
  std::vector<WorkItem> items;
  std::vector<int> cta;
  items.reserve(num_items);
  for (int i = 0; i < num_items; ++i) {
    const WorkItem& item = cuts.items[i];
    first[i] = static_cast<int>(items.size());
    const TileList chunks =
        tiles_of(item, visible, row_blocks[item.row_block].kv_pos_begin, model.chunk_keys);
    const int count = item.partial_row < 0 ? 1 : std::max(chunks.size(), 1);
    for (int c = 0; c < count; ++c) {
      items.push_back(item);
      cta.push_back(cuts.cta[i]);
      if (count > 1) {
        items.back().kv_begin = std::max(item.kv_begin, chunks[c] * model.chunk_keys);
        items.back().kv_end = std::min(item.kv_end, (chunks[c] + 1) * model.chunk_keys);
      }
    }
  }
  first[num_items] = static_cast<int>(items.size());
  if (first[num_items] == num_items) return;
  const auto renumber = [&](std::vector<int>& list) {
    std::vector<int> all;
    all.reserve(items.size());
    for (const int i : list) {
      for (int at = first[i]; at < first[i + 1]; ++at) all.push_back(at);
    }
    list = std::move(all);
  };
  renumber(cuts.order);
  renumber(cuts.queue);
  cuts.items = std::move(items);
  cuts.cta = std::move(cta);
}

}  // namespace plait::scheduler
