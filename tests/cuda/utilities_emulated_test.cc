// upload, pack_mask, merge_states and append_kv, executed on the host (emulate.h).
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "append_kv.cuh"
#include "cuda/plan_image.h"
#include "merge_states.cuh"
#include "pack_mask.cuh"
#include "tile/draw.cuh"
#include "tile/widen.cuh"
#include "upload.cuh"

namespace plait::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void launch(int grid, const std::function<void()>& kernel) {
  std::vector<int> ctas(grid);
  std::iota(ctas.begin(), ctas.end(), 0);
  emulate::launch(grid, 128, ctas, kernel);
}

// rows x n states x 2 heads x 8, and the union by its definition in double.
struct MergeCase {
  int rows, n;
  std::vector<float> v, lse, out, out_lse;
  MergeStatesCall call{};
  MergeCase(int rows, int n, bool base2 = false) : rows(rows), n(n) {
    call.log2_per_lse = base2 ? 1.0f : kLog2e;
    call.lse_per_log2 = base2 ? 1.0f : kLn2;
    for (int i = 0; i < rows * n * 2; ++i) lse.push_back(0.5f * (i % 7) - 1);
    for (int i = 0; i < rows * n * 2 * 8; ++i) v.push_back(0.25f * (i % 11) - 1);
    out.assign(rows * 2 * 8, 7);
    out_lse.assign(rows * 2, 7);
  }
  void run() {
    call.v = v.data();
    call.lse = lse.data();
    call.out = out.data();
    call.out_lse = out_lse.data();
    call.v_stride_row = n * 16;
    call.v_stride_state = 16;
    call.v_stride_head = 8;
    call.lse_stride_row = n * 2;
    call.lse_stride_state = 2;
    call.lse_stride_head = 1;
    call.out_stride = {16, 8};
    call.out_lse_stride = {2, 1};
    call.num_rows = rows;
    call.num_states = n;
    call.num_heads = 2;
    call.head_dim = 8;
    launch(2, [&] { merge_states<Dtype::kFloat32>(call); });
  }
  void make_empty(int row, int state) {
    for (int h = 0; h < 2; ++h) {
      lse[(row * n + state) * 2 + h] = kNegInf;
      for (int i = 0; i < 8; ++i) v[((row * n + state) * 2 + h) * 8 + i] = kNan;
    }
  }
};

void check_definition(bool base2) {
  MergeCase c(13, 3, base2);
  c.make_empty(4, 1);
  c.run();
  const double base = base2 ? 2.0 : std::exp(1.0);
  for (int row = 0; row < c.rows; ++row) {
    for (int h = 0; h < 2; ++h) {
      double sum = 0;
      for (int s = 0; s < c.n; ++s) sum += std::pow(base, c.lse[(row * c.n + s) * 2 + h]);
      EXPECT_NEAR(c.out_lse[row * 2 + h], std::log(sum) / std::log(base), 1e-5);
      for (int i = 0; i < 8; ++i) {
        double want = 0;
        for (int s = 0; s < c.n; ++s) {
          const double lse = c.lse[(row * c.n + s) * 2 + h];
          if (std::isinf(lse)) continue;
          want += std::pow(base, lse) / sum * c.v[((row * c.n + s) * 2 + h) * 8 + i];
        }
        EXPECT_NEAR(c.out[(row * 2 + h) * 8 + i], want, 1e-5) << row << " " << h << " " << i;
      }
    }
  }
}

TEST(MergeStatesEmulated, EqualsTheDefinition) { check_definition(false); }
TEST(MergeStatesEmulated, EqualsTheDefinitionInBase2) { check_definition(true); }

