// make_view against the meaning of each layout, stated here key by key: which slots of the cache
// the rows of q read, in which order and at which positions.
#include "formats/view.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "formats/tensors.h"
#include "host_device/kv_address.h"

namespace plait {
namespace {

using test::Ints;
using test::Longs;

const Device kHost{kCpu, 0};
const Device kGpu{kCuda, 0};
constexpr Bounds kBounds{64, 512, 4096};

struct Key {
  long long slot;  // page * page_size + offset, or row
  int position;
  bool operator==(const Key&) const = default;
};
void PrintTo(const Key& key, std::ostream* os) { *os << key.slot << "@" << key.position; }

// All keys of every row of q, as kernels would find them.
std::vector<std::vector<Key>> keys_of_rows(const FormatView& view, int page_size) {
  std::vector<std::vector<Key>> rows(view.num_query_tokens);
  for (const RowBlock& block : view.view.row_blocks) {
    const LevelTable& level = view.tables.at(block.level);
    BlockTable table = level.device_table;
    if (!level.on_device && !level.affine) table.indices = level.indices.data();
    const i64 first = first_entry(table, block);
    for (int t = block.first_token; t < block.first_token + block.num_tokens; ++t) {
      const int row = view.view.row_map.empty() ? t : view.view.row_map.at(t);
      for (int i = 0; i < block.kv_len; ++i) {
        const KeySlot slot = key_slot(table, first, page_size, i);
        rows.at(row).push_back({slot.block * page_size + slot.offset, block.kv_pos_begin + i});
      }
    }
  }
  return rows;
}

// What the caller meant: the keys of each request, repeated for each of its queries.
std::vector<std::vector<Key>> expected_rows(const std::vector<int>& qo_indptr,
                                            const std::vector<std::vector<long long>>& slots) {
  std::vector<std::vector<Key>> rows;
  for (size_t r = 0; r + 1 < qo_indptr.size(); ++r) {
    std::vector<Key> keys;
    for (size_t i = 0; i < slots[r].size(); ++i) keys.push_back({slots[r][i], static_cast<int>(i)});
    for (int t = qo_indptr[r]; t < qo_indptr[r + 1]; ++t) rows.push_back(keys);
  }
  return rows;
}

void expect_tokens(const FormatView& view, const std::vector<int>& qo_indptr,
                   const std::vector<int>& kv_len) {
  ASSERT_EQ(view.num_query_tokens, qo_indptr.back());
  ASSERT_EQ(view.view.token_request.size(), static_cast<size_t>(qo_indptr.back()));
  ASSERT_EQ(view.view.token_position.size(), static_cast<size_t>(qo_indptr.back()));
  for (size_t r = 0; r + 1 < qo_indptr.size(); ++r) {
    const int q_len = qo_indptr[r + 1] - qo_indptr[r];
    for (int i = 0; i < q_len; ++i) {
      EXPECT_EQ(view.view.token_request[qo_indptr[r] + i], static_cast<int>(r));
      EXPECT_EQ(view.view.token_position[qo_indptr[r] + i], kv_len[r] - q_len + i);
    }
  }
}

// A batch with ordinary and odd lengths, and a paged cache for it with junk in every unused entry.
class Paged : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int kJunk = -77;
  const int page_size = GetParam();
  const std::vector<int> qo_indptr{0, 1, 1, 4, 5, 5, 12, 13};
  const std::vector<int> kv_len{5, 150, 0, 1, 0, 64, 129};
  const int n = 7;
  std::vector<int> indptr{0}, indices, last_page_len;
  std::vector<std::vector<long long>> slots;
  int max_pages = 0;

