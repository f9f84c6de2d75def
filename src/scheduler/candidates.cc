// The ways to cut row tiles into work items and to spread them over the CTAs: equal shares of the
// ordered list, chunks dealt longest first (Algorithm 1 of FlashInfer, Ye et al. 2025,
// arXiv:2501.01005, and its relatives), and large tiles dealt whole that small ones fill up.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "plait/error.h"
#include "scheduler/scheduler.h"

namespace plait::scheduler {
namespace {

// Longest first deals items; beyond this many a CTA, heads are dealt together. 32 leave an
// imbalance of 3 per cent at most (16, of equal items: 5), and the work of dealing stays
// independent of the heads.
constexpr i64 kItemsPerCta = 32;

WorkItem make_item(const RowTile& tile, int kv_head_begin, int num_heads, int key_begin,
                   int key_end, bool partial) {
  return {.row_block = tile.row_block,
          .shape = tile.shape,
          .first_row = tile.first_row,
          .num_rows = tile.num_rows,
          .kv_head_begin = kv_head_begin,
          .num_heads = num_heads,
          .kv_begin = list_begin(tile, key_begin),
          .kv_end = list_end(tile, key_end),
          .partial_row = partial ? 0 : -1,
          .min_position = tile.min_position,
          .max_position = tile.max_position};
}

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

}  // namespace

void cut_equal_shares(const std::vector<RowTile>& tiles, const CostModel& model, Cuts& cuts) {
  cuts.items.clear();
  cuts.cta.clear();
  cuts.order.clear();
  share_out(tiles, model, {}, cuts);
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

// Gives out CTAs, the least loaded first, ties by index. As long as there are empty ones it is the
// next of them; then a tree of minima over load and index in one word: a step is a handful of
// dependent minima without a branch, a third of the time of a heap.
class LeastLoaded {
 public:
  LeastLoaded(std::vector<std::uint64_t>& tree, int num_ctas)
      : tree_(tree), num_ctas_(num_ctas), leaves_(std::bit_ceil(static_cast<unsigned>(num_ctas))) {
    tree_.assign(2 * leaves_, ~std::uint64_t{0});
  }

  int give(std::uint64_t cost) {  // returns the CTA
    if (num_used_ < num_ctas_) {
      tree_[leaves_ + num_used_] = cost << kCtaBits | static_cast<std::uint64_t>(num_used_);
      if (num_used_ + 1 == num_ctas_) {
        for (size_t i = leaves_ - 1; i >= 1; --i) take_smaller(i);
      }
      return num_used_++;
    }
    const int cta = static_cast<int>(tree_[1] & kMaxCtas);
    size_t i = leaves_ + cta;
    tree_[i] += cost << kCtaBits;
    for (i /= 2; i >= 1; i /= 2) take_smaller(i);
    return cta;
  }

 private:
  void take_smaller(size_t i) { tree_[i] = std::min(tree_[2 * i], tree_[2 * i + 1]); }

  std::vector<std::uint64_t>& tree_;
  const int num_ctas_;
  const size_t leaves_;
  int num_used_ = 0;
};

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

  cuts.items.clear();
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
