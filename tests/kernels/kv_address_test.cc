// host_device/kv_address.h against plain layouts: a cache whose every element is its own name.
#include "host_device/kv_address.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace plait {
namespace {

constexpr int kPages = 7, kHeads = 3, kDim = 8;

struct Layout {
  const char* name;
  int page_size;
  KvStrides stride;  // of a whole cache of kPages pages
};

// Offset of (page, token, head), written out as nested loops over memory would have it.
std::vector<Layout> layouts() {
  std::vector<Layout> out;
  for (int page_size : {1, 3, 16}) {
    const i64 p = page_size;
    out.push_back({"NHD", page_size, {p * kHeads * kDim, kHeads * kDim, kDim}});
    out.push_back({"HND", page_size, {p * kHeads * kDim, kDim, p * kDim}});
    out.push_back({"joint NHD", page_size, {2 * p * kHeads * kDim, kHeads * kDim, kDim}});
    out.push_back({"padded",
                   page_size,
                   {(p + 2) * (kHeads + 1) * (kDim + 8), (kHeads + 1) * (kDim + 8), kDim + 8}});
  }
  return out;
}

template <class Index>
void check_pages(const Layout& layout, i64 stride_block, bool by_list) {
  const int page_size = layout.page_size, kv_len = 4 * page_size - (page_size > 1);
  const int pages[] = {5, 0, 6, 2};
  // Two lists in one table, the second is read; entries between are wild.
  const i64 row = 3;
  std::vector<Index> table(64, Index{1} << 30);
  const i64 first = by_list ? row * 11 : 9;
  for (int i = 0; i < 4; ++i) table[first + i * stride_block] = static_cast<Index>(pages[i]);
  const int64_t map[] = {0, 0, row};
  BlockTable blocks{table.data(),     by_list ? map : nullptr,         stride_block,
                    by_list ? 11 : 1, static_cast<int>(sizeof(Index)), 8};
  RowBlock block{by_list ? 2 : first, 0, 1, kv_len, 0, 0, 0};
  const i64 entry = first_entry(blocks, block);
  EXPECT_EQ(entry, first) << layout.name;
  for (int i = 0; i < kv_len; ++i) {
    const KeySlot slot = key_slot(blocks, entry, page_size, i);
    EXPECT_EQ(slot.block, pages[i / page_size]);
    EXPECT_EQ(slot.offset, i % page_size);
    for (int h = 0; h < kHeads; ++h) {
      const i64 want = pages[i / page_size] * layout.stride.block +
                       i % page_size * layout.stride.token + h * layout.stride.head;
      EXPECT_EQ(key_offset(layout.stride, slot, h, false), want) << layout.name << " key " << i;
    }
  }
}

TEST(KvAddress, PagesOfEveryLayout) {
  for (const Layout& layout : layouts()) {
    for (i64 stride_block : {1, 2}) {
      for (bool by_list : {false, true}) {
        check_pages<int32_t>(layout, stride_block, by_list);
        check_pages<int64_t>(layout, stride_block, by_list);
      }
    }
  }
}

TEST(KvAddress, OffsetsOfTwoKeysNeverMeet) {
  for (const Layout& layout : layouts()) {
    std::vector<int> seen(kPages * (layout.page_size + 2) * (kHeads + 1) * (kDim + 8) * 2 + 1, 0);
    for (int page = 0; page < kPages; ++page) {
      for (int t = 0; t < layout.page_size; ++t) {
        for (int h = 0; h < kHeads; ++h) {
          const i64 at = key_offset(layout.stride, {page, t}, h, false);
          for (int d = 0; d < kDim; ++d) EXPECT_EQ(seen.at(at + d)++, 0) << layout.name;
        }
      }
    }
  }
}

TEST(KvAddress, RaggedRowsAreAffine) {
  const BlockTable affine{};
  const RowBlock block{41, 0, 1, 10, 0, 0, 0};
  const KvStrides stride{0, 24, 8};
  const i64 first = first_entry(affine, block);
  for (int i = 0; i < 10; ++i) {
    const KeySlot slot = key_slot(affine, first, 1, i);
    EXPECT_EQ(key_offset(stride, slot, 2, true), (41 + i) * 24 + 2 * 8);
  }
}

TEST(KvAddress, OffsetsAre64Bit) {
  const KvStrides stride{16384, 1024, 128};
  EXPECT_EQ(key_offset(stride, {262145, 15}, 7, false), 262145LL * 16384 + 15 * 1024 + 7 * 128);
  EXPECT_EQ(key_offset({0, 1 << 20, 128}, {1 << 20, 0}, 0, true), 1LL << 40);
}

TEST(Divisor, DividesAsTheOperatorDoes) {
  const int largest = 0x7fffffff;
  for (const int d : {1, 2, 3, 5, 6, 7, 8, 12, 16, 20, 641, 4096, 65535, 65536, 1000000007,
                      largest / 2, largest / 2 + 2, largest - 1, largest}) {
    const Divisor divisor = divisor_of(d);
    for (const int quotient : {0, 1, 2, 3, 100, largest / d / 2, largest / d - 1, largest / d}) {
      for (const int rest : {0, 1, d / 2, d - 1}) {
        const i64 n = i64{quotient} * d + rest;
        if (quotient < 0 || n > largest) continue;
        EXPECT_EQ(divide(static_cast<int>(n), divisor), static_cast<int>(n) / d) << n << " / " << d;
      }
    }
  }
  for (int d = 1; d < 70; ++d) {
    for (int n = 0; n < 500; ++n) EXPECT_EQ(divide(n, divisor_of(d)), n / d) << n << " / " << d;
  }
}

}  // namespace
}  // namespace plait
