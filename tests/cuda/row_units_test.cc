// cuda/row_units.h: rows in units lie where key_offset puts them; what 32 bits cannot reach is
// refused.
#include "cuda/row_units.h"

#include <gtest/gtest.h>

#include "plait/error.h"

namespace plait::cuda {
namespace {

void check_rows(const KvStrides& stride, i64 num_blocks, int block_size, int bytes = 2) {
  const RowUnits units = row_units("k", stride, num_blocks, block_size, bytes);
  for (const int block :
       {0, 1, static_cast<int>(num_blocks / 2), static_cast<int>(num_blocks - 1)}) {
    if (block >= num_blocks) continue;
    for (const int offset : {0, block_size / 2, block_size - 1}) {
      const i64 want = key_offset(stride, {block, offset}, 0, false) * bytes;
      EXPECT_EQ(i64{units.number(block, offset)} * units.bytes, want) << block << ", " << offset;
    }
  }
}

TEST(RowUnits, LieWhereKeyOffsetPutsThem) {
  check_rows({1024, 1024, 128}, 1000, 1);  // NHD, page 1: the token's stride is not stepped
  check_rows({1024, 7, 128}, 1000, 1);
  check_rows({3 * 1024, 1024, 128}, 1000, 3);     // NHD
  check_rows({3 * 1024, 128, 3 * 128}, 1000, 3);  // HND
  check_rows({5120, 200, 40}, 17, 5);             // a common divisor that is neither
  check_rows({5120, 208, 16}, 17, 5, 1);          // fp8
  check_rows({7, 72, 24}, 1, 3);                  // one page: its stride is not stepped
  check_rows({-3072, 1024, 128}, 50, 3);
  check_rows({-3072, -1024, 128}, 50, 3);
  check_rows({0, 0, 128}, 50, 3);  // every token the same row
  check_rows({0, 0, 0}, 1, 1);
}

TEST(RowUnits, Reach64BitOffsets) {
  check_rows({1024, 1024, 128}, i64{1} << 31, 1);  // 4 TiB
  check_rows({i64{1} << 33, 1024, 128}, 60, 1);    // one page's stride beyond 32 bits
  check_rows({(i64{1} << 33) + 8, 8, 8}, 2, 5);
  check_rows({(i64{1} << 40) + (i64{1} << 33), i64{1} << 33, 8}, 9, 3);
}

TEST(RowUnits, RefuseWhatTheyCannotReach) {
  try {
    row_units("v", {80, 24, 8}, i64{1} << 29, 3, 2);
    FAIL() << "must be refused";
  } catch (const ArgumentError& error) {
    EXPECT_STREQ(
        error.what(),
        "run: v, 536870912 pages of 3 tokens with strides of 160 and 48 bytes, has rows more "
        "than 2^31 times the strides' common divisor, 16 bytes, apart, which kernel sm90a "
        "cannot gather; kernel=\"plain\" takes it");
  }
}

}  // namespace
}  // namespace plait::cuda
