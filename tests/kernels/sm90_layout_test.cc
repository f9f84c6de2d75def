// kernels/sm90/layout.h enumerated against the plain layout: where the loaders put an element is
// where wgmma, reading through its descriptors, looks for it. What the hardware does with a
// descriptor is written out here from the PTX manual ("Asynchronous Warpgroup Level Matrix Shared
// Memory Layout", "Strides", "Matrix Descriptor Format"), not from the header.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "host_device/visibility.h"
#include "sm90/layout.h"

namespace plait::sm90 {
namespace {

// The 128-byte swizzle of TMA and wgmma: address bits 4-6 are xored with bits 7-9.
i64 swizzle(i64 address) { return address ^ ((address >> 7 & 7) << 4); }

struct Fields {
  i64 start, leading, stride;
  int type;
};
Fields decode(i64 descriptor) {
  const auto field = [&](int shift) { return (descriptor >> shift & 0x3fff) << 4; };
  return {field(0), field(16), field(32),
          static_cast<int>(static_cast<unsigned long long>(descriptor) >> 62)};
}

TEST(Sm90Layout, ATileIsPanelsOfSwizzledRows) {
  for (int rows : {64, 128}) {
    for (int dim : {64, 128, 256}) {
      std::set<int> used;
      for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < dim; ++col) {
          const i64 plain = col / 64 * (rows * 128) + row * 128 + col % 64 * 2;
          EXPECT_EQ(element_offset(rows, row, col), swizzle(plain)) << row << " " << col;
          EXPECT_TRUE(used.insert(element_offset(rows, row, col)).second);
          EXPECT_EQ(element_offset(rows, row, col), chunk_offset(rows, row, col / 8) + col % 8 * 2);
        }
      }
      EXPECT_EQ(*used.rbegin(), rows * dim * 2 - 2);  // no hole, nothing beyond the tile
      EXPECT_EQ(static_cast<int>(used.size()), rows * dim);
    }
  }
}

TEST(Sm90Layout, ChunksAreSixteenAlignedBytes) {
  for (int row = 0; row < 64; ++row) {
    for (int chunk = 0; chunk < 16; ++chunk) EXPECT_EQ(chunk_offset(64, row, chunk) % 16, 0);
  }
}

// K-major, 128-byte swizzle: row r, k of a k16 step lies at
//   start + r / 8 * stride + r % 8 * 128 + k * 2, then swizzled by its address.
TEST(Sm90Layout, KMajorDescriptorsFindEveryElement) {
  for (int rows : {64, 128}) {
    for (int dim : {64, 128, 256}) {
      for (unsigned tile : {0u, 1024u, 0x1c000u, 0x2c000u}) {
        for (int k16 = 0; k16 < dim / 16; ++k16) {
          const Fields d =
              decode(descriptor(k_major_descriptor(tile) + (k_major_step(rows, k16) >> 4)));
          EXPECT_EQ(d.type, 1);
          for (int row = 0; row < rows; ++row) {
            for (int k = 0; k < 16; ++k) {
              const i64 address = swizzle(d.start + row / 8 * d.stride + row % 8 * 128 + k * 2);
              ASSERT_EQ(address, tile + element_offset(rows, row, 16 * k16 + k))
                  << "rows " << rows << " row " << row << " k " << 16 * k16 + k;
            }
          }
        }
      }
    }
  }
}

// Warpgroup w of a 128-row tile starts 64 rows further, which is a multiple of the swizzle's
// period.
TEST(Sm90Layout, TheSecondHalfOfATileIsReadFromItsOwnStart) {
  for (int k16 = 0; k16 < 8; ++k16) {
    const Fields d = decode(
        descriptor(k_major_descriptor(2048 + 64 * kPanelRowBytes) + (k_major_step(128, k16) >> 4)));
    for (int row = 0; row < 64; ++row) {
      for (int k = 0; k < 16; ++k) {
        EXPECT_EQ(swizzle(d.start + row / 8 * d.stride + row % 8 * 128 + k * 2),
                  2048 + element_offset(128, 64 + row, 16 * k16 + k));
      }
    }
  }
}

