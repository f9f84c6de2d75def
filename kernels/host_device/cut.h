// Where work is cut: row tiles of a row block, the keys a tile really sees, and the pieces of the
// list row tile x kv head x key that a CTA takes. Pure functions over plain data, so that a planner
// on the device cuts exactly as src/scheduler/ does: the bits of a result depend only on the cuts.
// Costs are whole picoseconds: integer sums have one order-independent value on every machine.
#pragma once
#include "host_device/config.h"
#include "host_device/visibility.h"

namespace plait {

// n / d of 0 <= n < 2^53 and d > 0: by float products of what is left of n. A division of 64 bits
// takes the device a hundred instructions, each of which waits for the one before it.
PLAIT_HD_CALLED i64 quotient(i64 n, i64 d) {
  const float per_d = reciprocal(static_cast<float>(d));
  i64 q = 0, step;
  do {
    step = static_cast<i64>(static_cast<float>(n) * per_d);
    q += step;
    n -= step * d;
  } while (step != 0);
  return n < 0 ? q - 1 : n >= d ? q + 1 : q;
}

// Packed rows of one row block that one item may take, and the keys they see.
struct RowTile {
  int row_block, shape;
  int first_row, num_rows;         // packed
  int min_position, max_position;  // absolute, over the query tokens of the rows
  int kv_begin, kv_end;            // list positions; kv_begin a multiple of kv_align
  int hidden_begin, hidden_end;    // whole KV tiles between sinks and window that no row sees:
                                   //   multiples of tile_kv, or both kv_end where there are none
  int merged;                      // its rows have keys in other levels too: always partial
  i64 head_ps;                     // modelled cost of one kv head, unsplit

