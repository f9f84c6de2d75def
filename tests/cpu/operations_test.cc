// merge_states and append_kv on the CPU beyond what tests/api checks of every device: 16-bit types,
// strides, sizes that several threads share.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "executor.h"
#include "reference.h"

namespace plait {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class T>
class CpuOperations : public ::testing::Test {};
using Dtypes = ::testing::Types<float, Bfloat16, Float16>;
TYPED_TEST_SUITE(CpuOperations, Dtypes);

template <class T>
constexpr Dtype kDtypeOf = std::is_same_v<T, float>      ? Dtype::kFloat32
                           : std::is_same_v<T, Bfloat16> ? Dtype::kBfloat16
                                                         : Dtype::kFloat16;

TYPED_TEST(CpuOperations, MergeMeetsFloat64) {
  using T = TypeParam;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int num_rows : {1, 37, 400}) {
    const int num_states = 5, num_heads = 3, dim = 72, pitch = 80;  // 8 elements nobody owns
    std::vector<T> v(num_rows * num_states * num_heads * pitch, from_float<T>(kNan));
    std::vector<float> lse(num_rows * num_states * num_heads);
    std::vector<T> out(num_rows * num_heads * dim);
    std::vector<float> out_lse(num_rows * num_heads);
    for (size_t i = 0; i < lse.size(); ++i) {
      const bool empty = i % 4 == 1;  // its v stays NaN
      lse[i] = empty ? kNegInf : 10 * normal(random);
      for (int d = 0; d < dim && !empty; ++d) v[i * pitch + d] = from_float<T>(normal(random));
    }
    MergeParams p{};
    p.v = v.data(), p.lse = lse.data(), p.out = out.data(), p.out_lse = out_lse.data();
    p.v_stride_row = num_states * num_heads * pitch;
    p.v_stride_state = num_heads * pitch;
    p.v_stride_head = pitch;
    p.lse_stride_row = num_states * num_heads;
    p.lse_stride_state = num_heads;
    p.lse_stride_head = 1;
    p.out_stride = {num_heads * dim, dim};
    p.out_lse_stride = {num_heads, 1};
    p.num_rows = num_rows, p.num_states = num_states, p.num_heads = num_heads, p.head_dim = dim;
    p.dtype = kDtypeOf<T>;
    cpu_merge_states(p);

    for (int row = 0; row < num_rows; ++row) {
      for (int head = 0; head < num_heads; ++head) {
        double largest = -INFINITY, sum = 0;
        const auto index = [&](int n) { return (row * num_states + n) * num_heads + head; };
        for (int n = 0; n < num_states; ++n) largest = std::max(largest, double{lse[index(n)]});
        std::vector<double> want(dim, 0.0);
        double magnitude = 0;
        for (int n = 0; n < num_states; ++n) {
          if (std::isinf(lse[index(n)])) continue;
          const double weight = std::exp(lse[index(n)] - largest);
          sum += weight;
          for (int d = 0; d < dim; ++d) {
            const double x = to_float(v[static_cast<size_t>(index(n)) * pitch + d]);
            want[d] += weight * x;
            magnitude = std::max(magnitude, std::abs(x));
          }
        }
        // Rounding of one result, and of float32 logits around 30 and their weights.
        const double allowed = (test::epsilon<T>() + 64 * 0x1p-24) * magnitude;
        for (int d = 0; d < dim; ++d) {
          ASSERT_NEAR(to_float(out[(row * num_heads + head) * dim + d]), want[d] / sum, allowed)
              << "row " << row << " head " << head << " element " << d;
        }
        ASSERT_NEAR(out_lse[row * num_heads + head], largest + std::log(sum), 4e-6);
      }
    }
  }
}

// Values / scale, of every input type, in both fp8 types.
TYPED_TEST(CpuOperations, AppendRoundsValuesToFp8) {
  using T = TypeParam;
  const int num_tokens = 3, num_heads = 2, dim = 8;
  std::vector<T> k_new(num_tokens * num_heads * dim), v_new(k_new.size());
  for (size_t i = 0; i < k_new.size(); ++i) {
    k_new[i] = from_float<T>(0.37f * static_cast<float>(i) - 5.0f);
    v_new[i] = from_float<T>(i % 7 == 0 ? 3e4f : 0.011f * static_cast<float>(i));
  }
  const std::vector<int> slots{4, -1, 0};
  const auto check = [&](auto fp8, Dtype dtype_cache) {
    using Fp8 = decltype(fp8);
    std::vector<Fp8> k(5 * num_heads * dim, Fp8{0x33}), v = k;
    AppendParams p{};
    p.k_new = k_new.data(), p.v_new = v_new.data(), p.k_cache = k.data(), p.v_cache = v.data();
    p.k_new_stride = p.v_new_stride = {num_heads * dim, dim};
    p.k_stride = p.v_stride = {0, num_heads * dim, dim};
    p.num_tokens = num_tokens, p.num_kv_heads = num_heads, p.block_size = 1, p.affine = true;
    p.head_dim_qk = p.head_dim_vo = dim;
    p.dtype_new = kDtypeOf<T>, p.dtype_cache = dtype_cache;
    p.k_scale = 0.3f, p.v_scale = 2.0f;
    p.slots = slots.data(), p.slots_on_host = true, p.slots_bytes = 4, p.slots_stride = 1;
    cpu_append_kv(p);
    for (int slot = 0; slot < 5; ++slot) {
      for (int i = 0; i < num_heads * dim; ++i) {
        const int token = slot == 4 ? 0 : slot == 0 ? 2 : -1, at = token * num_heads * dim + i;
        const auto want = [&](const std::vector<T>& from, float scale) {
          return token < 0 ? 0x33 : from_float<Fp8>(to_float(from[at]) / scale).bits;
        };
        ASSERT_EQ(k[slot * num_heads * dim + i].bits, want(k_new, 0.3f)) << slot << " " << i;
        ASSERT_EQ(v[slot * num_heads * dim + i].bits, want(v_new, 2.0f)) << slot << " " << i;
      }
    }
  };
  check(E4m3{}, Dtype::kE4m3);
  check(E5m2{}, Dtype::kE5m2);
}

