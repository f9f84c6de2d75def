// merge_states and append_kv: what they mean, and what they refuse.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "formats/tensors.h"
#include "plait/attention.h"

namespace plait {
namespace {

using test::Floats;
using test::Ints;
using test::Longs;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(MergeState, EmptyStatesAreTheIdentity) {
  // Rows: both empty; a empty; b empty; both with lse 2. The v of an empty state is NaN.
  Floats a({4, 1, 2}, {kNan, kNan, kNan, kNan, 0.3f, -4, 1, 1}),
      lse_a({4, 1}, {-kInf, -kInf, 2, 2});
  Floats b({4, 1, 2}, {kNan, kNan, 0.1f, 5, kNan, kNan, 3, 3}),
      lse_b({4, 1}, {-kInf, 1.7f, -kInf, 2});
  Floats out = Floats::full({4, 1, 2}, 7), out_lse = Floats::full({4, 1}, 7);
  const auto expect_right = [](Floats& out, Floats& lse) {
    const std::vector<float> exact{0, 0, 0.1f, 5, 0.3f, -4};
    for (int i = 0; i < 6; ++i) EXPECT_EQ(out[i], exact[i]) << i;
    EXPECT_FLOAT_EQ(out[6], 2);
    EXPECT_FLOAT_EQ(out[7], 2);
    EXPECT_EQ(lse[0], -kInf);
    EXPECT_EQ(lse[1], 1.7f);
    EXPECT_EQ(lse[2], 2);
    EXPECT_NEAR(lse[3], 2 + std::log(2.0), 1e-6);
  };
  merge_state(a.view(), lse_a.view(), b.view(), lse_b.view(), out.view(), out_lse.view());
  expect_right(out, out_lse);
  merge_state(b.view(), lse_b.view(), a.view(), lse_a.view(), out.view(), out_lse.view());
  expect_right(out, out_lse);
  merge_state(a.view(), lse_a.view(), b.view(), lse_b.view(), a.view(), lse_a.view());
  expect_right(a, lse_a);
}

TEST(MergeStates, ManyAndRefusals) {
  Floats v({1, 3, 2, 1}, {1, 10, 2, 20, kNan, 40}), lse({1, 3, 2}, {0, 0, 0, -kInf, -kInf, 0});
  Floats out = Floats::full({1, 2, 1}, 7), out_lse = Floats::full({1, 2}, 7);
  merge_states(v.view(), lse.view(), out.view(), out_lse.view());
  EXPECT_FLOAT_EQ(out[0], 1.5f);
  EXPECT_FLOAT_EQ(out[1], 25);
  EXPECT_NEAR(out_lse[0], std::log(2.0), 1e-6);
  EXPECT_NEAR(out_lse[1], std::log(2.0), 1e-6);

  const auto refused = [&](const TensorView& v, const TensorView& lse, const TensorView& out,
                           const TensorView& out_lse) {
    return test::refusal([&] { merge_states(v, lse, out, out_lse); });
  };
  Floats none({1, 0, 2, 1}, {}), no_lse({1, 0, 2}, {});
  EXPECT_EQ(refused(none.view(), no_lse.view(), out.view(), out_lse.view()),
            "merge_states: v is float32[1, 0, 2, 1] on cpu; it must have at least one state "
            "(v.shape[1])");
  EXPECT_EQ(refused(out.view(), lse.view(), out.view(), out_lse.view()),
            "merge_states: v is float32[1, 2, 1] on cpu; it must have 4 dimensions");
  EXPECT_EQ(refused(v.view(), out_lse.view(), out.view(), out_lse.view()),
            "merge_states: lse is float32[1, 2] on cpu; it must have 3 dimensions");
  EXPECT_EQ(refused(v.view(), lse.view(), out.view(), {}), "merge_states: out_lse is missing");
  test::HostTensor<double> doubles = test::HostTensor<double>::full({1, 3, 2, 1}, 0);
  EXPECT_EQ(refused(doubles.view(), lse.view(), out.view(), out_lse.view()),
            "merge_states: v is float64; plait takes float32, bfloat16 (or its bits as uint16) and "
            "float16");
  Floats no_rows({0, 3, 2, 1}, {}), no_rows_lse({0, 3, 2}, {}), no_out({0, 2, 1}, {}),
      no_out_lse({0, 2}, {});
  EXPECT_EQ(refused(no_rows.view(), no_rows_lse.view(), no_out.view(), no_out_lse.view()), "");
}

TEST(MergeState, DifferentStridesAreRefused) {
  Floats a = Floats::full({3, 1, 2}, 0), b = Floats::full({3, 2, 2}, 0),
         lse = Floats::full({3, 1}, 0), out = Floats::full({3, 1, 2}, 0),
         out_lse = Floats::full({3, 1}, 0);
  b.shape() = {3, 1, 2};
  EXPECT_EQ(test::refusal([&] {
              merge_state(a.view(), lse.view(), b.view(), lse.view(), out.view(), out_lse.view());
            }),
            "merge_state: v_a has strides [2, 2, 1] and v_b [4, 2, 1]; they must be equal");
}

// Five tokens of one head, dim 1 and 2, K = token + 1, V = 10 and 100 times that.
class Append : public ::testing::Test {
 protected:
  static constexpr int kPages = 6, kPage = 4;
  Floats k_new = Floats::full({5, 1, 1}, 0), v_new = Floats::full({5, 1, 2}, 0);
  Floats k = Floats::full({kPages, kPage, 1, 1}, -1), v = Floats::full({kPages, kPage, 1, 2}, -1);
  Floats k_rows = Floats::full({20, 1, 1}, -1), v_rows = Floats::full({20, 1, 2}, -1);
  Longs slots = Longs::list({22, -1, 3, 4, 0});
  // Request 0 has pages 5, 0; request 1 page 1. Token 1 is skipped.
  Ints requests = Ints::list({0, -1, 1, 0, 1}), positions = Ints::list({1, 50, 3, 5, 0});
  Ints indptr = Ints::list({0, 2, 3}), indices = Ints::list({5, 0, 1}), last = Ints::list({2, 4});
  Ints table = Ints::full({2, 3}, -9), begin = Ints::list({10, 2});
  AppendArgs args;