TEST(MergeStatesEmulated, EmptyStatesAreTheIdentity) {
  MergeCase c(2, 2);
  c.make_empty(0, 0);
  c.make_empty(0, 1);
  c.make_empty(1, 0);
  c.run();
  for (int h = 0; h < 2; ++h) {
    EXPECT_EQ(c.out_lse[h], kNegInf);
    EXPECT_EQ(c.out_lse[2 + h], c.lse[(1 * 2 + 1) * 2 + h]);
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(c.out[h * 8 + i], 0.0f);
      EXPECT_EQ(c.out[(2 + h) * 8 + i], c.v[((1 * 2 + 1) * 2 + h) * 8 + i]);
    }
  }
}

// Cache of 6 pages of 4 tokens, 2 heads, K rows of 16 and V rows of 6 bytes; 5 tokens.
struct AppendCase {
  static constexpr int kPages = 6, kPage = 4, kHeads = 2, kTokens = 5;
  std::vector<char> k_new, v_new, k_cache, v_cache;
  AppendKvCall call{};
  AppendCase()
      : k_cache(kPages * kPage * kHeads * 16, 99), v_cache(kPages * kPage * kHeads * 6, 99) {
    for (int i = 0; i < kTokens * kHeads * 16; ++i) k_new.push_back(static_cast<char>(i % 90));
    for (int i = 0; i < kTokens * kHeads * 6; ++i) v_new.push_back(static_cast<char>(i % 80));
    call.k_new = k_new.data();
    call.v_new = v_new.data();
    call.k_cache = k_cache.data();
    call.v_cache = v_cache.data();
    call.k_new_stride = {kHeads * 16, 16};
    call.v_new_stride = {kHeads * 6, 6};
    call.k_stride = {kPage * kHeads * 16, kHeads * 16, 16};
    call.v_stride = {kPage * kHeads * 6, kHeads * 6, 6};
    call.k_row_bytes = 16;
    call.v_row_bytes = 6;
    call.num_tokens = kTokens;
    call.num_kv_heads = kHeads;
    call.block_size = kPage;
    call.k_unit = reinterpret_cast<std::uintptr_t>(k_new.data()) % 16 == 0 &&
                          reinterpret_cast<std::uintptr_t>(k_cache.data()) % 16 == 0
                      ? 16
                      : 4;
    call.v_unit = 2;
  }
  void expect(const std::vector<int>& slots) const {  // -1: nowhere
    std::vector<char> k(k_cache.size(), 99), v(v_cache.size(), 99);
    for (int t = 0; t < kTokens; ++t) {
      if (slots[t] < 0) continue;
      std::memcpy(&k[slots[t] * kHeads * 16], &k_new[t * kHeads * 16], kHeads * 16);
      std::memcpy(&v[slots[t] * kHeads * 6], &v_new[t * kHeads * 6], kHeads * 6);
    }
    EXPECT_EQ(k, k_cache);
    EXPECT_EQ(v, v_cache);
  }
};

TEST(AppendKvEmulated, BySlot) {
  AppendCase c;
  const std::vector<i64> slots{5, -1, 23, -1, 0, -1, -1, -1, 9, -1};  // stride 2
  c.call.slots = slots.data();
  c.call.slots_bytes = 8;
  c.call.slots_stride = 2;
  launch(1, [&] { append_kv(c.call); });
  c.expect({5, 23, 0, -1, 9});
}

TEST(AppendKvEmulated, ByBatchIndexAndPositionThroughAPageTable) {
  AppendCase c;
  const std::vector<int> pages{3, 1, 5, 0}, indptr{0, 1, 4};
  const std::vector<int> batch{0, 1, 1, -1, 1}, positions{2, 0, 9, 1, 7};
  c.call.batch_indices = batch.data();
  c.call.batch_indices_bytes = 4;
  c.call.batch_indices_stride = 1;
  c.call.positions = positions.data();
  c.call.positions_bytes = 4;
  c.call.positions_stride = 1;
  c.call.table.indices = pages.data();
  c.call.table.list_begin = indptr.data();
  launch(2, [&] { append_kv(c.call); });
  c.expect({3 * 4 + 2, 1 * 4 + 0, 0 * 4 + 1, -1, 5 * 4 + 3});
}

