// rows_per_tile: tiles hold whole tokens, as many as fit; only a group larger than the tile is
// split.
#include <gtest/gtest.h>

#include "host_device/config.h"

namespace plait {
namespace {

TEST(Packing, WholeTokensAsManyAsFit) {
  for (int tile_q : {1, 16, 64, 128, 192}) {
    for (int group = 1; group <= 300; ++group) {
      const int rows = rows_per_tile(tile_q, group);
      EXPECT_GE(rows, 1);
      EXPECT_LE(rows, tile_q);
      if (group > tile_q) {
        EXPECT_EQ(rows, tile_q);
        continue;
      }
      int most = 0;
      while (most + group <= tile_q) most += group;
      EXPECT_EQ(rows, most) << tile_q << " " << group;
    }
  }
}

TEST(Params, SlotsOfTheVariantFollowOnEightBytes) {
  struct V {
    struct Params {
      alignas(8) float a;
      alignas(8) int b;
      alignas(8) const float* c;
    };
  };
  EXPECT_EQ(sizeof(V::Params), 24u);
  EXPECT_EQ(sizeof(VariantCall<V>), sizeof(Params) + 24);
}

}  // namespace
}  // namespace plait