  void SetUp() override {
    for (int i = 0; i < 5; ++i) {
      k_new[i] = static_cast<float>(i + 1);
      v_new[2 * i] = static_cast<float>(10 * (i + 1));
      v_new[2 * i + 1] = static_cast<float>(100 * (i + 1));
    }
    table[0] = 5, table[1] = 0, table[3] = 1;
    args.kv = paged_kv(kPage);
    args.k_new = k_new.view();
    args.v_new = v_new.view();
    args.k_cache = k.view();
    args.v_cache = v.view();
  }
  void by_position() {
    args.slot_mapping = {};
    args.batch_indices = requests.view();
    args.positions = positions.view();
  }
  void use_csr() {
    by_position();
    args.tables = {};
    args.tables.kv_page_indptr = indptr.view();
    args.tables.kv_page_indices = indices.view();
  }
  std::string append() {
    return test::refusal([&] { append_kv(args); });
  }
  // Expects token by slot and nothing else, and clears the cache.
  void expect_slots(const std::vector<std::pair<int, int>>& slot_tokens, Floats& k, Floats& v) {
    std::vector<float> k_want(k.data().size(), -1), v_want(v.data().size(), -1);
    for (const auto& [slot, token] : slot_tokens) {
      k_want[slot] = static_cast<float>(token + 1);
      v_want[2 * slot] = static_cast<float>(10 * (token + 1));
      v_want[2 * slot + 1] = static_cast<float>(100 * (token + 1));
    }
    EXPECT_EQ(k.data(), k_want);
    EXPECT_EQ(v.data(), v_want);
    std::fill(k.data().begin(), k.data().end(), -1.0f);
    std::fill(v.data().begin(), v.data().end(), -1.0f);
  }
};

TEST_F(Append, BySlot) {
  args.slot_mapping = slots.view();
  EXPECT_EQ(append(), "");
  expect_slots({{22, 0}, {3, 2}, {4, 3}, {0, 4}}, k, v);
  Ints narrow = Ints::list({22, -1, 3, 4, 0}, 3, 99);
  args.slot_mapping = narrow.view();
  EXPECT_EQ(append(), "");
  expect_slots({{22, 0}, {3, 2}, {4, 3}, {0, 4}}, k, v);
}

TEST_F(Append, ByPosition) {
  const std::vector<std::pair<int, int>> want{
      {5 * 4 + 1, 0}, {1 * 4 + 3, 2}, {0 * 4 + 1, 3}, {1 * 4 + 0, 4}};
  use_csr();
  EXPECT_EQ(append(), "");
  expect_slots(want, k, v);
  args.tables.kv_last_page_len = last.view();  // positions 1, 5 of 6; 3, 0 of 4
  EXPECT_EQ(append(), "");
  expect_slots(want, k, v);
  args.tables = {};
  args.tables.block_table = table.view();
  EXPECT_EQ(append(), "");
  expect_slots(want, k, v);
  Ints map = Ints::list({1, 0});
  args.tables.request_map = map.view();
  positions = Ints::list({1, 50, 3, 2, 5});  // request 0 in row 1: page 1; request 1 in row 0
  EXPECT_EQ(append(), "");
  expect_slots({{1 * 4 + 1, 0}, {5 * 4 + 3, 2}, {1 * 4 + 2, 3}, {0 * 4 + 1, 4}}, k, v);
}

TEST_F(Append, RaggedRows) {
  args.kv = ragged_kv();
  args.k_cache = k_rows.view();
  args.v_cache = v_rows.view();
  by_position();
  args.tables.kv_begin = begin.view();
  EXPECT_EQ(append(), "");
  expect_slots({{11, 0}, {5, 2}, {15, 3}, {2, 4}}, k_rows, v_rows);
  args.tables = {};
  Ints kv_indptr = Ints::list({0, 8, 12});
  args.tables.kv_indptr = kv_indptr.view();
  EXPECT_EQ(append(), "");
  expect_slots({{1, 0}, {11, 2}, {5, 3}, {8, 4}}, k_rows, v_rows);
}

TEST_F(Append, HeadsFirstPagesAndJointCache) {
  Floats joint = Floats::full({3, 2, 2, 4, 8}, -1);  // [pages, K and V, heads, page_size, dim]
  Floats k_two = Floats::full({1, 2, 8}, 3), v_two = Floats::full({1, 2, 8}, 4);
  Ints slot = Ints::list({6});
  args = {};
  args.kv = paged_kv(4, true);
  args.k_new = k_two.view();
  args.v_new = v_two.view();
  args.k_cache = joint.view();
  args.slot_mapping = slot.view();
  EXPECT_EQ(append(), "");
  for (int page = 0; page < 3; ++page) {
    for (int kv = 0; kv < 2; ++kv) {
      for (int head = 0; head < 2; ++head) {
        for (int token = 0; token < 4; ++token) {
          const float want = page == 1 && token == 2 ? (kv == 0 ? 3.0f : 4.0f) : -1.0f;
          for (int d = 0; d < 8; ++d) {
            ASSERT_EQ(joint[(((page * 2 + kv) * 2 + head) * 4 + token) * 8 + d], want);
          }
        }
      }
    }
  }
}

TEST_F(Append, RefusalsWriteNothing) {
  args.slot_mapping = slots.view();
  slots = Longs::list({22, -1, 3, 4, 24});
  EXPECT_EQ(append(),
            "append_kv: slot_mapping[4] is 24; the cache has slots 0 ... 23, and -1 skips a token");
  slots = Longs::list({22, -2, 3, 4, 0});
  EXPECT_EQ(append(),
            "append_kv: slot_mapping[1] is -2; the cache has slots 0 ... 23, and -1 skips a token");
  args.positions = positions.view();
  EXPECT_EQ(append(), "append_kv: positions is given, but it has no meaning beside slot_mapping");
  args.slot_mapping = {};
  EXPECT_EQ(
      append(),
      "append_kv: batch_indices is missing; give slot_mapping, or batch_indices, positions and "
      "a table");
  by_position();
  EXPECT_EQ(append(),
            "append_kv: kv_page_indptr is missing; paged K and V need kv_page_indptr and "
            "kv_page_indices, or block_table");
  use_csr();
  requests = Ints::list({0, -1, 1, 0, 2});
  EXPECT_EQ(
      append(),
      "append_kv: batch_indices[4] is 2; it must be 0 ... 1 (the tables have 2 requests), or -1 "
      "to skip the token");
  requests = Ints::list({0, -1, 1, 0, 1});
  positions = Ints::list({1, 50, 4, 5, 0});
  EXPECT_EQ(append(), "append_kv: positions[2] is 4, but request 1 has 4 keys by kv_page_indptr");
  positions = Ints::list({1, 50, 3, -1, 0});
  EXPECT_EQ(append(), "append_kv: positions[3] is -1; it must be >= 0");
  positions = Ints::list({1, 50, 3, 5, 0});
  indices = Ints::list({5, 6, 1});
  EXPECT_EQ(append(),
            "append_kv: kv_page_indices[1] is 6, but the cache has 6 pages (k_cache.shape[0])");
  indices = Ints::list({5, 0, 1});
  Ints len = Ints::list({5, 4});
  args.tables.kv_len = len.view();
  EXPECT_EQ(append(), "append_kv: positions[3] is 5, but request 0 has 5 keys by kv_len");
  args.tables = {};
  args.tables.block_table = table.view();
  positions = Ints::list({1, 50, 3, 12, 0});
  EXPECT_EQ(append(), "append_kv: positions[3] is 12, but request 0 has 12 keys by block_table");
  positions = Ints::list({1, 50, 3, 8, 0});
  EXPECT_EQ(append(),
            "append_kv: block_table[0, 2] is -9, but the cache has 6 pages (k_cache.shape[0])");
  args.k_cache.shape[1] = 3;
  EXPECT_EQ(append(),
            "append_kv: k_cache is float32[6, 3, 1, 1] on cpu; its shape must be [any, 4, 1, 1] "
            "(pages, page_size, num_kv_heads, head_dim)");
  args.k_cache.shape[1] = 4;
  args.kv = ragged_kv();
  args.k_cache = k_rows.view();
  args.v_cache = v_rows.view();
  args.tables = {};
  args.tables.kv_begin = begin.view();
  positions = Ints::list({10, 50, 3, 8, 0});
  EXPECT_EQ(append(),
            "append_kv: kv_begin[0] is 10 and positions[0] is 10, but k_cache has 20 rows "
            "(k_cache.shape[0])");
  expect_slots({}, k, v);
  expect_slots({}, k_rows, v_rows);
}

TEST_F(Append, NoTokens) {
  Floats none({0, 1, 1}, {}), none_v({0, 1, 2}, {});
  Longs no_slots = Longs::list({});
  args.k_new = none.view();
  args.v_new = none_v.view();
  args.slot_mapping = no_slots.view();
  EXPECT_EQ(append(), "");
  expect_slots({}, k, v);
}

}  // namespace
}  // namespace plait