TEST(AppendKvEmulated, RoundsValuesToFp8) {
  const int dim = 40, heads = 3;
  std::vector<Bfloat16> k_new(heads * dim), v_new(heads * dim);
  for (int i = 0; i < heads * dim; ++i) {
    k_new[i] = from_float<Bfloat16>(0.37f * i - 20.0f);
    v_new[i] = from_float<Bfloat16>(i % 9 == 0 ? -1e9f : 1e-3f * i);
  }
  std::vector<E4m3> k(2 * heads * dim, E4m3{0x33});
  std::vector<E4m3> v = k;
  const std::vector<int> slots{1};
  AppendKvCall call{};
  call.k_new = reinterpret_cast<const char*>(k_new.data());
  call.v_new = reinterpret_cast<const char*>(v_new.data());
  call.k_cache = reinterpret_cast<char*>(k.data());
  call.v_cache = reinterpret_cast<char*>(v.data());
  call.k_new_stride = call.v_new_stride = {heads * dim * 2, dim * 2};
  call.k_stride = call.v_stride = {0, heads * dim, dim};
  call.k_row_bytes = call.v_row_bytes = dim;
  call.num_tokens = 1;
  call.num_kv_heads = heads;
  call.block_size = 1;
  call.affine = 1;
  call.dtype_new = Dtype::kBfloat16;
  call.dtype_cache = Dtype::kE4m3;
  call.k_scale = 0.3f;
  call.v_scale = 2.0f;
  call.slots = slots.data();
  call.slots_bytes = 4;
  call.slots_stride = 1;
  launch(2, [&] { append_kv(call); });
  for (int i = 0; i < heads * dim; ++i) {
    EXPECT_EQ(k[i].bits, 0x33);
    EXPECT_EQ(v[i].bits, 0x33);
    EXPECT_EQ(k[heads * dim + i].bits, from_float<E4m3>(to_float(k_new[i]) / 0.3f).bits) << i;
    EXPECT_EQ(v[heads * dim + i].bits, from_float<E4m3>(to_float(v_new[i]) / 2.0f).bits) << i;
  }
}

// Every pair of codes beside each other, at both places of a word.
template <class From, Dtype kTo>
void check_widen() {
  using To = Storage<kTo>;
  for (unsigned a = 0; a < 256; ++a) {
    for (unsigned b = 0; b < 256; b += a % 16 == 0 ? 1 : 51) {
      const unsigned pair = a | b << 8;
      const unsigned wide[2] = {widen_pair<From, kTo, 0>(pair | 0xffff0000u),
                                widen_pair<From, kTo, 1>(pair << 16 | 0x5555u)};
      for (const unsigned word : wide) {
        const float got[2] = {to_float(To{static_cast<unsigned short>(word)}),
                              to_float(To{static_cast<unsigned short>(word >> 16)})};
        const float want[2] = {to_float(From{static_cast<unsigned char>(a)}),
                               to_float(From{static_cast<unsigned char>(b)})};
        for (int i = 0; i < 2; ++i) {
          ASSERT_EQ(std::isnan(got[i]), std::isnan(want[i])) << a << " " << b;
          if (!std::isnan(want[i])) {
            ASSERT_EQ(got[i], want[i]) << a << " " << b;
            ASSERT_EQ(std::signbit(got[i]), std::signbit(want[i])) << a << " " << b;
          }
        }
      }
    }
  }
}
TEST(Widen, EveryCode) {
  check_widen<E4m3, Dtype::kBfloat16>();
  check_widen<E4m3, Dtype::kFloat16>();
  check_widen<E5m2, Dtype::kBfloat16>();
  check_widen<E5m2, Dtype::kFloat16>();
}

