// An attention kernel executed on the host (emulate.h) over a case of plain_case.h and compared
// with float64; and the variants that such tests run. Included after emulate.h.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/plain_case.h"
#include "cuda/plan_image.h"
#include "host_device/mask_bits.h"
#include "host_device/variant.h"
#include "host_device/variants/custom_mask.h"
#include "host_device/variants/rms_norm_k.h"
#include "host_device/variants/rope.h"
#include "variants/rope.h"

namespace plait::test {

inline constexpr float kUntouched = 7.0f;

// Everything at once, with parameters: a 16-byte Params of two slots.
struct AllFunctors {
  struct Params {
    alignas(8) float bias;
    alignas(8) const float* slopes;  // [qo heads]
  };
  template <class R>
  PLAIT_HD static void query_transform(const Params&, const RowContext& c, R& row) {
    const float scale = 1.0f / (1.0f + row.sum([](int, float x) { return x * x; }));
    row.map([&](int i, float x) { return x * scale + 0.01f * i + 0.001f * c.position; });
  }
  template <class R>
  PLAIT_HD static void key_transform(const Params&, const RowContext& c, R& row) {
    row.map_half_pairs([&](int i, float& x, float& y) {
      const float old = x;
      x = x - 0.1f * y * i;
      y = y + old * 0.01f * c.position;
    });
    row.map_adjacent_pairs([](int, float& x, float& y) {
      const float old = x;
      x = y;
      y = -old;
    });
  }
  template <class R>
  PLAIT_HD static void value_transform(const Params& p, const RowContext&, R& row) {
    row.map([&](int i, float x) { return x * p.bias + i; });
  }
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext& c, float x) {
    return x + p.slopes[c.qo_head] * (c.k_pos - c.q_pos);
  }
  PLAIT_HD static bool logits_mask(const Params&, const LogitContext& c) {
    return (c.q_pos + c.k_pos) % 3 != 0;
  }
  PLAIT_HD static float output_transform(const Params&, const OutputContext& c, float x) {
    return 2.0f * x + c.dim;
  }
};
struct AllFunctorsMeaning : PlainMeaning {
  double bias;
  std::vector<float> slopes;
  double logit(double x, int q_pos, int k_pos, int qo_head) const {
    return x + slopes[qo_head] * (k_pos - q_pos);
  }
  bool sees(int q_pos, int k_pos) const { return (q_pos + k_pos) % 3 != 0; }
  void query(std::vector<double>& x, int position) const {
    double sum = 0;
    for (const double v : x) sum += v * v;
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = x[i] / (1 + sum) + 0.01 * i + 0.001 * position;
  }
  void key(std::vector<double>& x, int position) const {
    const std::size_t half = x.size() / 2;
    for (std::size_t i = 0; i < half; ++i) {
      const double a = x[i], b = x[i + half];
      x[i] = a - 0.1 * b * i;
      x[i + half] = b + a * 0.01 * position;
    }
    for (std::size_t i = 0; i < half; ++i) {
      const double a = x[2 * i];
      x[2 * i] = x[2 * i + 1];
      x[2 * i + 1] = -a;
    }
  }
  void value(std::vector<double>& x) const {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = x[i] * bias + i;
  }
  double output(double x, int dim) const { return 2 * x + dim; }
};

struct Sigmoid {
  struct Params {
    alignas(8) float bias;
  };
  static constexpr bool kUseSoftmax = false;
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float x) {
    return 1.0f / (1.0f + plait::exp(-(x + p.bias)));
  }
};
struct SigmoidMeaning : PlainMeaning {
  double bias;
  double logit(double x, int, int, int) const { return 1 / (1 + std::exp(-(x + bias))); }
};

inline constexpr int kMaskBegin = 70;
struct MaskMeaning : PlainMeaning {
  // Keys below it are visible, but there are bits of them, which say that they are not: what nobody
  // looks at where a tile ends before the first masked key.
  int false_bits_end = 0;
  bool sees(int q_pos, int k_pos) const {
    return k_pos < kMaskBegin || (3 * q_pos + k_pos) % 4 != 0;
  }
};
// Where the keys of token t's request end.
template <class T, class Kv>
int mask_end(const Case<T, Kv>& c, int t) {
  const int request = c.view.token_request[t];
  int end = 0;
  for (int i = 0; i < c.num_tokens(); ++i) {
    if (c.view.token_request[i] == request) end = c.view.token_position[i] + 1;
  }
  return end;
}

