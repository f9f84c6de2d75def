// host_device/visibility.h by brute force: every (query, key) pair of small ranges, one by one.
#include "host_device/visibility.h"

#include <gtest/gtest.h>

#include <vector>

namespace plait {
namespace {

// The meaning, in words of DESIGN: causal hides later keys; a window keeps keys at positions >=
// query - window_left, and sink tokens are inside any window.
bool sees(const Visibility& v, int q, int k) {
  if (v.causal && k > q) return false;
  if (v.window_left < 0) return true;
  return k >= q - v.window_left || k < v.sink_tokens;
}

std::vector<Visibility> all_visibilities() {
  std::vector<Visibility> out;
  for (int causal : {0, 1}) {
    for (int window : {-1, 0, 1, 3, 7, 30}) {
      for (int sinks : {0, 1, 4, 9}) {
        if (window >= 0 || sinks == 0) out.push_back({causal, window, sinks});
      }
    }
  }
  return out;
}

TEST(Visibility, PredicateMeansWhatItSays) {
  for (const Visibility& v : all_visibilities()) {
    for (int q = -3; q < 40; ++q) {
      for (int k = 0; k < 40; ++k) EXPECT_EQ(visible(v, q, k), sees(v, q, k)) << q << " " << k;
    }
  }
}

TEST(Visibility, VisibleKeysAreTheSmallestRange) {
  for (const Visibility& v : all_visibilities()) {
    for (int kv_pos_begin : {0, 2, 5, 16}) {
      for (int kv_len : {0, 1, 7, 25}) {
        for (int min_position = -4; min_position < 45; ++min_position) {
          for (int max_position : {min_position, min_position + 1, min_position + 6}) {
            int begin = kv_len, end = 0;
            for (int i = 0; i < kv_len; ++i) {
              for (int q = min_position; q <= max_position; ++q) {
                if (!sees(v, q, kv_pos_begin + i)) continue;
                begin = min(begin, i);
                end = max(end, i + 1);
              }
            }
            const KeyRange range =
                visible_keys(v, min_position, max_position, kv_pos_begin, kv_len);
            SCOPED_TRACE(testing::Message()
                         << "causal " << v.causal << " window " << v.window_left << " sinks "
                         << v.sink_tokens << " begin " << kv_pos_begin << " len " << kv_len
                         << " positions " << min_position << ".." << max_position);
            if (begin >= end) {  // nothing is seen; with sink tokens the range may be larger
              if (v.sink_tokens == 0) {
                EXPECT_EQ(range.begin, range.end);
              }
              continue;
            }
            EXPECT_LE(range.begin, begin);
            EXPECT_GE(range.end, end);
            EXPECT_GE(range.begin, 0);
            EXPECT_LE(range.end, kv_len);
            if (v.sink_tokens == 0) {
              EXPECT_EQ(range.begin, begin);
              EXPECT_EQ(range.end, end);
            }
          }
        }
      }
    }
  }
}

TEST(Visibility, TilesAreSkippedOnlyIfNothingIsSeenAndFullOnlyIfAllIs) {
  int full = 0, skipped = 0;
  for (const Visibility& v : all_visibilities()) {
    for (int min_position = -2; min_position < 45; ++min_position) {
      for (int rows : {1, 2, 8}) {
        for (int k_first = 0; k_first < 45; ++k_first) {
          for (int keys : {1, 4, 16}) {
            int seen = 0;
            for (int q = min_position; q < min_position + rows; ++q) {
              for (int k = k_first; k < k_first + keys; ++k) seen += sees(v, q, k);
            }
            const TileVisibility tile = tile_visibility(v, min_position, min_position + rows - 1,
                                                        k_first, k_first + keys - 1, kMaxInt);
            // Mask bits from the last key on: no longer full; from the key behind it on: as before.
            const auto masked = [&](int mask_begin) {
              return tile_visibility(v, min_position, min_position + rows - 1, k_first,
                                     k_first + keys - 1, mask_begin);
            };
            EXPECT_EQ(masked(k_first + keys - 1),
                      tile == TileVisibility::kFull ? TileVisibility::kPartial : tile);
            EXPECT_EQ(masked(k_first + keys), tile);
            if (tile == TileVisibility::kSkip) {
              EXPECT_EQ(seen, 0);
            }
            if (tile == TileVisibility::kFull) {
              EXPECT_EQ(seen, rows * keys);
            }
            skipped += tile == TileVisibility::kSkip;
            full += tile == TileVisibility::kFull;
            if (rows == 1 &&
                v.sink_tokens == 0) {  // one row, no sinks: nothing is left on the table
              if (seen == 0) {
                EXPECT_EQ(tile, TileVisibility::kSkip);
              }
              if (seen == keys) {
                EXPECT_EQ(tile, TileVisibility::kFull);
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(full, 1000);
  EXPECT_GT(skipped, 1000);
}

}  // namespace
}  // namespace plait