TYPED_TEST(CpuOperations, AppendWritesItsSlotsAndNothingElse) {
  using T = TypeParam;
  for (const int num_tokens : {1, 5, 700}) {
    const int page = 16, num_heads = 3, dim_qk = 40, dim_vo = 24;
    const int num_pages = (num_tokens + page - 1) / page + 2;
    const T sentinel = from_float<T>(7.0f);
    std::vector<T> k(num_pages * page * num_heads * dim_qk, sentinel);
    std::vector<T> v(num_pages * page * num_heads * dim_vo, sentinel);
    std::vector<T> k_new(num_tokens * num_heads * dim_qk), v_new(num_tokens * num_heads * dim_vo);
    for (size_t i = 0; i < k_new.size(); ++i) k_new[i] = from_float<T>(i % 251 + 8);
    for (size_t i = 0; i < v_new.size(); ++i) v_new[i] = from_float<T>(i % 241 + 8);
    std::vector<int> slots(num_tokens);
    for (int i = 0; i < num_tokens; ++i) {
      slots[i] = i % 5 == 3 ? -1 : num_pages * page - 1 - i;  // backwards, every fifth skipped
    }
    AppendParams p{};
    p.k_new = k_new.data(), p.v_new = v_new.data(), p.k_cache = k.data(), p.v_cache = v.data();
    p.k_new_stride = {num_heads * dim_qk, dim_qk};
    p.v_new_stride = {num_heads * dim_vo, dim_vo};
    // HND pages: [head, page, dim].
    p.k_stride = {page * num_heads * dim_qk, dim_qk, page * dim_qk};
    p.v_stride = {page * num_heads * dim_vo, dim_vo, page * dim_vo};
    p.num_tokens = num_tokens, p.num_kv_heads = num_heads;
    p.head_dim_qk = dim_qk, p.head_dim_vo = dim_vo, p.block_size = page;
    p.dtype_new = p.dtype_cache = kDtypeOf<T>;
    p.slots = slots.data(), p.slots_on_host = true, p.slots_bytes = 4, p.slots_stride = 1;
    cpu_append_kv(p);

    std::vector<T> want_k(k.size(), sentinel), want_v(v.size(), sentinel);
    for (int i = 0; i < num_tokens; ++i) {
      if (slots[i] < 0) continue;
      const int block = slots[i] / page, at = slots[i] % page;
      for (int h = 0; h < num_heads; ++h) {
        for (int d = 0; d < dim_qk; ++d) {
          want_k[((block * num_heads + h) * page + at) * dim_qk + d] =
              k_new[(i * num_heads + h) * dim_qk + d];
        }
        for (int d = 0; d < dim_vo; ++d) {
          want_v[((block * num_heads + h) * page + at) * dim_vo + d] =
              v_new[(i * num_heads + h) * dim_vo + d];
        }
      }
    }
    const auto expect_equal = [&](const std::vector<T>& got, const std::vector<T>& want) {
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(to_float(got[i]), to_float(want[i])) << "element " << i;
      }
    };
    expect_equal(k, want_k);
    expect_equal(v, want_v);
  }
}

TEST(CpuAppend, BatchIndexAndPositionThroughATable) {
  // Two requests with pages {4, 1} and {2}, page size 2, one head of 8 elements.
  std::vector<float> k(6 * 2 * 8, 7.0f), v = k, k_new(4 * 8), v_new(4 * 8);
  for (int i = 0; i < 32; ++i) k_new[i] = 100 + i / 8, v_new[i] = 200 + i / 8;
  const std::vector<int> pages{4, 1, 2};
  const std::vector<long long> begin{0, 2}, batch{0, 1, -1, 0};
  const std::vector<int> position{3, 1, 0, 0};
  AppendParams p{};
  p.k_new = k_new.data(), p.v_new = v_new.data(), p.k_cache = k.data(), p.v_cache = v.data();
  p.k_new_stride = p.v_new_stride = {8, 8};
  p.k_stride = p.v_stride = {16, 8, 8};
  p.num_tokens = 4, p.num_kv_heads = 1, p.head_dim_qk = p.head_dim_vo = 8, p.block_size = 2;
  p.dtype_new = p.dtype_cache = Dtype::kFloat32;
  p.batch_indices = batch.data(), p.batch_indices_bytes = 8, p.batch_indices_stride = 1;
  p.positions = position.data(), p.positions_bytes = 4, p.positions_stride = 1;
  p.table.indices = pages.data(), p.table.list_begin = begin.data(), p.table.list_begin_bytes = 8;
  cpu_append_kv(p);
  std::vector<float> want_k(k.size(), 7.0f), want_v = want_k;
  const auto written = [&](int slot, int token) {
    for (int d = 0; d < 8; ++d)
      want_k[slot * 8 + d] = 100 + token, want_v[slot * 8 + d] = 200 + token;
  };
  written(1 * 2 + 1, 0);  // request 0, position 3: page 1, offset 1
  written(2 * 2 + 1, 1);  // request 1, position 1: page 2, offset 1
  written(4 * 2 + 0, 3);  // request 0, position 0: page 4
  EXPECT_EQ(k, want_k);
  EXPECT_EQ(v, want_v);
}

}  // namespace
}  // namespace plait