// RMS norm of K, then RoPE of Q and K, the built-ins. `table`: rope_table() of the head.
struct NormAndRope {
  using Turn = Rope<Pairing::kHalf, 0>;
  struct Params {
    RmsNormK::Params norm;
    Turn::Params turn;
  };
  template <class R>
  PLAIT_HD static void query_transform(const Params& p, const RowContext& c, R& row) {
    Turn::query_transform(p.turn, c, row);
  }
  template <class R>
  PLAIT_HD static void key_transform(const Params& p, const RowContext& c, R& row) {
    RmsNormK::key_transform(p.norm, c, row);
    Turn::key_transform(p.turn, c, row);
  }
};
struct NormAndRopeMeaning : PlainMeaning {
  double eps, theta;
  std::vector<float> weight;
  void query(std::vector<double>& x, int position) const {
    const std::size_t half = x.size() / 2;
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = position * std::pow(theta, -1.0 * i / half), a = x[i], b = x[i + half];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[i + half] = a * std::sin(angle) + b * std::cos(angle);
    }
  }
  void key(std::vector<double>& x, int position) const {
    double square = 0;
    for (const double v : x) square += v * v;
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] *= weight[i] / std::sqrt(square / x.size() + eps);
    query(x, position);
  }
};

// Of one shape without a key split.
inline PlanTarget target_of(const Shape& shape, int tile_q, int num_ctas) {
  PlanTarget target;
  target.num_ctas = num_ctas;
  target.tile_kv = 64;
  target.group_size = shape.group_size;
  target.num_kv_heads = shape.num_kv_heads;
  target.num_shapes = 1;
  target.shapes[0] = {tile_q, 1, 0.1f, 0.1f};
  target.merge_us = 0.1f;
  target.max_partial_rows = 100000;
  target.queue_percent = 30;  // a queue where the batch is long enough
  target.min_queued_keys = 64;
  target.min_keys_for_queue = 192;
  return target;
}

// What a run leaves, for comparisons bit by bit.
struct EmulatedOutput {
  std::vector<unsigned char> out, lse;
  int num_merged = 0;  // merge sources of the plan
  bool operator==(const EmulatedOutput& other) const {
    return out == other.out && lse == other.lse;
  }
};

// The case with a row block for each token: as prefill in pieces of one. Of one level.
template <class T, class Kv>
Case<T, Kv> token_by_token(const Case<T, Kv>& c) {
  Case<T, Kv> tokens = c;
  tokens.view.row_blocks.clear();
  tokens.lists.clear();
  for (std::size_t b = 0; b < c.view.row_blocks.size(); ++b) {
    for (int i = 0; i < c.view.row_blocks[b].num_tokens; ++i) {
      RowBlock block = c.view.row_blocks[b];
      block.first_token += i;
      block.num_tokens = 1;
      tokens.view.row_blocks.push_back(block);
      tokens.lists.push_back(c.lists[b]);
    }
  }
  return tokens;
}

