// Shares by prefix sums: the list row tile x kv head x key cut into one contiguous run a CTA, each
// cut found from its CTA's index alone. So a kernel finds all cuts at once (plan_lengths.cuh), and
// the host the same ones (src/scheduler/prefix_sum.cc).
//
// The list is given a length, and CTA c begins at c shares of it. A cut inside a head costs both
// sides something, so the list is measured and cut in a few ways, and the one modelled fastest is
// taken:
//   0  a head is as long as it takes unsplit, and is cut at the KV tile where a cut falls;
//   1  heads are in equal pieces of about the keys of all / CTAs, with what parts cost beside their
//      keys, and are cut at the nearest end of a piece;
//   2  likewise, where no share is shorter than the longest piece.
// The last two are for few heads, where a CTA has one or two pieces, and skipped for many.
#pragma once
#include "host_device/cut.h"

namespace plait {

inline constexpr int kShareWays = 3;
// Of these, those tried for a list of `num_tiles`.
inline constexpr int kMaxTilesInPieces = 768;
PLAIT_HD int share_ways(int num_tiles, const CutRules& rules, int num_ctas) {
  const bool few =
      num_tiles <= kMaxTilesInPieces && i64{num_tiles} * rules.num_kv_heads <= 4 * num_ctas;
  return few ? kShareWays : 1;
}
// Keys of a piece, where all heads together have `keys`.
PLAIT_HD int keys_a_cta(i64 keys, const CutRules& rules, int num_ctas) {
  const i64 mean = quotient(keys + num_ctas - 1, num_ctas);
  const int chunk = round_up(static_cast<int>(mean < (1 << 30) ? mean : 1 << 30), rules.tile_kv);
  return max(chunk, rules.min_piece);
}

// How a tile counts in the list: num_heads (1 where it has no keys, and is one piece of all heads)
// times num_pieces of piece_ps.
struct TileLength {
  int num_heads, num_pieces;
  i64 piece_ps;
  PLAIT_HD i64 total_ps() const { return num_heads * num_pieces * piece_ps; }
};
PLAIT_HD TileLength unsplit_length(const RowTile& tile, const CutRules& rules) {
  return {tile.seen() == 0 ? 1 : rules.num_kv_heads, 1, tile.head_ps};
}
PLAIT_HD TileLength length_in_pieces(const RowTile& tile, const ShapeCost& shape,
                                     const CutRules& rules, int chunk) {
  TileLength length = unsplit_length(tile, rules);
  if (tile.seen() <= chunk) return length;  // before anything is divided
  length.num_pieces = num_chunks(tile.seen(), chunk, true, rules);
  if (length.num_pieces > 1) {
    const int keys = ceil_div(ceil_div(tile.seen(), rules.tile_kv), length.num_pieces);
    length.piece_ps = tile_ps(shape, rules, keys * rules.tile_kv, true);
  }
  return length;
}

// What is compared, in 32 bits: 1024 ps, rounded down, of at most 2 s.
PLAIT_HD int units_of(i64 ps) {
  const i64 units = ps >> 10;
  return units < kMaxInt ? static_cast<int>(units) : kMaxInt;
}

// A share of a list whose share is mean_ps on average. It is longer than least_units: of way 0 the
// largest smallest_piece_ps of the tiles, so that cuts of a head are not nearer to each other than
// min_piece; of way 1 0; of way 2 the largest piece_ps.
PLAIT_HD i64 mean_share(i64 total_ps, int num_ctas) { return quotient(total_ps, num_ctas) + 1; }
PLAIT_HD i64 share_of(i64 mean_ps, int least_units) {
  const i64 least_ps = (i64{least_units} + 1) << 10;
  return mean_ps > least_ps ? mean_ps : least_ps;
}

// Keys before a cut at `head_ps` of a head (way 0): whole KV tiles; none or all where a cut costs
// more than it moves, and none rather than fewer than min_piece.
PLAIT_HD int keys_before(const RowTile& tile, const ShapeCost& shape, const CutRules& rules,
                         i64 head_ps) {
  const i64 keys_ps = head_ps - shape.fixed_ps;
  if (keys_ps <= rules.merge_ps) return 0;
  if (tile.head_ps - head_ps <= rules.merge_ps) return tile.seen();
  const int keys =
      static_cast<int>(quotient(keys_ps, shape.key_ps)) / rules.tile_kv * rules.tile_kv;
  return keys < rules.min_piece ? 0 : min(keys, tile.seen());
}

// A cut: its place, and the modelled time of the list before it were all heads whole.
struct ListCut {
  CutPoint at;
  int shape;  // of the tile; -1: not inside a head
  i64 before_ps;
  int num_rows = 0;  // of the tile, inside a head
};

// The cut at `tile_ps` of tile `index`, as the list of `way` measures it (`length`). before_ps: of
// all tiles before this one.
PLAIT_HD ListCut cut_tile(const RowTile& tile, int index, const ShapeCost& shape,
                          const CutRules& rules, const TileLength& length, int way, i64 tile_ps,
                          i64 before_ps) {
  i64 head;
  int key = 0;
  if (way == 0 && tile.seen() > 0) {
    head = quotient(tile_ps, tile.head_ps);
    key = keys_before(tile, shape, rules, tile_ps - head * tile.head_ps);
    if (key == tile.seen()) {
      key = 0;
      ++head;
    }
  } else {
    const int pieces = static_cast<int>(quotient(tile_ps + length.piece_ps / 2, length.piece_ps));
    head = pieces / length.num_pieces;
    const int piece = pieces - static_cast<int>(head) * length.num_pieces;
    if (piece > 0) key = chunk_begin(tile.seen(), 0, piece, length.num_pieces, true, rules);
  }
  before_ps += head * tile.head_ps;
  if (head == length.num_heads) return {{index + 1, 0, 0}, -1, before_ps};
  if (key > 0) before_ps += shape.fixed_ps + key * shape.key_ps;
  return {
      {index, static_cast<int>(head), key}, key > 0 ? tile.shape : -1, before_ps, tile.num_rows};
}

// The first of `n` ascending ends that is more than `value`; n - 1 if none is.
template <class Ends, class T>
PLAIT_HD int first_above(const Ends& ends, int n, T value) {
  int low = 0, high = n - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The list, measured: where each tile ends, of unsplit heads and in pieces of `chunk` keys.
struct MeasuredList {
  int num_tiles, chunk;
  const i64 *unsplit_end_ps, *pieces_end_ps;  // [num_tiles]
  i64 share_ps[kShareWays];
};
// Cut `cta` of `way`; the first is the start of the list. tiles[i]: tile i of the list.
template <class Tiles>
PLAIT_HD ListCut cut_list(const MeasuredList& list, const Tiles& tiles, const ShapeCost* shapes,
                          const CutRules& rules, int way, int cta) {
  if (cta == 0 || list.num_tiles == 0) return {{0, 0, 0}, -1, 0};
  const int last = list.num_tiles - 1;
  const i64* const end_ps = way == 0 ? list.unsplit_end_ps : list.pieces_end_ps;
  const i64 ps = cta * list.share_ps[way];
  if (ps >= end_ps[last]) return {{list.num_tiles, 0, 0}, -1, list.unsplit_end_ps[last]};
  const int i = first_above(end_ps, list.num_tiles, ps);
  const RowTile tile = tiles[i];
  const ShapeCost& shape = shapes[tile.shape];
  const TileLength length =
      way == 0 ? unsplit_length(tile, rules) : length_in_pieces(tile, shape, rules, list.chunk);
  return cut_tile(tile, i, shape, rules, length, way, ps - (i > 0 ? end_ps[i - 1] : 0),
                  i > 0 ? list.unsplit_end_ps[i - 1] : 0);
}

// What a CTA takes of the list. In order: the rest of a head that was cut before; whole heads, one
// piece a tile; the first keys of the head that is cut at the end. Or the middle of one head alone.
struct ListRun {
  CutPoint from, to;
  int num_kv_heads;

  PLAIT_HD bool in_one_head() const { return from.tile == to.tile && from.head == to.head; }
  PLAIT_HD int has_rest() const { return from.key > 0 && !in_one_head(); }
  PLAIT_HD int has_first_keys() const { return to.key > 0 && !in_one_head(); }
  PLAIT_HD int first_whole_head() const { return from.head + has_rest(); }
  PLAIT_HD int size() const {
    if (in_one_head()) return to.key > from.key;
    const int first = first_whole_head();
    const int whole = from.tile == to.tile
                          ? to.head > first
                          : (first < num_kv_heads) + (to.tile - from.tile - 1) + (to.head > 0);
    return has_rest() + whole + has_first_keys();
  }
};
struct ListPiece {
  CutPoint at;
  int num_heads;
  int key_end;   // in seen keys; -1: all
  bool is_part;  // of a head
};
PLAIT_HD ListPiece piece_of(const ListRun& run, int i) {
  const CutPoint &from = run.from, &to = run.to;
  if (run.in_one_head()) return {from, 1, to.key, true};
  if (i < run.has_rest()) return {from, 1, -1, true};
  if (run.has_first_keys() && i == run.size() - 1) return {{to.tile, to.head, 0}, 1, to.key, true};
  const int first = run.first_whole_head();
  const int tile = from.tile + i - run.has_rest() + (first == run.num_kv_heads ? 1 : 0);
  const int begin = tile == from.tile ? first : 0;
  return {{tile, begin, 0}, (tile == to.tile ? to.head : run.num_kv_heads) - begin, -1, false};
}

// Modelled time of a run of tiles of which none is merged. Parts take their own fixed_ps and
// merge_ps; where a head begins, the list has the former.
PLAIT_HD i64 run_ps(const ListCut& from, const ListCut& to, const ShapeCost* shapes,
                    const CutRules& rules) {
  i64 ps = to.before_ps - from.before_ps;
  const bool one_head = from.at.tile == to.at.tile && from.at.head == to.at.head;
  if (one_head && from.at.key == to.at.key) return 0;
  if (from.shape >= 0) ps += shapes[from.shape].fixed_ps;
  if (to.shape >= 0) ps += rules.merge_ps;
  if (from.shape >= 0 && !(one_head && to.shape >= 0)) ps += rules.merge_ps;
  return ps;
}

// Two CTAs of a multiprocessor, of these loads, share its bandwidth: while both have work each goes
// at the modelled speed; then what is left goes 1.5 times as fast. (With 1.9, and 3 us for the last
// join, 16 x 1024 and 16 x U(512, 1024) stayed whole: one H200, 25.1 and 23.5 us, split in two 24.6
// and 21.4.)
inline constexpr int kTenthsOfSpeedAlone = 15;
PLAIT_HD i64 pair_ps(i64 a, i64 b) {
  const i64 shared = a < b ? a : b, alone = (a < b ? b : a) - shared;
  return shared + alone * 10 / kTenthsOfSpeedAlone;
}
inline constexpr i64 kLastJoinPs = 1500000;  // behind all that, where something is split
PLAIT_HD unsigned join_units(int num_sms, bool joins) {
  return num_sms > 0 && joins ? units_of(kLastJoinPs) : 0;
}

// Where num_sms is not 0, CTAs i and i + num_sms share multiprocessor i. The units that count as
// its load, of which the largest is that of all. load(cta): 0 beyond the last.
PLAIT_HD int num_loads(int num_ctas, int num_sms) { return num_sms > 0 ? num_sms : num_ctas; }
template <class Load>
PLAIT_HD unsigned load_of(int i, int num_sms, const Load& load) {
  return num_sms > 0 ? static_cast<unsigned>(pair_ps(load(i), load(i + num_sms))) : load(i);
}

}  // namespace plait
