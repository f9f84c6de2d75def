// The cutting code that host and device share, enumerated against the plain meaning: which rows a
// tile has, which keys it reads, what a budget buys, where chunks begin.
#include "host_device/cut.h"

#include <gtest/gtest.h>

#include <vector>

namespace plait {
namespace {

TEST(Cut, RowTilesCoverEveryRowOnceAndSplitOnlyLargeGroups) {
  for (const int tile_q : {1, 16, 64, 128}) {
    for (const int group : {1, 2, 3, 5, 8, 12, 16, 17, 100, 128, 130}) {
      for (const int tokens : {1, 2, 7, 33}) {
        const int block_rows = tokens * group;
        int row = 0;
        while (row < block_rows) {
          const int n = rows_from(row, block_rows, tile_q, group);
          ASSERT_GT(n, 0);
          ASSERT_LE(n, tile_q);
          if (group <= tile_q) {
            ASSERT_EQ(n % group, 0);
            ASSERT_TRUE(row + n == block_rows || n + group > tile_q) << "room for another token";
          } else {
            ASSERT_EQ(row / group, (row + n - 1) / group) << "a tile reaches into the next token";
          }
          row += n;
        }
        ASSERT_EQ(row, block_rows);
      }
    }
  }
}

TEST(Cut, SmallestShapeThatHolds) {
  const int tile_q[2] = {128, 64};
  EXPECT_EQ(shape_for(tile_q, 2, 128), 0);
  EXPECT_EQ(shape_for(tile_q, 2, 65), 0);
  EXPECT_EQ(shape_for(tile_q, 2, 64), 1);
  EXPECT_EQ(shape_for(tile_q, 2, 1), 1);
  EXPECT_EQ(shape_for(tile_q, 1, 1), 0);
}

// Seen keys are those of the KV tiles between the first and the last visible key that are not
// skipped, and list positions of a cut name the same keys.
TEST(Cut, SeenKeysAreThoseOfTilesNotSkipped) {
  constexpr int kTileKv = 4;
  for (const int causal : {0, 1}) {
    for (const int window : {-1, 0, 3, 9, 1 << 30}) {
      for (const int sinks : {0, 1, 4, 6, 40}) {
        for (const int pos_begin : {0, 2, 5, 30}) {
          for (const int kv_len : {0, 1, 4, 13, 37}) {
            for (int first = -2; first < 60; first += 3) {
              const Visibility v{causal, window, sinks};
              RowBlock block{};
              block.kv_len = kv_len;
              block.kv_pos_begin = pos_begin;
              RowTile tile{};
              tile.min_position = first;
              tile.max_position = first + 2;
              const CutRules rules{.tile_kv = kTileKv, .kv_align = first % 2 == 0 ? 1 : kTileKv};
              find_keys(v, block, rules, tile);
              ASSERT_EQ(tile.kv_begin % rules.kv_align, 0);
              ASSERT_EQ((tile.hidden_end - tile.hidden_begin) % kTileKv, 0);
              std::vector<int> read(kv_len, 0);  // by the pieces [0, 4), [4, 8) ... of seen keys
              for (int u = 0; u < tile.seen(); u += kTileKv) {
                const int end = list_end(tile, min(u + kTileKv, tile.seen()));
                ASSERT_LE(end - list_begin(tile, u), kTileKv);
                for (int k = list_begin(tile, u); k < end; ++k) ++read.at(k);
              }
              int last_visible = -1;
              for (int k = 0; k < kv_len; ++k) {
                for (int q = first; q <= first + 2; ++q) {
                  if (visible(v, q, pos_begin + k)) last_visible = k;
                }
              }
              for (int k = 0; k < kv_len; ++k) {
                bool tile_visible = false;
                const int shift = tile.kv_begin % kTileKv;  // of all tiles; before it there is none
                const int begin = k < shift ? 0 : shift + (k - shift) / kTileKv * kTileKv;
                const int end = k < shift ? shift : begin + kTileKv;
                for (int j = begin; j < min(end, kv_len); ++j) {
                  for (int q = first; q <= first + 2; ++q) {
                    tile_visible |= visible(v, q, pos_begin + j);
                  }
                }
                ASSERT_LE(read[k], 1);
                if (tile_visible && k <= last_visible) {
                  ASSERT_EQ(read[k], 1) << k;
                }
                if (!tile_visible && window >= 0 && pos_begin == 0) {
                  ASSERT_EQ(read[k], 0) << "key " << k << " is in a hidden tile but read";
                }
              }
            }
          }
        }
      }
    }
  }
}

// Whatever the budgets, pieces taken one after the other cover heads x keys once, cost no more than
// the budget, and cut only at multiples of tile_kv and not below min_piece.
TEST(Cut, PiecesFitTheirBudgetAndCoverTheTile) {
  const ShapeCost shape{1000, 10};
  const CutRules rules{.num_kv_heads = 3, .tile_kv = 64, .min_piece = 128, .merge_ps = 500};
  for (const int merged : {0, 1}) {
    for (const int seen : {0, 1, 64, 127, 128, 129, 1000}) {
      RowTile tile{};
      tile.kv_end = tile.hidden_begin = tile.hidden_end = seen;
      tile.merged = seen > 0 ? merged : 0;
      tile.head_ps = tile_ps(shape, rules, seen, tile.merged);
      for (i64 budget = smallest_piece_ps(tile, shape, rules); budget < 50000; budget += 377) {
        CutPoint at{0, 0, 0};
        i64 keys = 0;
        while (at.tile == 0) {
          const CutPiece piece = next_piece(tile, shape, rules, at, budget);
          ASSERT_GT(piece.num_heads, 0) << "an empty CTA must be able to take something";
          ASSERT_LE(piece.cost_ps, budget);
          ASSERT_EQ(piece.key_begin, at.key);
          const bool whole = piece.key_begin == 0 && piece.key_end == seen;
          ASSERT_EQ(piece.partial, !whole || tile.merged != 0);
          ASSERT_TRUE(whole || piece.num_heads == 1);
          if (piece.key_end < seen) {
            ASSERT_EQ(piece.key_end % rules.tile_kv, 0);
            ASSERT_GE(piece.key_end - piece.key_begin, rules.min_piece);
          }
          keys += i64{piece.num_heads} * (piece.key_end - piece.key_begin);
          advance(at, piece, seen, rules.num_kv_heads);
        }
        ASSERT_EQ(keys, i64{rules.num_kv_heads} * seen);
      }
    }
  }
}

TEST(Cut, ChunksCoverTheKeys) {
  const CutRules rules{.num_kv_heads = 1, .tile_kv = 64, .min_piece = 192, .merge_ps = 0};
  for (const int chunk : {192, 256, 640}) {
    for (int seen = 1; seen < 2000; seen += 13) {
      for (const bool equalised : {false, true}) {
        const int n = num_chunks(seen, chunk, equalised, rules);
        ASSERT_EQ(chunk_begin(seen, chunk, 0, n, equalised, rules), 0);
        ASSERT_EQ(chunk_begin(seen, chunk, n, n, equalised, rules), seen);
        int smallest = seen, largest = 0;
        for (int i = 0; i < n; ++i) {
          const int begin = chunk_begin(seen, chunk, i, n, equalised, rules);
          const int keys = chunk_begin(seen, chunk, i + 1, n, equalised, rules) - begin;
          ASSERT_EQ(begin % rules.tile_kv, 0);
          ASSERT_GT(keys, 0);
          if (i + 1 < n) {
            ASSERT_GE(keys, rules.min_piece);
            smallest = min(smallest, keys);
            largest = max(largest, keys);
          }
          if (!equalised) {
            ASSERT_LE(keys, chunk);
          }
        }
        if (equalised && n > 2) {
          ASSERT_LE(largest - smallest, rules.tile_kv);
        }
      }
    }
  }
}

}  // namespace
}  // namespace plait
