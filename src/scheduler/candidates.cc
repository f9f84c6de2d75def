// The ways to cut row tiles into work items and to spread them over the CTAs: equal shares of the
// ordered list, alone or with a queue behind them; chunks dealt longest first (Algorithm 1 of
// FlashInfer, Ye et al. 2025, arXiv:2501.01005, and its relatives); and large tiles dealt whole
// that small ones fill up.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "plait/error.h"
#include "scheduler/least_loaded.h"
#include "scheduler/scheduler.h"

namespace plait::scheduler {
namespace {

// Longest first deals items; beyond this many a CTA, heads are dealt together. 32 leave an
// imbalance of 3 per cent at most (16, of equal items: 5), and the work of dealing stays
// independent of the heads.
constexpr i64 kItemsPerCta = 32;

// One walk along the list, giving every CTA what fits `share_ps` beside its load, if there are any.
// Returns the cost of what is left over when all CTAs are full.
template <class TakePiece>
i64 walk(const std::vector<RowTile>& tiles, const CostModel& model, const std::vector<i64>& load,
         i64 share_ps, TakePiece take_piece) {
  const CutRules rules = model.rules;
  const int num_tiles = static_cast<int>(tiles.size());
  CutPoint at{0, 0, 0};
  for (int cta = 0; cta < model.num_ctas; ++cta) {
    for (i64 budget_ps = share_ps - (load.empty() ? 0 : load[cta]); at.tile < num_tiles;) {
      const RowTile& tile = tiles[at.tile];
      const CutPiece piece = next_piece(tile, model.shapes[tile.shape], rules, at, budget_ps);
      if (piece.num_heads == 0) break;
      take_piece(cta, tile, at.head, piece);
      budget_ps -= piece.cost_ps;
      advance(at, piece, tile.seen(), rules.num_kv_heads);
    }
    if (at.tile == num_tiles) return 0;
  }
  i64 left_ps = 0;
  for (int i = at.tile; i < num_tiles; ++i) {
    const int heads = tiles[i].seen() == 0 ? 1 : rules.num_kv_heads;
    left_ps += heads * tiles[i].head_ps;
  }
  const RowTile& tile = tiles[at.tile];
  return left_ps - at.head * tile.head_ps - at.key * model.shapes[tile.shape].key_ps;
}

// Appends the pieces of a walk with the smallest share that serves: from the mean, by what a walk
// leaves over, until nothing is.
void share_out(const std::vector<RowTile>& tiles, const CostModel& model,
               const std::vector<i64>& load, Cuts& cuts) {
  // Every CTA can take something of every tile, so the share is at least the smallest piece.
  i64 total_ps = 0, share_ps = 0;
  for (const i64 ps : load) total_ps += ps;
  for (const RowTile& tile : tiles) {
    total_ps += (tile.seen() == 0 ? 1 : model.rules.num_kv_heads) * tile.head_ps;
    share_ps = std::max(share_ps, smallest_piece_ps(tile, model.shapes[tile.shape], model.rules));
  }
  share_ps = std::max(share_ps, total_ps / model.num_ctas + 1);
  i64 too_small_ps = 0;
  const auto nothing = [](int, const RowTile&, int, const CutPiece&) {};
  for (i64 step_ps = share_ps / 128 + 1;; step_ps *= 2) {
    const i64 left_ps = walk(tiles, model, load, share_ps, nothing);
    if (left_ps == 0) break;
    too_small_ps = share_ps;
    share_ps += std::max(left_ps / model.num_ctas, step_ps);
  }
  // The last step may have gone too far; halve it while that is worth a walk.
  while (too_small_ps > 0 && share_ps - too_small_ps > share_ps / 128) {
    const i64 middle_ps = too_small_ps + (share_ps - too_small_ps) / 2;
    (walk(tiles, model, load, middle_ps, nothing) == 0 ? share_ps : too_small_ps) = middle_ps;
  }

  const auto take = [&](int cta, const RowTile& tile, int head, const CutPiece& piece) {
    cuts.items.push_back(
        make_item(tile, head, piece.num_heads, piece.key_begin, piece.key_end, piece.partial));
    cuts.cta.push_back(cta);
  };
  walk(tiles, model, load, share_ps, take);
}

// Heads that give to the queue, about: one further part for each of them.
constexpr i64 kQueuedHeadsPerCta = 1;
// Of which a CTA draws no more than about so many.
constexpr i64 kPiecesPerCta = 5;

// The longest items first, else in list order.
void sort_queue(int tile_kv, Scratch& scratch, Cuts& cuts) {
  constexpr int kLengths = 256;  // in tiles; longer ones need no order: they are far from the end
  int begin[kLengths + 1] = {};
  const auto place = [&](int i) {
    const WorkItem& item = cuts.items[i];
    const int tiles = ceil_div(item.kv_end - item.kv_begin, tile_kv);
    return kLengths - std::min(tiles * std::min(item.num_heads, kLengths), kLengths);
  };
  for (const int i : cuts.queue) ++begin[place(i)];
  for (int sum = 0, p = 0; p <= kLengths; ++p) sum += std::exchange(begin[p], sum);
  std::vector<int>& sorted = scratch.next;
  sorted.resize(cuts.queue.size());
  for (const int i : cuts.queue) sorted[begin[place(i)]++] = i;
  cuts.queue.swap(sorted);
}

}  // namespace

void cut_equal_shares(const std::vector<RowTile>& tiles, const CostModel& model, Cuts& cuts) {
  cuts.clear();
  share_out(tiles, model, {}, cuts);
}

void cut_with_queue(const std::vector<RowTile>& tiles, const CostModel& model, int percent,
                    Scratch& scratch, Cuts& cuts) {
  cuts.clear();
  const CutRules& rules = model.rules;
  // Of many heads every n-th gives more, so that not all are joined from parts.
  const i64 num_heads = static_cast<i64>(tiles.size()) * rules.num_kv_heads;
  const int most_steps = std::max(100 / percent, 1);
  const int step = static_cast<int>(
      std::clamp<i64>(num_heads / (kQueuedHeadsPerCta * model.num_ctas), 1, most_steps));
  percent = step == most_steps ? 100 : step * percent;
  std::vector<RowTile>& own = scratch.own_tiles;
  std::vector<int>& queued = scratch.next;  // keys of each head of a tile
  own.clear();
  queued.assign(tiles.size(), 0);
  i64 left = 0;  // keys that are not in the queue yet
  for (size_t i = 0; i < tiles.size(); ++i) {
    const RowTile& tile = tiles[i];
    const bool gives = static_cast<int>(i % step) == step - 1;
    queued[i] = gives ? queued_keys(tile, rules, percent, model.min_queued_keys) : 0;
    left += i64{rules.num_kv_heads} * queued[i];
    if (queued[i] == 0) {
      own.push_back(tile);
    } else if (queued[i] < tile.seen()) {
      own.push_back(first_keys(tile, tile.seen() - queued[i], model.shapes[tile.shape], rules));
    }
  }
  share_out(own, model, {}, cuts);

  // In a long batch a longer piece is no longer beside all the rest, and there are fewer to plan.
  const int shortest = static_cast<int>(
      std::max<i64>(model.min_queued_keys, left / (kPiecesPerCta * model.num_ctas)));
  for (size_t i = 0; i < tiles.size(); ++i) {
    if (queued[i] == 0) continue;
    const RowTile& tile = tiles[i];
    const int first = tile.seen() - queued[i];
    const bool partial = first > 0 || tile.merged;
    for (int head = 0; head < rules.num_kv_heads;) {
      const int piece = queued_piece(left, queued[i], rules, shortest, model.num_ctas);
      const int heads = std::clamp(piece / queued[i], 1, rules.num_kv_heads - head);
      const int chunks = std::max(ceil_div(queued[i], rules.tile_kv) / (piece / rules.tile_kv), 1);
      for (int c = 0; c < chunks; ++c) {
        const int begin = chunk_begin(queued[i], 0, c, chunks, true, rules);
        const int end = chunk_begin(queued[i], 0, c + 1, chunks, true, rules);
        cuts.queue.push_back(static_cast<int>(cuts.items.size()));
        cuts.items.push_back(
            make_item(tile, head, heads, first + begin, first + end, partial || chunks > 1));
        cuts.cta.push_back(kQueued);
      }
      head += heads;
      left -= i64{heads} * queued[i];
    }
  }
  sort_queue(rules.tile_kv, scratch, cuts);
}

namespace {

// Heads that are dealt together.
int heads_per_item(size_t num_tiles, const CostModel& model) {
  const int num_heads = model.rules.num_kv_heads;
  int heads = 1;
  while (heads<num_heads&& static_cast<i64>(num_tiles) * ceil_div(num_heads, heads)> kItemsPerCta *
         model.num_ctas) {
    heads = std::min(heads * 2, num_heads);
  }
  return heads;
}

// Where the keys of every tile lie in the list of all keys: blocks with the most keys first, since
// the shortest items are best dealt last.
void find_key_places(const std::vector<RowTile>& tiles, int num_heads, Scratch& scratch) {
  std::vector<KeyPlace>& places = scratch.key_places;
  std::vector<std::uint64_t>& blocks = scratch.keys;  // sorted: most keys first, then by first tile
  places.assign(tiles.size(), {0, 0});
  blocks.clear();
  for (size_t i = 0, end; i < tiles.size(); i = end) {
    int keys = 0;
    for (end = i; end < tiles.size() && tiles[end].row_block == tiles[i].row_block; ++end) {
      keys = std::max(keys, tiles[end].kv_end);
    }
    places[i].keys = keys;
    blocks.push_back(static_cast<std::uint64_t>(~static_cast<unsigned>(keys)) << 32 | i);
  }
  std::sort(blocks.begin(), blocks.end());
  i64 first = 0;
  for (const std::uint64_t block : blocks) {
    const size_t begin = block & 0xffffffffu;
    const KeyPlace place{first, places[begin].keys};
    for (size_t i = begin; i < tiles.size() && tiles[i].row_block == tiles[begin].row_block; ++i) {
      places[i] = place;
    }
    first += i64{num_heads} * place.keys;
  }
}

}  // namespace

int algorithm_1_chunk(const std::vector<RowTile>& tiles, const CostModel& model) {
  const int heads = heads_per_item(tiles.size(), model);
  i64 keys = 0;
  for (const RowTile& tile : tiles) keys += tile.seen();
  keys *= ceil_div(model.rules.num_kv_heads, heads);
  const i64 chunk = (keys + model.num_ctas - 1) / model.num_ctas;
  const i64 tile_kv = model.rules.tile_kv;
  return static_cast<int>(std::clamp<i64>((chunk + tile_kv - 1) / tile_kv * tile_kv,
                                          model.rules.min_piece, i64{1} << 30));
}

bool cut_longest_first(const std::vector<RowTile>& tiles, const CostModel& model, int chunk,
                       bool equalised, bool keys_are_shared, int max_partial_rows, Scratch& scratch,
                       Cuts& cuts) {
  const int num_heads = model.rules.num_kv_heads;
  const int heads = heads_per_item(tiles.size(), model);
  const auto chunks_of = [&](const RowTile& tile) {
    return chunk == 0 ? 1 : num_chunks(tile.seen(), chunk, equalised, model.rules);
  };
  i64 partial_rows = 0;
  for (const RowTile& tile : tiles) {
    const int chunks = chunks_of(tile);
    if (chunks > 1 || tile.merged) partial_rows += i64{chunks} * num_heads * tile.num_rows;
  }
  if (partial_rows > max_partial_rows) {
    cuts.num_partial_rows = static_cast<int>(std::min<i64>(partial_rows, i64{1} << 30));
    return false;
  }

  const bool by_cache = keys_are_shared && model.cache_keys > 0;
  if (by_cache) find_key_places(tiles, num_heads, scratch);

  cuts.clear();
  scratch.keys.clear();  // sorted: by cacheful, longest first, then by index
  constexpr int kIndexBits = 28, kCostBits = 26, kCachefulBits = 64 - kIndexBits - kCostBits;
  constexpr std::uint64_t kMaxIndex = (std::uint64_t{1} << kIndexBits) - 1,
                          kMaxCost = (std::uint64_t{1} << kCostBits) - 1;
  i64 longest_ps = 1;
  for (const RowTile& tile : tiles) longest_ps = std::max(longest_ps, heads * tile.head_ps);
  int shift = 0;  // of costs, to kCostBits
  longest_ps += model.rules.merge_ps * heads;
  while (longest_ps >> shift > static_cast<i64>(kMaxCost)) ++shift;
  const auto add = [&](const RowTile& tile, int head, int n, int begin, int end, bool partial,
                       i64 cost_ps) {
    i64 cacheful = 0;
    if (by_cache) {
      const KeyPlace& place = scratch.key_places[&tile - tiles.data()];
      cacheful = std::min((place.first + i64{head} * place.keys) / model.cache_keys,
                          (i64{1} << kCachefulBits) - 1);
    }
    check(cuts.items.size() <= kMaxIndex, "plan: a batch of more than ", kMaxIndex, " work items");
    scratch.keys.push_back(static_cast<std::uint64_t>(cacheful) << (kIndexBits + kCostBits) |
                           (kMaxCost - static_cast<std::uint64_t>(cost_ps >> shift)) << kIndexBits |
                           cuts.items.size());
    cuts.items.push_back(make_item(tile, head, n, begin, end, partial));
  };
  for (const RowTile& tile : tiles) {
    const int seen = tile.seen();
    if (seen == 0) {
      add(tile, 0, num_heads, 0, 0, false, tile.head_ps);
      continue;
    }
    const int chunks = chunks_of(tile);
    const bool partial = chunks > 1 || tile.merged;
    for (int head = 0; head < num_heads; head += heads) {
      const int n = std::min(heads, num_heads - head);
      for (int i = 0; i < chunks; ++i) {
        const int begin = chunk_begin(seen, chunk, i, chunks, equalised, model.rules);
        const int end = chunk_begin(seen, chunk, i + 1, chunks, equalised, model.rules);
        add(tile, head, n, begin, end, partial,
            n * tile_ps(model.shapes[tile.shape], model.rules, end - begin, partial));
      }
    }
  }
  std::sort(scratch.keys.begin(), scratch.keys.end());

  // Loads of all items together fit the bits that the index of a CTA leaves.
  const int load_bits = kCostBits + static_cast<int>(std::bit_width(scratch.keys.size()));
  const int load_shift = std::max(0, load_bits + kCtaBits - 64);
  LeastLoaded ctas(scratch.tree, model.num_ctas);
  cuts.cta.resize(cuts.items.size());
  cuts.order.resize(cuts.items.size());
  for (size_t i = 0; i < scratch.keys.size(); ++i) {
    const int item = static_cast<int>(scratch.keys[i] & kMaxIndex);
    cuts.order[i] = item;
    cuts.cta[item] =
        ctas.give((kMaxCost - (scratch.keys[i] >> kIndexBits & kMaxCost)) >> load_shift);
  }
  return true;
}

bool cut_large_then_fill(const std::vector<RowTile>& tiles, const CostModel& model,
                         int max_partial_rows, Scratch& scratch, Cuts& cuts) {
  const auto is_small = [](const RowTile& tile) { return tile.shape > 0; };
  std::vector<RowTile>&large = scratch.large_tiles, &small = scratch.small_tiles;
  large.clear();
  small.clear();
  for (const RowTile& tile : tiles) (is_small(tile) ? small : large).push_back(tile);
  if (!cut_longest_first(large, model, 0, false, true, max_partial_rows, scratch, cuts))
    return false;
  scratch.load.assign(model.num_ctas, 0);
  for (size_t i = 0, item = 0; i < large.size(); ++i) {
    for (int head = 0; head < model.rules.num_kv_heads; head += cuts.items[item++].num_heads) {
      const int heads = large[i].seen() == 0 ? 1 : cuts.items[item].num_heads;
      scratch.load[cuts.cta[item]] += heads * large[i].head_ps;
    }
  }
  share_out(small, model, scratch.load, cuts);
  while (cuts.order.size() < cuts.items.size()) {
    cuts.order.push_back(static_cast<int>(cuts.order.size()));
  }
  return true;
}

}  // namespace plait::scheduler
