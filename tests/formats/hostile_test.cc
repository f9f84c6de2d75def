// Index arrays full of nonsense: make_view refuses them, or what it makes is sound. Run under
// AddressSanitizer and UBSan this also says that nothing past an array is read and no sum
// overflows.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <list>
#include <random>

#include "formats/tensors.h"
#include "formats/view.h"

namespace plait {
namespace {

class Nonsense {
 public:
  explicit Nonsense(unsigned seed) : random_(seed) {}

  // Mostly plausible arrays, so that later checks are reached; now and then anything at all.
  TensorView lengths(int n) {
    return array(n, [&] { return below(9); });
  }
  TensorView indptr(int n) {
    int64_t total = 0;
    bool first = true;
    return array(n, [&] {
      total += first ? 0 : below(4);
      first = false;
      return total;
    });
  }
  TensorView table(int rows, int columns) {
    TensorView view = array(rows * columns + 1, [&] { return below(30); });
    shapes_.push_back({rows, columns});
    strides_.push_back({columns * view.stride(0), view.stride(0)});
    view.ndim = 2;
    view.shape = shapes_.back().data();
    view.strides = strides_.back().data();
    return view;
  }
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  bool seldom() { return below(40) == 0; }

 private:
  template <class Value>
  TensorView array(int n, Value value) {
    if (seldom()) n += 1 - below(3);
    if (n < 0) n = 0;
    const bool wide = below(2) == 0;
    const int step = 1 + below(2);
    constexpr int64_t kOdd[] = {-1, -2, INT_MIN, INT_MAX, LLONG_MIN, LLONG_MAX, 1LL << 48, 100};
    std::vector<int64_t> values(n);
    for (int64_t& x : values) x = seldom() ? kOdd[below(8)] : value();
    if (wide) {
      longs_.push_back(test::Longs::list(values, step, -1));
      return longs_.back().view();
    }
    ints_.push_back(test::Ints::list({values.begin(), values.end()}, step, -1));
    return ints_.back().view();
  }