TEST(UploadEmulated, PlanArrivesAndPointsAtItsCopies) {
  BsrView view;
  view.num_requests = 2;
  view.token_request = {0, 1};
  view.token_position = {999, 4};
  view.row_blocks = {{0, 0, 1, 1000, 0, 0}, {63, 1, 1, 5, 0, 0}};
  PlanTarget target;
  target.num_ctas = 5;
  target.shapes[0] = {16, 1, 1.0f, 0.1f};
  target.merge_us = 0.1f;
  target.max_partial_rows = 1000;
  target.queue_percent = 30;
  const Plan plan = make_plan(view, {1, -1, 0}, target);
  ASSERT_FALSE(plan.merge_sources.empty());
  ASSERT_GT(plan.num_queued(), 0);
  FormatView format;
  format.tables.resize(1);
  for (int i = 0; i < 64; ++i) format.tables[0].indices.push_back(7 * i);

  constexpr int kGrid = 8;  // more CTAs than the plan has
  std::size_t body_bytes = 0;
  alignas(16) static char image[1 << 16], head[2048], body[1 << 16];
  // A mask on the device: two rows, the words of which pack_mask.cuh will write elsewhere.
  const unsigned char mask_bits[5] = {};
  format.mask.tokens = {{0, 970, 1000}, {2, 1, 5}};
  format.mask.token_source = {0, 32};
  format.mask.source = mask_bits;
  unsigned packed[4];
  body_bytes = cuda::body_bytes(plan, format);
  const cuda::MaskArrays mask = cuda::write_image(plan, format, packed, kGrid, body, image);
  std::vector<unsigned> arrived(10, 3);
  UploadCall call{};
  call.from = image;
  call.head = head;
  call.body = body;
  call.head_units = static_cast<int>(cuda::head_bytes(kGrid) / 16);
  call.body_units = static_cast<int>(body_bytes / 16);
  call.counters = arrived.data();
  call.num_counters = 9;
  // Runs before it may still read the plan before.
  int num_told = 0;
  emulate::kernels_before = [&](bool complete) {
    if (!complete || num_told++ > 0) return;
    const auto zero = [](char x) { return x == 0; };
    EXPECT_TRUE(std::all_of(std::begin(head), std::end(head), zero));
    EXPECT_TRUE(std::all_of(std::begin(body), std::end(body), zero));
    EXPECT_EQ(arrived, std::vector<unsigned>(10, 3));
  };
  launch(3, [&] { upload(call); });
  emulate::kernels_before = nullptr;
  EXPECT_EQ(num_told, 3);

  EXPECT_EQ(arrived, (std::vector<unsigned>{0, 0, 0, 0, 0, 0, 0, 0, 0, 3}));
  PlanView got;
  std::memcpy(&got, head, sizeof got);
  EXPECT_EQ(got.num_tokens, 2);
  EXPECT_EQ(got.queue_begin, plan.cta_item_indptr.back());
  EXPECT_EQ(got.queue_end, static_cast<int>(plan.items.size()));
  EXPECT_EQ(got.row_map, nullptr);
  const auto same = [](const auto* copy, const auto& array) {
    ASSERT_NE(copy, nullptr);
    EXPECT_TRUE(std::equal(array.begin(), array.end(), copy));
    EXPECT_TRUE(reinterpret_cast<const char*>(copy) >= body &&
                reinterpret_cast<const char*>(copy + array.size()) <= body + sizeof body);
  };
  same(got.row_blocks, plan.row_blocks);
  same(got.items, plan.items);
  for (int cta = 0; cta < kGrid; ++cta) {
    SCOPED_TRACE(cta);
    CtaStart start;
    std::memcpy(&start, head + cuda::cta_starts_at() + cta * sizeof start, sizeof start);
    const auto& indptr = plan.cta_item_indptr;
    const int begin = cta < plan.num_ctas ? indptr[cta] : 0;
    const int end = cta < plan.num_ctas ? indptr[cta + 1] : 0;
    EXPECT_EQ(start.item_begin, begin);
    EXPECT_EQ(start.item_end, end);
    if (begin == end) continue;
    EXPECT_EQ(start.item, plan.items[begin]);
    EXPECT_EQ(start.block, plan.row_blocks[plan.items[begin].row_block]);
    EXPECT_EQ(start.table.indices, got.tables[start.block.level].indices);
  }
  same(got.token_request, plan.token_request);
  same(got.token_position, plan.token_position);
  same(got.merge_indptr, plan.merge_indptr);
  same(got.merge_sources, plan.merge_sources);
  same(got.token_mask, format.mask.tokens);
  EXPECT_EQ(mask.tokens, got.token_mask);
  same(mask.token_source, format.mask.token_source);
  EXPECT_EQ(got.mask_words, packed);
  same(static_cast<const int*>(got.tables[0].indices), format.tables[0].indices);
}