  PLAIT_HD int seen() const { return kv_end - kv_begin - (hidden_end - hidden_begin); }
};

struct ShapeCost {
  i64 fixed_ps, key_ps;  // of one tile over one kv head: fixed_ps + keys * key_ps
};

struct CutRules {
  int num_kv_heads, tile_kv;
  int kv_align;   // keys of a window begin at a multiple of it, a divisor of tile_kv
  int min_piece;  // keys, a multiple of tile_kv: no piece is shorter but the last of a head
  i64 merge_ps;   // of one partial tile
};

// The smallest shape that holds `rows`; tile_q descends and the first shape holds them.
PLAIT_HD int shape_for(const int* tile_q, int num_shapes, int rows) {
  int shape = num_shapes - 1;
  while (shape > 0 && tile_q[shape] < rows) --shape;
  return shape;
}

// Packed rows of the tile that starts at `first_row` of a block of `block_rows`. Tiles hold whole
// tokens; a group larger than the tile is split, but no tile reaches into the next token.
PLAIT_HD int rows_from(int first_row, int block_rows, int tile_q, int group_size) {
  const int end =
      group_size > tile_q ? first_row / group_size * group_size + group_size : block_rows;
  return min(rows_per_tile(tile_q, group_size), end - first_row);
}

// The same by number: how many tiles a block of `num_tokens` has, and where tile `i` starts.
PLAIT_HD int num_row_tiles(int num_tokens, int tile_q, int group_size) {
  return group_size > tile_q ? num_tokens * ceil_div(group_size, tile_q)
                             : ceil_div(num_tokens * group_size, rows_per_tile(tile_q, group_size));
}
PLAIT_HD int first_row_of(int i, int tile_q, int group_size) {
  if (group_size <= tile_q) return i * rows_per_tile(tile_q, group_size);
  const int tiles_of_token = ceil_div(group_size, tile_q);
  return i / tiles_of_token * group_size + i % tiles_of_token * tile_q;
}

// Fills in the key ranges of a tile whose positions are known.
PLAIT_HD void find_keys(const Visibility& v, const RowBlock& block, const CutRules& rules,
                        RowTile& tile) {
  const int tile_kv = rules.tile_kv;
  const KeyRange keys =
      visible_keys(v, tile.min_position, tile.max_position, block.kv_pos_begin, block.kv_len);
  tile.kv_begin = keys.begin > 0 ? keys.begin / rules.kv_align * rules.kv_align : 0;
  tile.kv_end = keys.end;
  tile.hidden_begin = tile.hidden_end = keys.end;
  if (v.window_left < 0 || block.kv_pos_begin >= v.sink_tokens || keys.begin == keys.end) return;
  const int sinks_end = round_up(v.sink_tokens - block.kv_pos_begin, tile_kv);
  const int window_begin = tile.min_position - v.window_left - block.kv_pos_begin;
  if (window_begin >= keys.end) {
    tile.kv_end = min(keys.end, sinks_end);  // nothing but sinks
  } else if (window_begin / tile_kv * tile_kv > sinks_end) {
    tile.hidden_begin = sinks_end;
    tile.hidden_end = window_begin / tile_kv * tile_kv;
    return;
  }
  tile.hidden_begin = tile.hidden_end = tile.kv_end;
}

// List position of the first, and behind the last, of a tile's seen keys [begin, end).
PLAIT_HD int list_begin(const RowTile& tile, int begin) {
  const int key = tile.kv_begin + begin;
  return key < tile.hidden_begin ? key : key + tile.hidden_end - tile.hidden_begin;
}
PLAIT_HD int list_end(const RowTile& tile, int end) {
  const int key = tile.kv_begin + end;
  return key <= tile.hidden_begin ? key : key + tile.hidden_end - tile.hidden_begin;
}

// The item of `num_heads` heads of a tile over its seen keys [key_begin, key_end). partial: its
// partial_row is still to be numbered.
PLAIT_HD WorkItem make_item(const RowTile& tile, int kv_head_begin, int num_heads, int key_begin,
                            int key_end, bool partial) {
  WorkItem item;
  item.row_block = tile.row_block;
  item.shape = tile.shape;
  item.first_row = tile.first_row;
  item.num_rows = tile.num_rows;
  item.kv_head_begin = kv_head_begin;
  item.num_heads = num_heads;
  item.kv_begin = list_begin(tile, key_begin);
  item.kv_end = list_end(tile, key_end);
  item.partial_row = partial ? 0 : -1;
  item.min_position = tile.min_position;
  item.max_position = tile.max_position;
  return item;
}

// Cost of a tile over `keys` seen keys and one kv head.
PLAIT_HD i64 tile_ps(const ShapeCost& shape, const CutRules& rules, int keys, bool partial) {
  return shape.fixed_ps + keys * shape.key_ps + (partial ? rules.merge_ps : 0);
}

// The cheapest thing that can be taken of a tile: a CTA whose budget is less may stay empty.
PLAIT_HD i64 smallest_piece_ps(const RowTile& tile, const ShapeCost& shape, const CutRules& rules) {
  const i64 piece = tile_ps(shape, rules, rules.min_piece, true);
  return piece < tile.head_ps ? piece : tile.head_ps;
}

// A place in the list row tile x kv head x key.
struct CutPoint {
  int tile, head, key;  // key: seen keys of this head that were taken before
};

// What is taken from there: whole heads, or one piece of one head. num_heads 0: nothing fits.
struct CutPiece {
  int num_heads, key_begin, key_end;  // in seen keys
  bool partial;
  i64 cost_ps;
};

// Whole heads of `tile` while they fit `budget_ps`, else the longest piece of the next head that
// does. A tile without keys is one piece of all heads: only (0, -inf) is written.
PLAIT_HD CutPiece next_piece(const RowTile& tile, const ShapeCost& shape, const CutRules& rules,
                             const CutPoint& at, i64 budget_ps) {
  const int seen = tile.seen();
  if (seen == 0) {
    if (tile.head_ps > budget_ps) return {0, 0, 0, false, 0};
    return {rules.num_kv_heads, 0, 0, false, tile.head_ps};
  }
  if (at.key == 0) {
    const int heads_left = rules.num_kv_heads - at.head;
    const i64 all_ps = heads_left * tile.head_ps;
    if (all_ps <= budget_ps) return {heads_left, 0, seen, tile.merged != 0, all_ps};
    const int heads = static_cast<int>(budget_ps / tile.head_ps);
    if (heads > 0) return {heads, 0, seen, tile.merged != 0, heads * tile.head_ps};
  } else {
    const i64 rest_ps = tile_ps(shape, rules, seen - at.key, true);
    if (rest_ps <= budget_ps) return {1, at.key, seen, true, rest_ps};
  }
  const i64 keys_ps = budget_ps - shape.fixed_ps - rules.merge_ps;
  if (keys_ps < rules.min_piece * shape.key_ps) return {0, 0, 0, false, 0};
  const int keys = static_cast<int>(keys_ps / shape.key_ps) / rules.tile_kv * rules.tile_kv;
  return {1, at.key, at.key + keys, true, tile_ps(shape, rules, keys, true)};
}

// The last keys of each of a tile's heads, which are for the queue: about `percent` of them, none
// if that is fewer than `min_keys`, all if too few would remain.
PLAIT_HD int queued_keys(const RowTile& tile, const CutRules& rules, int percent, int min_keys) {
  const int seen = tile.seen();
  const int kept =
      static_cast<int>(i64{seen} * (100 - percent) / 100) / rules.tile_kv * rules.tile_kv;
  if (seen - kept < min_keys) return 0;
  return kept < rules.min_piece ? seen : seen - kept;
}
// The tile without those.
PLAIT_HD RowTile first_keys(const RowTile& tile, int keys, const ShapeCost& shape,
                            const CutRules& rules) {
  RowTile first = tile;
  first.kv_end = list_end(tile, keys);
  first.hidden_begin = min(tile.hidden_begin, first.kv_end);
  first.hidden_end = min(tile.hidden_end, first.kv_end);
  first.merged = 1;
  first.head_ps = tile_ps(shape, rules, keys, true);
  return first;
}
// Keys of the queue's next piece, whole KV tiles, where `left` keys are still to be cut and a head
// has `queued` of them: a half of what each CTA would get of the rest (Polychronopoulos and Kuck,
// 1987), and no head in too many pieces, which one CTA joins.
PLAIT_HD int queued_piece(i64 left, int queued, const CutRules& rules, int min_keys, int num_ctas) {
  constexpr int kMaxPieces = 32;
  const i64 guided = left / (2 * num_ctas), least = max(min_keys, ceil_div(queued, kMaxPieces));
  const i64 keys = guided < least ? least : guided < i64{1} << 30 ? guided : i64{1} << 30;
  return round_up(static_cast<int>(keys), rules.tile_kv);
}

PLAIT_HD void advance(CutPoint& at, const CutPiece& piece, int seen, int num_kv_heads) {
  if (piece.key_end < seen) {
    at.key = piece.key_end;
    return;
  }
  at.key = 0;
  at.head += piece.num_heads;
  if (at.head == num_kv_heads) {
    at.head = 0;
    ++at.tile;
  }
}

// Chunks of Algorithm 1: `seen` keys in pieces of `chunk` (a multiple of tile_kv), all full but the
// last; or equalised: of as equal a number of KV tiles as there can be, none below min_piece.
PLAIT_HD int num_chunks(int seen, int chunk, bool equalised, const CutRules& rules) {
  const int chunks = ceil_div(seen, chunk);
  return max(equalised ? min(chunks, round_up(seen, rules.tile_kv) / rules.min_piece) : chunks, 1);
}
PLAIT_HD int chunk_begin(int seen, int chunk, int i, int num_chunks, bool equalised,
                         const CutRules& rules) {
  if (i == 0 || i == num_chunks) return i == 0 ? 0 : seen;
  if (!equalised) return i * chunk;
  return static_cast<int>(quotient(i64{ceil_div(seen, rules.tile_kv)} * i, num_chunks)) *
         rules.tile_kv;
}

}  // namespace plait