  std::mt19937 random_;
  std::list<test::Ints> ints_;
  std::list<test::Longs> longs_;
  std::list<std::vector<int64_t>> shapes_, strides_;
};

KvTables tables_of(Nonsense& nonsense, const KvFormat& format, int n) {
  KvTables t;
  if (format.kind == KvFormat::kRagged) {
    if (nonsense.below(2) == 0) {
      t.kv_indptr = nonsense.indptr(n + 1);
    } else {
      t.kv_begin = nonsense.lengths(n);
      t.kv_len = nonsense.lengths(n);
    }
    return t;
  }
  if (nonsense.below(2) == 0) {
    t.block_table = nonsense.table(n + nonsense.below(2), 1 + nonsense.below(9));
    t.kv_len = nonsense.lengths(n);
    if (nonsense.below(3) == 0) t.request_map = nonsense.lengths(n);
    return t;
  }
  t.kv_page_indptr = nonsense.indptr(n + 1);
  t.kv_page_indices = nonsense.table(1, 4 * n);
  t.kv_page_indices.ndim = 1;
  ++t.kv_page_indices.shape;
  ++t.kv_page_indices.strides;
  if (nonsense.below(2) == 0) {
    t.kv_len = nonsense.lengths(n);
  } else {
    t.kv_last_page_len = nonsense.lengths(n);
  }
  return t;
}

void expect_sound(const FormatView& out, const KvFormat& format, const Bounds& bounds) {
  const BsrView& view = out.view;
  ASSERT_GE(out.num_query_tokens, 0);
  ASSERT_LE(out.num_query_tokens, bounds.query_tokens);
  ASSERT_EQ(view.token_position.size(), static_cast<size_t>(out.num_query_tokens));
  std::vector<int> covered(out.num_query_tokens, -1), blocks(out.num_query_tokens, 0);
  long long pages = 0;
  for (const RowBlock& b : view.row_blocks) {
    ASSERT_GT(b.num_tokens, 0);
    ASSERT_GE(b.kv_len, 0);
    ASSERT_LE(b.kv_pos_begin + b.kv_len, bounds.keys);
    ASSERT_GE(b.level, 0);
    ASSERT_LT(b.level, view.num_levels);
    for (int t = b.first_token; t < b.first_token + b.num_tokens; ++t) {
      const int row = view.row_map.empty() ? t : view.row_map.at(t);
      ASSERT_GE(row, 0);
      ASSERT_LT(row, out.num_query_tokens);
      ASSERT_LT(covered[row], b.level) << "row twice in a level";
      covered[row] = b.level;
      ++blocks[row];
    }
    if (format.kind == KvFormat::kRagged) {
      ASSERT_TRUE(b.kv_len == 0 || b.first_block + b.kv_len - 1 <= out.max_block);
      continue;
    }
    const std::vector<int>& indices = out.tables.at(b.level).indices;
    const int n = (b.kv_len + format.page_size - 1) / format.page_size;
    ASSERT_LE(b.first_block + n, static_cast<i64>(indices.size()));
    for (int i = 0; i < n; ++i) {
      ASSERT_GE(indices[b.first_block + i], 0);
      ASSERT_LE(indices[b.first_block + i], out.max_block);
    }
  }
  for (const int n : blocks) ASSERT_GE(n, 1) << "a row in no row block";
  for (const LevelTable& table : out.tables) pages += static_cast<long long>(table.indices.size());
  ASSERT_LE(pages, max_host_pages(format, bounds));
}

TEST(Hostile, RefusedOrSound) {
  FormatView out;
  int num_sound = 0, num_refused = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    Nonsense nonsense(seed);
    KvFormat format = nonsense.below(2) == 0 ? ragged_kv() : paged_kv(1 + nonsense.below(5));
    format.num_levels = 1 + nonsense.below(3);
    const Bounds bounds{6, 20, 24, nonsense.below(2) * 30};
    const int n = nonsense.below(7);
    Batch batch;
    batch.qo_indptr = nonsense.indptr(n + 1);
    if (format.num_levels == 1) {
      batch.kv = tables_of(nonsense, format, n);
    } else {
      batch.levels.resize(format.num_levels);
      for (KvLevel& level : batch.levels) {
        const bool own = nonsense.below(2) == 0;
        const int nodes = own ? n : nonsense.below(4);
        level.tables = tables_of(nonsense, format, nodes);
        if (own) continue;
        level.node_indptr = nonsense.indptr(nodes + 1);
        level.node_requests = nonsense.lengths(
            level.node_indptr.shape[0] == 0 || level.node_indptr.dtype_bits == 64
                ? nonsense.below(4)
                : std::clamp(static_cast<int32_t*>(
                                 level.node_indptr.data)[(level.node_indptr.shape[0] - 1) *
                                                         level.node_indptr.stride(0)],
                             0, 8));
      }
    }
    try {
      make_view(format, bounds, batch, {}, out);
    } catch (const ArgumentError& e) {
      ++num_refused;
      EXPECT_EQ(std::string(e.what()).rfind("plan: ", 0), 0u) << e.what();
      continue;
    }
    ++num_sound;
    expect_sound(out, format, bounds);
    if (HasFatalFailure()) FAIL() << "seed " << seed;
  }
  EXPECT_GT(num_sound, 200);
  EXPECT_GT(num_refused, 200);
}

TEST(HostPages, CapacityFollowsFromBounds) {
  const Bounds bounds{4, 8, 33};
  EXPECT_EQ(max_host_pages(ragged_kv(), bounds), 0);
  EXPECT_EQ(max_host_pages(paged_kv(16), bounds), 4 * 3);
  EXPECT_EQ(max_host_pages(composed_kv(paged_kv(16), 3), bounds), 4 * 5);
  EXPECT_EQ(max_host_pages(paged_kv(16), {4, 8, 33, 7}), 7);
}

}  // namespace
}  // namespace plait