// CTAs of a grid draw in any order, idle ones and those that come when all is gone too: every item
// goes to one of them, and the counter is 0 for the next run, whose queue may be another.
TEST(DrawItem, EveryItemOnceAndTheCounterEndsAtZero) {
  constexpr unsigned kGrid = 5;
  emulate::grid_dim = {kGrid, 1, 1};
  unsigned tickets = 0;
  Params params{};
  params.tickets = &tickets;
  std::mt19937 random(3);
  for (const int length : {7, 1, 0, 23, 4}) {
    SCOPED_TRACE(length);
    PlanView plan{};
    plan.queue_begin = 11;
    plan.queue_end = 11 + length;
    params.plan = &plan;
    std::vector<int> drawn(length, 0);
    std::vector<unsigned> drawing(kGrid);
    std::iota(drawing.begin(), drawing.end(), 0u);
    while (!drawing.empty()) {
      if (length > 0 && drawing.size() < kGrid) {
        EXPECT_NE(tickets, 0u) << "too early";
      }
      const std::size_t cta = random() % drawing.size();
      const int item = draw_item(params);
      if (item < 0) {
        drawing.erase(drawing.begin() + cta);
      } else {
        ++drawn.at(item - plan.queue_begin);
      }
    }
    EXPECT_EQ(tickets, 0u);
    for (const int times : drawn) EXPECT_EQ(times, 1);
  }
}

// Rows of several requests, bits and bools, against the same mask bit by bit.
TEST(PackMaskEmulated, WordsOfEveryToken) {
  const int begins[] = {0, 5, 64, 70, 33}, ends[] = {40, 5, 200, 71, 1200};
  std::vector<TokenMask> tokens;
  std::vector<i64> source;
  std::vector<unsigned char> bits, bools;
  i64 num_words = 0;
  for (int t = 0; t < 5; ++t) {
    tokens.push_back({num_words, begins[t], ends[t]});
    num_words += mask_row_words(begins[t], ends[t]);
    source.push_back(static_cast<i64>(bools.size()));
    for (int k = begins[t]; k < ends[t]; ++k) bools.push_back((k * 7 + t) % 3 == 0);
  }
  bits.resize((bools.size() + 7) / 8);
  for (std::size_t i = 0; i < bools.size(); ++i) bits[i / 8] |= bools[i] << (i % 8);
  for (const bool from_bools : {false, true}) {
    std::vector<unsigned> words(num_words, 0xa5a5a5a5u);
    const PackMaskCall call{from_bools ? bools.data() : bits.data(),
                            tokens.data(),
                            source.data(),
                            words.data(),
                            5,
                            from_bools};
    launch(1, [&] { pack_mask(call); });
    for (int t = 0; t < 5; ++t) {
      for (int k = 0; k < ends[t]; ++k) {
        ASSERT_EQ(mask_bit(words.data(), tokens[t], k), k < begins[t] || (k * 7 + t) % 3 == 0)
            << "token " << t << " key " << k;
      }
    }
  }
}

}  // namespace
}  // namespace plait::test