// Plans for `target`, runs kernel(call) on CTAs of num_threads with two rows of padding, and
// compares every element of out and lse. Returns how many merge sources the plan had, so that a
// test can say that it split.
template <class V, class T, class Kv, class Meaning, class Kernel>
int run_emulated(const Case<T, Kv>& c, const typename V::Params& variant, const Meaning& meaning,
                 const PlanTarget& target, int num_threads, Kernel&& kernel, double tolerance,
                 double lse_tolerance, EmulatedOutput* output = nullptr) {
  const Shape& s = c.shape;
  BsrView bsr = c.view;
  std::vector<i64> list_begin;  // by row block
  if (c.device_lists) {
    for (RowBlock& block : bsr.row_blocks) {
      list_begin.push_back(block.first_block);
      block.first_block = static_cast<i64>(list_begin.size()) - 1;
    }
  }
  const Plan plan = make_plan(bsr, c.visible, target);
  PlanView view{};
  view.num_tokens = plan.num_tokens;
  view.queue_begin = plan.cta_item_indptr[plan.num_ctas];
  view.queue_end = static_cast<int>(plan.items.size());
  view.row_blocks = plan.row_blocks.data();
  view.items = plan.items.data();
  view.token_request = plan.token_request.data();
  view.token_position = plan.token_position.data();
  view.row_map = plan.row_map.empty() ? nullptr : plan.row_map.data();
  view.lists_per_head = plan.lists_per_head;
  view.merge_indptr = plan.merge_indptr.empty() ? nullptr : plan.merge_indptr.data();
  view.merge_sources = plan.merge_sources.data();
  // Custom mask bits, for keys from kMaskBegin on: what the meaning says.
  std::vector<TokenMask> token_mask;
  std::vector<unsigned> mask_words;
  if constexpr (VariantTraits<V>::kCustomMask) {
    for (int t = 0; t < c.num_tokens(); ++t) {
      const int end = mask_end(c, t);
      const int begin = meaning.false_bits_end > 0 ? 0 : std::min(kMaskBegin, end);
      token_mask.push_back({static_cast<i64>(mask_words.size()), begin, end});
      std::vector<unsigned char> bools;
      for (int k = begin; k < end; ++k) {
        bools.push_back(k >= meaning.false_bits_end && meaning.sees(view.token_position[t], k));
      }
      bools.push_back(0);
      for (int w = 0; w < mask_row_words(begin, end); ++w) {
        mask_words.push_back(pack_mask_bools(bools.data(), 0, begin, end, begin / 32 + w));
      }
    }
    view.token_mask = token_mask.data();
    view.mask_words = mask_words.data();
  }
  std::vector<i64> strided_pages;  // every second one is wrong
  for (const int page : c.pages) {
    strided_pages.insert(strided_pages.end(), {page, c.pages[0] == page ? page + 1 : c.pages[0]});
  }
  if (!s.affine) {
    for (int level = 0; level < c.view.num_levels; ++level) {
      view.tables[level].indices = c.pages.data();
      if (c.device_lists) {
        view.tables[level] = {strided_pages.data(), list_begin.data(), 2, 2, 8, 8};
      }
    }
  }
  constexpr int kIdleCtas = 2;
  std::vector<CtaStart> starts;
  for (int cta = 0; cta < plan.num_ctas + kIdleCtas; ++cta) {
    starts.push_back(cuda::cta_start(plan, view, cta));
  }

  const int heads = c.num_qo_heads(), rows = c.num_tokens() + 2;
  constexpr int kOutPad = 8;  // elements after each row of out, which is strided
  const int out_stride = s.head_dim_vo + kOutPad;
  std::vector<T> out(static_cast<std::size_t>(rows) * heads * out_stride,
                     from_float<T>(kUntouched));
  std::vector<float> lse(static_cast<std::size_t>(rows) * heads, kUntouched);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> partial_out(
      static_cast<std::size_t>(plan.num_partial_rows) * s.head_dim_vo + 4, nan);
  std::vector<float> partial_lse(plan.num_partial_rows + 1, nan);
  std::vector<unsigned> arrived(plan.merge_indptr.size() + 1);
  constexpr int kMostFoldFloats = 256 * (256 + 16);  // of a CTA
  std::vector<float> folds(target.chunk_keys > 0 ? starts.size() * kMostFoldFloats : 0, nan);

  const int block = s.affine ? 1 : s.page_size;
  VariantCall<V> call{};
  call.variant = variant;
  Params& p = call.params;
  p.q = c.q.data.data();
  p.k = c.k.data.data();
  p.v = c.v.data.data();
  p.out = out.data();
  p.lse = lse.data();
  p.plan = &view;
  p.starts = starts.data();
  p.partial_out = partial_out.data();
  p.partial_lse = partial_lse.data();
  p.arrived = arrived.data();
  p.folds = folds.data();
  unsigned tickets = 0;
  p.tickets = &tickets;
  p.q_stride = {static_cast<i64>(heads) * s.head_dim_qk, s.head_dim_qk};
  p.out_stride = {static_cast<i64>(heads) * out_stride, out_stride};
  p.lse_stride = {heads, 1};
  const auto kv_stride = [&](int dim) {
    const i64 token = static_cast<i64>(s.num_kv_heads) * dim;
    return KvStrides{block * token, token, dim};
  };
  p.k_stride = kv_stride(s.head_dim_qk);
  p.v_stride = kv_stride(s.head_dim_vo);
  p.num_rows = rows;
  p.block_size = block;
  p.num_qo_heads = heads;
  p.num_kv_heads = s.num_kv_heads;
  p.group_size = s.group_size;
  p.sm_scale = c.sm_scale;
  p.k_scale = c.k_scale;
  p.v_scale = c.v_scale;
  p.visible = c.visible;
  p.num_kv_blocks = c.num_slots / block;

  std::vector<int> ctas(starts.size());
  std::iota(ctas.begin(), ctas.end(), 0);
  std::mt19937 random(5);
  std::shuffle(ctas.begin(), ctas.end(), random);
  // The plan comes from a kernel that may still run as a CTA begins; until then nothing is written.
  const PlanView planned = view;
  const std::vector<CtaStart> planned_starts = starts;
  std::size_t num_told = 0;
  emulate::kernels_before = [&](bool complete) {
    view = complete ? planned : PlanView{};
    std::fill(starts.begin(), starts.end(), CtaStart{});
    if (complete) starts = planned_starts;
    if (!complete || num_told++ > 0) return;
    const auto untouched = [](const T& x) { return to_float(x) == kUntouched; };
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), untouched)) << "written too early";
  };
  emulate::launch(static_cast<int>(ctas.size()), num_threads, ctas, [&] { kernel(call); });
  emulate::kernels_before = nullptr;

  EXPECT_EQ(num_told, ctas.size()) << "a CTA did not wait for the kernels before";
  EXPECT_EQ(tickets, 0u) << "the queue's counter is left over";
  for (const unsigned count : arrived) EXPECT_EQ(count, 0u) << "an arrival counter is left over";
  const Expected expected = reference(c, meaning);
  int wrong = 0;
  const auto compare = [&](double got, double want, const char* what, int row, int h, int dim,
                           double allowed) {
    const bool same = got == want || std::abs(got - want) <= allowed * (1 + std::abs(want));
    if (!same && ++wrong <= 5) {
      ADD_FAILURE() << what << "[" << row << ", " << h << ", " << dim << "] is " << got
                    << ", reference " << want;
    }
  };
  for (int row = 0; row < rows; ++row) {
    for (int h = 0; h < heads; ++h) {
      const bool padding = row >= c.num_tokens();
      const std::size_t at = static_cast<std::size_t>(row) * heads + h;
      for (int i = 0; i < out_stride; ++i) {
        const double got = to_float(out[at * out_stride + i]);
        const double want = i >= s.head_dim_vo ? kUntouched
                            : padding          ? 0
                                               : expected.out[at * s.head_dim_vo + i];
        if (i >= s.head_dim_vo) {
          EXPECT_EQ(got, want) << "written beyond a row of out";
        }
        compare(got, want, "out", row, h, i, tolerance);
      }
      const double want = !meaning.use_softmax ? kUntouched
                          : padding            ? -std::numeric_limits<double>::infinity()
                                               : expected.lse[at];
      compare(lse[at], want, "lse", row, h, 0, lse_tolerance);
    }
  }
  EXPECT_EQ(wrong, 0);
  if (output != nullptr) {
    const auto bytes_of = [](const auto& x) {
      const auto* begin = reinterpret_cast<const unsigned char*>(x.data());
      return std::vector<unsigned char>(begin, begin + x.size() * sizeof x[0]);
    };
    *output = {bytes_of(out), bytes_of(lse), static_cast<int>(plan.merge_sources.size())};
  }
  return static_cast<int>(plan.merge_sources.size());
}

}  // namespace plait::test