// N-major, 128-byte swizzle: k, n lies at
//   start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2, then swizzled.
TEST(Sm90Layout, NMajorDescriptorsFindEveryElement) {
  for (int rows : {64, 128}) {
    for (int dim : {64, 128, 256}) {
      for (unsigned tile : {0u, 1024u, 0x30000u}) {
        for (int k16 = 0; k16 < rows / 16; ++k16) {
          const Fields d =
              decode(descriptor(n_major_descriptor(tile, rows) + (n_major_step(k16) >> 4)));
          EXPECT_EQ(d.type, 1);
          for (int k = 0; k < 16; ++k) {
            for (int n = 0; n < dim; ++n) {
              const i64 address = swizzle(d.start + n / 64 * d.leading + k / 8 * d.stride +
                                          k % 8 * 128 + n % 64 * 2);
              ASSERT_EQ(address, tile + element_offset(rows, 16 * k16 + k, n))
                  << "rows " << rows << " k " << 16 * k16 + k << " n " << n;
            }
          }
        }
      }
    }
  }
}

TEST(Sm90Layout, TileListHoldsEveryVisibleKeyOnceInOrder) {
  int hidden_tiles = 0;
  for (int tile_kv : {64, 128}) {
    for (int sinks : {0, 4, 70}) {
      for (int window : {-1, 0, 63, 300}) {
        if (window < 0 && sinks > 0) continue;
        const Visibility v{1, window, sinks};
        for (int kv_pos_begin : {0, 40}) {
          for (int kv_begin : {0, tile_kv, 3 * tile_kv}) {
            for (int kv_end : {kv_begin, kv_begin + 1, kv_begin + tile_kv, 1300}) {
              for (int position : {-3, 0, 200, 900, 1299}) {
                WorkItem item{};
                item.kv_begin = kv_begin;
                item.kv_end = kv_end;
                item.min_position = position;
                item.max_position = position + 15;
                const TileList tiles = tiles_of(item, v, kv_pos_begin, tile_kv);
                std::vector<int> covered(2048, 0);
                for (int j = 0; j < tiles.size(); ++j) {
                  if (j > 0) {
                    EXPECT_GT(tiles[j], tiles[j - 1]);
                  }
                  EXPECT_GE(tiles[j] * tile_kv, kv_begin);
                  EXPECT_LT(tiles[j] * tile_kv, kv_end);
                  for (int i = 0; i < tile_kv; ++i) ++covered.at(tiles[j] * tile_kv + i);
                }
                for (int i = kv_begin; i < kv_end; ++i) {
                  EXPECT_LE(covered[i], 1);
                  hidden_tiles += covered[i] == 0;
                  for (int q = position; q < position + 16; ++q) {
                    if (visible(v, q, kv_pos_begin + i)) {
                      EXPECT_EQ(covered[i], 1) << i;
                    }
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(hidden_tiles, 0);  // else the list skips nothing and this test says little
}

// A tile within full_tiles_of has no hidden pair and no key beyond the item's; one outside needs
// the mask, but for tiles of sink tokens, which are left to it.
TEST(Sm90Layout, FullTilesAreThoseWithoutAHiddenPair) {
  int num_full = 0, num_masked = 0;
  for (int tile_kv : {64, 128}) {
    for (int causal : {0, 1}) {
      for (int window : {-1, 0, 63, 300, 5000}) {
        for (int sinks : {0, 70}) {
          for (int kv_pos_begin : {0, 40, 900}) {
            for (int kv_end : {0, 1, tile_kv, 777, 1300}) {
              for (int position : {-200, -3, 0, 200, 900, 1299, 3000}) {
                const Visibility v{causal, window, sinks};
                WorkItem item{};
                item.kv_end = kv_end;
                item.min_position = position;
                item.max_position = position + 15;
                item.mask_begin = (position + kv_end) % 3 == 0 ? kMaxInt : position + kv_end / 2;
                const FullTiles full = full_tiles_of(item, v, kv_pos_begin, tile_kv);
                for (int t = 0; t * tile_kv < kv_end; ++t) {
                  bool all = (t + 1) * tile_kv <= kv_end, sink = false;
                  for (int i = t * tile_kv; i < min((t + 1) * tile_kv, kv_end); ++i) {
                    sink |= kv_pos_begin + i < sinks;
                    all &= kv_pos_begin + i < item.mask_begin;
                    for (int q = position; q < position + 16; ++q) {
                      all &= visible(v, q, kv_pos_begin + i);
                    }
                  }
                  const bool said = t >= full.begin && t < full.end;
                  EXPECT_TRUE(said == all || (sink && all && !said))
                      << "tile " << t << " of " << tile_kv << " causal " << causal << " window "
                      << window << " sinks " << sinks << " from " << kv_pos_begin << " to "
                      << kv_end << " at " << position;
                  ++(said ? num_full : num_masked);
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(num_full, 100);
  EXPECT_GT(num_masked, 100);
}

}  // namespace
}  // namespace plait::sm90