  void SetUp() override {
    std::mt19937 random(page_size);
    for (int r = 0; r < n; ++r) {
      const int pages = (kv_len[r] + page_size - 1) / page_size;
      slots.emplace_back();
      for (int j = 0; j < pages; ++j) {
        indices.push_back(random() % 1000);
        for (int o = 0; o < page_size && j * page_size + o < kv_len[r]; ++o) {
          slots[r].push_back(static_cast<long long>(indices.back()) * page_size + o);
        }
      }
      indptr.push_back(static_cast<int>(indices.size()));
      last_page_len.push_back(pages == 0 ? 0 : kv_len[r] - (pages - 1) * page_size);
      max_pages = std::max(max_pages, pages);
    }
  }
  // [rows, max_pages + 2], request i in row map[i], junk elsewhere.
  std::vector<int> padded(const std::vector<int>& map, int rows) const {
    std::vector<int> table(rows * (max_pages + 2), kJunk);
    for (int r = 0; r < n; ++r) {
      for (int j = indptr[r]; j < indptr[r + 1]; ++j) {
        table[map[r] * (max_pages + 2) + j - indptr[r]] = indices[j];
      }
    }
    return table;
  }
  void expect_right(const Batch& batch, const Device& device = kHost) {
    FormatView view;
    make_view(paged_kv(page_size), kBounds, batch, device, view);
    EXPECT_EQ(keys_of_rows(view, page_size), expected_rows(qo_indptr, slots));
    expect_tokens(view, qo_indptr, kv_len);
    EXPECT_EQ(view.view.num_requests, n);
    EXPECT_TRUE(view.view.row_map.empty());
    for (const RowBlock& block : view.view.row_blocks) EXPECT_GT(block.num_tokens, 0);
  }
};

TEST_P(Paged, CsrByLastPageLen) {
  Ints qo = Ints::list(qo_indptr), ptr = Ints::list(indptr), idx = Ints::list(indices),
       last = Ints::list(last_page_len);
  Batch batch{qo.view(), {}, {}};
  batch.kv.kv_page_indptr = ptr.view();
  batch.kv.kv_page_indices = idx.view();
  batch.kv.kv_last_page_len = last.view();
  expect_right(batch);
  Ints len = Ints::list(kv_len);
  batch.kv.kv_len = len.view();  // both, and they agree
  expect_right(batch);
}

TEST_P(Paged, CsrByKvLenInt64Strided) {
  const auto wide = [](const std::vector<int>& x) {
    return std::vector<int64_t>(x.begin(), x.end());
  };
  Longs qo = Longs::list(wide(qo_indptr), 2, -1), ptr = Longs::list(wide(indptr), 3, -5),
        idx = Longs::list(wide(indices)), idx_strided = Longs::list(wide(indices), 2, -9);
  Ints len = Ints::list(kv_len, 4, -3), idx_narrow = Ints::list(indices, 2, kJunk);
  Batch batch{qo.view(), {}, {}};
  batch.kv.kv_page_indptr = ptr.view();
  batch.kv.kv_len = len.view();
  for (const TensorView& view : {idx.view(), idx_strided.view(), idx_narrow.view()}) {
    batch.kv.kv_page_indices = view;
    expect_right(batch);
  }
}

// kv_page_indptr may own more pages than kv_len needs; the rest is never looked at.
TEST_P(Paged, CsrSparePagesAreNotRead) {
  std::vector<int> spare_indptr{0}, spare;
  for (int r = 0; r < n; ++r) {
    spare.insert(spare.end(), indices.begin() + indptr[r], indices.begin() + indptr[r + 1]);
    spare.insert(spare.end(), 3, kJunk);
    spare_indptr.push_back(static_cast<int>(spare.size()));
  }
  Ints qo = Ints::list(qo_indptr), ptr = Ints::list(spare_indptr), idx = Ints::list(spare),
       len = Ints::list(kv_len);
  Batch batch{qo.view(), {}, {}};
  batch.kv.kv_page_indptr = ptr.view();
  batch.kv.kv_page_indices = idx.view();
  batch.kv.kv_len = len.view();
  expect_right(batch);
}

TEST_P(Paged, BlockTable) {
  const std::vector<int> identity{0, 1, 2, 3, 4, 5, 6}, map{8, 2, 3, 0, 5, 1, 6};
  Ints qo = Ints::list(qo_indptr), len = Ints::list(kv_len), rows = Ints::list(map, 2, kJunk);
  Ints table({n, max_pages + 2}, padded(identity, n));
  Ints mapped({9, max_pages + 2}, padded(map, 9));
  Batch batch{qo.view(), {}, {}};
  batch.kv.kv_len = len.view();
  batch.kv.block_table = table.view();
  expect_right(batch);
  batch.kv.block_table = mapped.view();
  batch.kv.request_map = rows.view();
  expect_right(batch);
  // Column-major, int64.
  std::vector<int64_t> turned(9 * (max_pages + 2));
  for (int r = 0; r < 9; ++r) {
    for (int j = 0; j < max_pages + 2; ++j) turned[j * 9 + r] = mapped[r * (max_pages + 2) + j];
  }
  Longs column_major({9, max_pages + 2}, turned);
  column_major.strides() = {1, 9};
  batch.kv.block_table = column_major.view();
  expect_right(batch);
}

// Tables "on the device" are host memory here: make_view must only pass them on, and the kernels'
// addressing must find the same keys through them.
TEST_P(Paged, DeviceTables) {
  const std::vector<int> identity{0, 1, 2, 3, 4, 5, 6}, map{8, 2, 3, 0, 5, 1, 6};
  const auto on_gpu = [](TensorView view) {
    view.device_type = kCuda;
    return view;
  };
  Ints qo = Ints::list(qo_indptr), len = Ints::list(kv_len), rows = Ints::list(map, 2, kJunk),
       ptr = Ints::list(indptr, 3, kJunk), idx = Ints::list(indices, 2, kJunk);
  Longs ptr_wide = Longs::list({indptr.begin(), indptr.end()});
  Ints table({n, max_pages + 2}, padded(identity, n));
  Ints mapped({9, max_pages + 2}, padded(map, 9));
  Batch batch{qo.view(), {}, {}};
  batch.kv.kv_len = len.view();
  batch.kv.block_table = on_gpu(table.view());
  expect_right(batch, kGpu);
  batch.kv.block_table = on_gpu(mapped.view());
  batch.kv.request_map = rows.view();
  expect_right(batch, kGpu);
  batch.kv.request_map = on_gpu(rows.view());
  expect_right(batch, kGpu);
  batch.kv = {};
  batch.kv.kv_len = len.view();
  batch.kv.kv_page_indices = on_gpu(idx.view());
  for (const TensorView& view : {ptr.view(), on_gpu(ptr.view()), on_gpu(ptr_wide.view())}) {
    batch.kv.kv_page_indptr = view;
    expect_right(batch, kGpu);
  }
}

INSTANTIATE_TEST_SUITE_P(PageSizes, Paged, ::testing::Values(1, 3, 16, 64, 200));

TEST(Ragged, IndptrAndGaps) {
  const std::vector<int> qo{0, 2, 2, 3, 6}, indptr{0, 4, 9, 9, 11}, kv_len{4, 5, 0, 2};
  Ints qo_t = Ints::list(qo), ptr_t = Ints::list(indptr);
  Batch batch{qo_t.view(), {}, {}};
  batch.kv.kv_indptr = ptr_t.view();
  FormatView view;
  make_view(ragged_kv(), kBounds, batch, kHost, view);
  EXPECT_EQ(keys_of_rows(view, 1), expected_rows(qo, {{0, 1, 2, 3}, {4, 5, 6, 7, 8}, {}, {9, 10}}));
  expect_tokens(view, qo, kv_len);
  EXPECT_EQ(view.max_block, 10);
  EXPECT_EQ(view.max_block_place, "kv_indptr[4] - 1");

  Longs begin_t = Longs::list({100, 7, 1LL << 40, 102}, 2, -1);  // gaps, overlap, 64-bit
  Ints len_t = Ints::list(kv_len);
  batch.kv = {};
  batch.kv.kv_begin = begin_t.view();
  batch.kv.kv_len = len_t.view();
  make_view(ragged_kv(), kBounds, batch, kHost, view);
  EXPECT_EQ(keys_of_rows(view, 1), expected_rows(qo, {{100, 101, 102, 103}, {}, {}, {102, 103}}));
  EXPECT_EQ(view.max_block, 103);  // requests without keys or without queries read nothing
  EXPECT_EQ(view.max_block_place, "kv_begin[0] + kv_len[0] - 1");
}

TEST(View, NoRequestsAndNoKeys) {
  Ints qo = Ints::list({0}), ptr = Ints::list({0}), empty = Ints::list({});
  Batch batch{qo.view(), {}, {}};
  batch.kv.kv_page_indptr = ptr.view();
  batch.kv.kv_page_indices = empty.view();
  batch.kv.kv_last_page_len = empty.view();
  FormatView view;
  make_view(paged_kv(16), kBounds, batch, kHost, view);
  EXPECT_EQ(view.num_query_tokens, 0);
  EXPECT_EQ(view.view.num_requests, 0);
  EXPECT_TRUE(view.view.row_blocks.empty());
  EXPECT_EQ(view.max_block, -1);

  // A row without keys has a row block all the same: it must come out (0, -inf).
  Ints qo2 = Ints::list({0, 3}), ptr2 = Ints::list({0, 0}), last = Ints::list({0});
  batch.qo_indptr = qo2.view();
  batch.kv.kv_page_indptr = ptr2.view();
  batch.kv.kv_last_page_len = last.view();
  make_view(paged_kv(16), kBounds, batch, kHost, view);
  ASSERT_EQ(view.view.row_blocks.size(), 1u);
  EXPECT_EQ(view.view.row_blocks[0].kv_len, 0);
  EXPECT_EQ(view.view.token_position, (std::vector<int>{-3, -2, -1}));
}

// A view used again for smaller and larger batches equals a fresh one.
TEST(View, MemoryIsUsedAgain) {
  std::mt19937 random(5);
  FormatView used;
  for (int step = 0; step < 50; ++step) {
    std::vector<int> qo{0}, kv_len, table;
    const int n = random() % 20;
    for (int r = 0; r < n; ++r) {
      qo.push_back(qo.back() + random() % 4);
      kv_len.push_back(random() % 40);
      for (int j = 0; j < 10; ++j) table.push_back(random() % 500);
    }
    Ints qo_t = Ints::list(qo), len_t = Ints::list(kv_len), table_t({n, 10}, table);
    Batch batch{qo_t.view(), {}, {}};
    batch.kv.kv_len = len_t.view();
    batch.kv.block_table = table_t.view();
    FormatView fresh;
    make_view(paged_kv(4), kBounds, batch, kHost, fresh);
    make_view(paged_kv(4), kBounds, batch, kHost, used);
    EXPECT_EQ(used.view.row_blocks, fresh.view.row_blocks);
    EXPECT_EQ(used.view.token_request, fresh.view.token_request);
    EXPECT_EQ(used.view.token_position, fresh.view.token_position);
    EXPECT_EQ(used.tables[0].indices, fresh.tables[0].indices);
    EXPECT_EQ(used.max_block, fresh.max_block);
    EXPECT_EQ(used.max_block_place, fresh.max_block_place);
  }
}

// Six requests: a prefix of all but the last, one of 0, 2, 4, and suffixes of their own.
TEST(Composed, SharedPrefixes) {
  const std::vector<int> qo{0, 1, 3, 4, 4, 6, 7};
  const std::vector<std::vector<long long>> prefix{{40, 41, 42}}, middle{{80}, {90, 91}};
  const std::vector<int> middle_of{0, 1, 0, -1, 0, -1};  // node of level 1, -1: none
  const std::vector<int> suffix_begin{0, 5, 10, 15, 20, 25}, suffix_len{2, 0, 3, 1, 4, 2};
  std::vector<std::vector<long long>> slots(6);
  std::vector<int> total;
  for (int r = 0; r < 6; ++r) {
    if (r != 5) slots[r] = prefix[0];
    if (middle_of[r] >= 0) {
      const auto& m = middle[middle_of[r]];
      slots[r].insert(slots[r].end(), m.begin(), m.end());
    }
    for (int i = 0; i < suffix_len[r]; ++i) slots[r].push_back(suffix_begin[r] + i);
    total.push_back(static_cast<int>(slots[r].size()));
  }
  Ints qo_t = Ints::list(qo);
  Ints begin0 = Ints::list({40}), len0 = Ints::list({3}), nodes0 = Ints::list({0, 5}),
       requests0 = Ints::list({0, 1, 2, 3, 4});
  Ints begin1 = Ints::list({80, 90}), len1 = Ints::list({1, 2}), nodes1 = Ints::list({0, 3, 4}),
       requests1 = Ints::list({0, 2, 4, 1});
  Ints begin2 = Ints::list(suffix_begin), len2 = Ints::list(suffix_len);
  Batch batch{qo_t.view(), {}, std::vector<KvLevel>(3)};
  batch.levels[0].tables.kv_begin = begin0.view();
  batch.levels[0].tables.kv_len = len0.view();
  batch.levels[0].node_indptr = nodes0.view();
  batch.levels[0].node_requests = requests0.view();
  batch.levels[1].tables.kv_begin = begin1.view();
  batch.levels[1].tables.kv_len = len1.view();
  batch.levels[1].node_indptr = nodes1.view();
  batch.levels[1].node_requests = requests1.view();
  batch.levels[2].tables.kv_begin = begin2.view();
  batch.levels[2].tables.kv_len = len2.view();
  FormatView view;
  make_view(composed_kv(ragged_kv(), 3), kBounds, batch, kHost, view);
  EXPECT_EQ(keys_of_rows(view, 1), expected_rows(qo, slots));
  expect_tokens(view, qo, total);
  EXPECT_FALSE(view.view.row_map.empty());
  ASSERT_EQ(view.view.row_blocks[0].num_tokens, 6);  // read once for all five requests
  EXPECT_EQ(view.max_block, 91);
  EXPECT_EQ(view.max_block_place, "levels[1].kv_begin[1] + levels[1].kv_len[1] - 1");

  // Without the level whose nodes are scattered no map is needed.
  batch.levels.erase(batch.levels.begin() + 1);
  make_view(composed_kv(ragged_kv(), 2), kBounds, batch, kHost, view);
  EXPECT_TRUE(view.view.row_map.empty());
  EXPECT_EQ(view.view.row_blocks[0].num_tokens, 6);
}

// Requests that no level covers still get their rows, without keys.
TEST(Composed, UncoveredRequests) {
  Ints qo = Ints::list({0, 2, 3, 5}), indptr = Ints::list({0, 1}), requests = Ints::list({1}),
       pages = Ints::list({0, 1}), page = Ints::list({9}), last = Ints::list({4});
  Batch batch{qo.view(), {}, std::vector<KvLevel>(2)};
  for (KvLevel& level : batch.levels) {
    level.tables.kv_page_indptr = pages.view();
    level.tables.kv_page_indices = page.view();
    level.tables.kv_last_page_len = last.view();
    level.node_indptr = indptr.view();
    level.node_requests = requests.view();
  }
  FormatView view;
  make_view(composed_kv(paged_kv(4), 2), kBounds, batch, kHost, view);
  const auto rows = keys_of_rows(view, 4);
  EXPECT_TRUE(rows[0].empty() && rows[1].empty() && rows[3].empty() && rows[4].empty());
  EXPECT_EQ(rows[2].size(), 8u);
  std::vector<int> blocks_of_row(5);
  for (const RowBlock& block : view.view.row_blocks) {
    for (int t = 0; t < block.num_tokens; ++t) ++blocks_of_row[block.first_token + t];
  }
  EXPECT_EQ(blocks_of_row, (std::vector<int>{1, 1, 2, 1, 1}));
}

}  // namespace
}  // namespace plait
