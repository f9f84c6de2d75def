// The CPU executor against the float64 reference: layouts x dtypes x instruction sets x odd sizes x
// group sizes x variants, split and unsplit. Every slot no key owns, every padding row of q and the
// workspace hold NaN; everything around the outputs holds a sentinel.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "cpu/kernel.h"
#include "executor.h"
#include "plait/error.h"
#include "reference.h"

namespace plait {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSentinel = 7.0f;

struct Case {
  std::vector<int> q_len, kv_len;  // by request
  int group_size = 4, num_kv_heads = 2, dim_qk = 64, dim_vo = 64;
  int page_size = 16;  // 0: ragged, with gaps
  bool hnd = false;
  int shared_keys = 0;  // keys of a prefix that all requests share, before their own: a level
  Variant variant = {};
  int num_ctas = 0, min_split_keys = 0;  // 0: as the executor wants
  int padding_rows = 3;
  int queue_percent = 0;
};

std::string describe(const Case& c) {
  std::string text = concat("group ", c.group_size, " heads ", c.num_kv_heads, " dims ", c.dim_qk,
                            "/", c.dim_vo, " page ", c.page_size, c.hnd ? " hnd" : "", " shared ",
                            c.shared_keys, " variant ", c.variant.name(), " ctas ", c.num_ctas);
  for (size_t i = 0; i < c.q_len.size(); ++i) {
    text += concat(i == 0 ? ", (q, kv) " : " ", "(", c.q_len[i], ", ", c.kv_len[i], ")");
  }
  return text;
}

// A case with its memory, in storage type T.
template <class T>
struct Problem {
  const Case& c;
  std::mt19937 random{1};
  int num_tokens = 0, num_rows, num_qo_heads, slots = 0;
  std::vector<T> q, k, v, blank_out;
  std::vector<float> blank_lse;
  FormatView view;
  std::vector<std::vector<i64>> slot_of_key;  // by request: shared keys, then its own
  KvStrides k_stride, v_stride;
  RowStrides q_stride, out_stride, lse_stride;

  explicit Problem(const Case& c) : c(c), num_qo_heads(c.group_size * c.num_kv_heads) {
    for (const int n : c.q_len) num_tokens += n;
    num_rows = num_tokens + c.padding_rows;
    lay_out_keys();
    const int pad = 8;  // elements between rows of q and out that nobody owns
    q_stride = {num_qo_heads * c.dim_qk + pad, c.dim_qk};
    out_stride = {num_qo_heads * c.dim_vo + pad, c.dim_vo};
    lse_stride = {num_qo_heads + 1, 1};
    q.assign(num_rows * q_stride.token, from_float<T>(kNan));
    blank_out.assign(num_rows * out_stride.token, from_float<T>(kSentinel));
    blank_lse.assign(num_rows * lse_stride.token, kSentinel);
    for (int t = 0; t < num_tokens; ++t) {
      for (int i = 0; i < num_qo_heads * c.dim_qk; ++i) q[t * q_stride.token + i] = value();
    }
  }

  T value() { return from_float<T>(std::normal_distribution<float>()(random)); }

  void lay_out_keys() {
    const int page = std::max(c.page_size, 1);
    const int num_requests = static_cast<int>(c.q_len.size());
    const int num_levels = c.shared_keys > 0 ? 2 : 1;
    view.tables.resize(num_levels);
    view.view.num_levels = num_levels;
    view.view.num_requests = num_requests;
    // Lists of keys: the shared one first. Each takes whole pages of a shuffled pool, or rows with
    // gaps between the lists.
    std::vector<int> lens;
    if (num_levels == 2) lens.push_back(c.shared_keys);
    lens.insert(lens.end(), c.kv_len.begin(), c.kv_len.end());
    int num_pages = 5;
    for (const int n : lens) num_pages += (n + page - 1) / page + (c.page_size == 0 ? 3 : 0);
    std::vector<int> pool(num_pages);
    for (int i = 0; i < num_pages; ++i) pool[i] = i;
    if (c.page_size > 0) std::shuffle(pool.begin(), pool.end(), random);
    slots = num_pages * page;

    const i64 hd_qk = c.num_kv_heads * c.dim_qk, hd_vo = c.num_kv_heads * c.dim_vo;
    if (c.hnd) {
      k_stride = {page * hd_qk, c.dim_qk, static_cast<i64>(page) * c.dim_qk};
      v_stride = {page * hd_vo, c.dim_vo, static_cast<i64>(page) * c.dim_vo};
    } else {
      k_stride = {c.page_size > 0 ? page * hd_qk : 0, hd_qk, c.dim_qk};
      v_stride = {c.page_size > 0 ? page * hd_vo : 0, hd_vo, c.dim_vo};
    }
    k.assign(slots * hd_qk, from_float<T>(kNan));
    v.assign(slots * hd_vo, from_float<T>(kNan));

    int next_page = 2;
    std::vector<std::vector<i64>> lists;
    std::vector<i64> firsts;
    for (size_t i = 0; i < lens.size(); ++i) {
      const int level = num_levels == 2 && i > 0 ? 1 : 0;
      std::vector<int>& table = view.tables[level].indices;
      view.tables[level].affine = c.page_size == 0;
      firsts.push_back(c.page_size > 0 ? static_cast<i64>(table.size()) : next_page);
      std::vector<i64> list;
      for (int n = 0; n < lens[i]; ++n) {
        if (n % page == 0) {
          if (c.page_size > 0) table.push_back(pool[next_page]);
          ++next_page;
        }
        list.push_back(static_cast<i64>(pool[next_page - 1]) * page + n % page);
        for (int h = 0; h < c.num_kv_heads; ++h) {
          for (int d = 0; d < c.dim_qk; ++d) k[offset(k_stride, list.back(), h) + d] = value();
          for (int d = 0; d < c.dim_vo; ++d) v[offset(v_stride, list.back(), h) + d] = value();
        }
      }
      if (c.page_size == 0) next_page += 3;
      lists.push_back(std::move(list));
    }

    int token = 0, total = 0;
    for (const int n : c.q_len) total += n;
    if (num_levels == 2) {
      view.view.row_blocks.push_back({firsts[0], 0, total, c.shared_keys, 0, 0});
    }
    for (int r = 0; r < num_requests; ++r) {
      const int own = num_levels == 2 ? r + 1 : r;
      slot_of_key.emplace_back();
      if (num_levels == 2) slot_of_key[r] = lists[0];
      slot_of_key[r].insert(slot_of_key[r].end(), lists[own].begin(), lists[own].end());
      if (c.q_len[r] > 0) {
        view.view.row_blocks.push_back(
            {firsts[own], token, c.q_len[r], c.kv_len[r], c.shared_keys, num_levels - 1});
      }
      for (int i = 0; i < c.q_len[r]; ++i) {
        view.view.token_request.push_back(r);
        view.view.token_position.push_back(c.shared_keys + c.kv_len[r] - c.q_len[r] + i);
      }
      token += c.q_len[r];
    }
  }

  i64 offset(const KvStrides& stride, i64 slot, int head) const {
    const int page = std::max(c.page_size, 1);
    return c.page_size == 0
               ? slot * stride.token + head * stride.head
               : slot / page * stride.block + slot % page * stride.token + head * stride.head;
  }
};

using test::ReferenceRow;
using test::ReferenceState;

// What a variant does, in float64; empty: nothing.
struct Functors {
  std::function<double(double logit, int k_pos)> logits_transform;
  std::function<bool(int q_pos, int k_pos, int qo_head)> logits_mask;
  std::function<void(std::vector<double>&row, int position)> qk_transform, value_transform;
  std::function<double(double)> output_transform;
};

template <class T>
ReferenceRow reference_row(const Problem<T>& p, int token, int qo_head, const Functors& functors) {
  const Case& c = p.c;
  ReferenceRow row;
  const int request = p.view.view.token_request[token];
  const int q_pos = p.view.view.token_position[token];
  const int kv_head = qo_head / c.group_size;
  for (int d = 0; d < c.dim_qk; ++d) {
    row.q.push_back(to_float(p.q[token * p.q_stride.token + qo_head * p.q_stride.head + d]));
  }
  const Visibility& see = c.variant.visible;
  for (size_t i = 0; i < p.slot_of_key[request].size(); ++i) {
    const int k_pos = static_cast<int>(i);
    if (see.causal && k_pos > q_pos) continue;
    if (see.window_left >= 0 && k_pos < q_pos - see.window_left && k_pos >= see.sink_tokens) {
      continue;
    }
    if (functors.logits_mask && !functors.logits_mask(q_pos, k_pos, qo_head)) continue;
    const i64 slot = p.slot_of_key[request][i];
    row.k_pos.push_back(k_pos);
    row.k.emplace_back();
    row.v.emplace_back();
    for (int d = 0; d < c.dim_qk; ++d) {
      row.k.back().push_back(to_float(p.k[p.offset(p.k_stride, slot, kv_head) + d]));
    }
    for (int d = 0; d < c.dim_vo; ++d) {
      row.v.back().push_back(to_float(p.v[p.offset(p.v_stride, slot, kv_head) + d]));
    }
    if (functors.qk_transform) functors.qk_transform(row.k.back(), k_pos);
    if (functors.value_transform) functors.value_transform(row.v.back(), k_pos);
  }
  if (functors.qk_transform) functors.qk_transform(row.q, q_pos);
  row.sm_scale = 1 / std::sqrt(static_cast<double>(c.dim_qk));
  row.logits_transform = functors.logits_transform;
  row.use_softmax = c.variant.use_softmax();
  row.dim_vo = c.dim_vo;
  return row;
}

template <class T>
constexpr Dtype kDtypeOf = std::is_same_v<T, float>      ? Dtype::kFloat32
                           : std::is_same_v<T, Bfloat16> ? Dtype::kBfloat16
                                                         : Dtype::kFloat16;

AttentionConfig config_of(const Case& c, Dtype dtype, const std::string& kernel) {
  AttentionConfig config;
  config.num_qo_heads = c.group_size * c.num_kv_heads;
  config.num_kv_heads = c.num_kv_heads;
  config.head_dim_qk = c.dim_qk;
  config.head_dim_vo = c.dim_vo;
  config.dtype = dtype;
  config.kv.kind = c.page_size == 0 ? KvFormat::kRagged : KvFormat::kPaged;
  config.kv.page_size = std::max(c.page_size, 1);
  config.kv.hnd = c.hnd;
  config.kv.num_levels = c.shared_keys > 0 ? 2 : 1;
  config.variant = c.variant;
  config.bounds.requests = static_cast<int>(c.q_len.size());
  for (const int n : c.q_len) config.bounds.query_tokens += n;
  for (const int n : c.kv_len) config.bounds.keys = std::max(config.bounds.keys, n);
  config.kernel = kernel;
  return config;
}

// What a run left, and how many partial rows its plan had.
template <class T>
struct Output {
  std::vector<T> out;
  std::vector<float> lse;
  int num_partial_rows;
};

template <class T>
Output<T> run(Problem<T>& p, const std::string& kernel,
              const std::vector<unsigned long long>& variant_slots = {0}, int max_ctas = 0) {
  const Case& c = p.c;
  AttentionConfig config = config_of(c, kDtypeOf<T>, kernel);
  config.max_ctas = max_ctas;
  const auto executor = make_cpu_executor(config);
  PlanTarget target = executor->target();
  if (c.num_ctas > 0) target.num_ctas = std::min(c.num_ctas, target.num_ctas);
  if (c.min_split_keys > 0) {
    target.min_split_keys = c.min_split_keys;
    target.merge_us = 0;  // splits look free
  }
  target.queue_percent = c.queue_percent;
  const Plan plan = make_plan(p.view.view, c.variant.visible, target);
  EXPECT_EQ(plan.num_queued() > 0, c.queue_percent > 0);
  Workspace workspace(Device{}, executor->workspace_bytes());
  std::fill_n(static_cast<float*>(workspace.data()), workspace.bytes() / 4, kNan);
  executor->upload(plan, p.view, nullptr);

  Output<T> result{p.blank_out, p.blank_lse, plan.num_partial_rows};
  Params params{};
  params.q = p.q.data();
  params.k = p.k.data();
  params.v = p.v.data();
  params.out = result.out.data();
  params.lse = result.lse.data();
  params.q_stride = p.q_stride;
  params.out_stride = p.out_stride;
  params.lse_stride = p.lse_stride;
  params.k_stride = p.k_stride;
  params.v_stride = p.v_stride;
  params.num_rows = p.num_rows;
  params.block_size = std::max(c.page_size, 1);
  params.num_qo_heads = config.num_qo_heads;
  params.num_kv_heads = config.num_kv_heads;
  params.group_size = c.group_size;
  params.sm_scale = 1 / std::sqrt(static_cast<float>(c.dim_qk));
  params.visible = c.variant.visible;
  executor->run(params, variant_slots, workspace, nullptr);
  return result;
}

// References by (token, query head), and what the plain computation's errors allow.
struct Expected {
  std::vector<ReferenceState> rows;
  double tolerance = 0, lse_tolerance = 0;
};

template <class T>
Expected expected_of(const Problem<T>& p, const Functors& functors) {
  Expected e;
  double error = 0, lse_error = 0, largest = 0;
  for (int t = 0; t < p.num_tokens; ++t) {
    for (int h = 0; h < p.num_qo_heads; ++h) {
      const ReferenceRow row = reference_row(p, t, h, functors);
      ReferenceState exact = test::reference(row), plain = test::plain<T>(row);
      if (functors.output_transform && !row.k.empty()) {
        for (double& x : exact.out) x = functors.output_transform(x);
        for (double& x : plain.out) x = functors.output_transform(x);
      }
      for (int d = 0; d < p.c.dim_vo; ++d) {
        error = std::max(error, std::abs(plain.out[d] - exact.out[d]));
        largest = std::max(largest, std::abs(exact.out[d]));
      }
      if (!std::isinf(plain.lse)) {
        lse_error = std::max(lse_error, std::abs(plain.lse - exact.lse));
      }
      e.rows.push_back(std::move(exact));
    }
  }
  e.tolerance = 2 * error + test::epsilon<T>() * largest;
  e.lse_tolerance = 2 * lse_error;
  return e;
}

template <class T>
void compare(const Problem<T>& p, const Output<T>& got, const Expected& expected) {
  int wrong = 0;
  const auto compare = [&](const char* what, int row, int head, i64 d, double got, double want,
                           double allowed) {
    const bool same = std::isinf(want) ? got == want : std::abs(got - want) <= allowed;
    if (!same && ++wrong <= 5) {
      ADD_FAILURE() << what << " of row " << row << " head " << head << " element " << d << ": "
                    << got << ", expected " << want << " +- " << allowed;
    }
  };
  const ReferenceState padding{std::vector<double>(p.c.dim_vo, 0.0)};
  for (int t = 0; t < p.num_rows; ++t) {
    const T* out = got.out.data() + t * p.out_stride.token;
    const float* lse = got.lse.data() + t * p.lse_stride.token;
    for (int h = 0; h < p.num_qo_heads; ++h) {
      const bool is_padding = t >= p.num_tokens;
      const ReferenceState& want = is_padding ? padding : expected.rows[t * p.num_qo_heads + h];
      for (int d = 0; d < p.c.dim_vo; ++d) {
        compare("out", t, h, d, to_float(out[h * p.c.dim_vo + d]), want.out[d],
                is_padding ? 0 : expected.tolerance);
      }
      if (p.c.variant.use_softmax()) {
        compare("lse", t, h, 0, lse[h], want.lse,
                expected.lse_tolerance + 0x1p-23 * (1 + std::abs(want.lse)));
      }
    }
    for (i64 i = static_cast<i64>(p.num_qo_heads) * p.c.dim_vo; i < p.out_stride.token; ++i) {
      compare("sentinel", t, -1, i, to_float(out[i]), kSentinel, 0);
    }
    compare("lse sentinel", t, -1, 0, lse[p.num_qo_heads], kSentinel, 0);
  }
  EXPECT_EQ(wrong, 0);
}

std::vector<std::string> all_kernels() {
  std::vector<std::string> kernels;
  for (const std::string& set : cpu::instruction_sets()) kernels.push_back("cpu " + set);
  return kernels;
}

// Runs the case on every kernel and compares; returns the number of partial rows of the last plan.
template <class T>
int check_case(const Case& c, const Functors& functors = {},
               const std::vector<unsigned long long>& variant_slots = {0},
               const std::vector<std::string>& kernels = all_kernels()) {
  Problem<T> p(c);
  std::vector<Output<T>> outputs;  // all before the reference
  for (const std::string& kernel : kernels) outputs.push_back(run(p, kernel, variant_slots));
  const Expected expected = expected_of(p, functors);
  for (size_t i = 0; i < kernels.size(); ++i) {
    SCOPED_TRACE(describe(c) + " " + to_string(kDtypeOf<T>) + " " + kernels[i]);
    compare(p, outputs[i], expected);
  }
  return outputs.back().num_partial_rows;
}

template <class T>
class CpuAttention : public ::testing::Test {};
using Dtypes = ::testing::Types<float, Bfloat16, Float16>;
TYPED_TEST_SUITE(CpuAttention, Dtypes);

TYPED_TEST(CpuAttention, OddSizes) {
  for (const int page : {0, 1, 16}) {
    Case c{.q_len = {1, 0, 7, 33, 1, 5}, .kv_len = {1, 9, 63, 64, 129, 0}, .page_size = page};
    c.variant = causal();
    check_case<TypeParam>(c);
    c.variant = full();
    c.hnd = page == 16;
    check_case<TypeParam>(c);
  }
}

TYPED_TEST(CpuAttention, GroupSizes) {
  for (const int group : {1, 3, 8, 17, 101}) {  // 101: a token is split over tiles
    Case c{.q_len = {2, 31}, .kv_len = {131, 65}, .group_size = group, .num_kv_heads = 1};
    c.variant = causal();
    check_case<TypeParam>(c);
  }
}

TYPED_TEST(CpuAttention, HeadDims) {
  const int dims[][2] = {{8, 8}, {24, 40}, {72, 128}, {192, 128}, {256, 256}, {128, 8}};
  for (const auto& [dim_qk, dim_vo] : dims) {
    for (const int q : {1, 29}) {
      Case c{.q_len = {q}, .kv_len = {67}, .dim_qk = dim_qk, .dim_vo = dim_vo};
      check_case<TypeParam>(c);
    }
  }
}

TYPED_TEST(CpuAttention, ManyHeadsSideBySide) {  // more than one pass of few rows
  Case c{.q_len = {1, 1}, .kv_len = {100, 3}, .group_size = 2, .num_kv_heads = 19};
  check_case<TypeParam>(c);
}

TYPED_TEST(CpuAttention, WindowAndSinks) {
  for (const int window : {0, 5, 100}) {
    for (const int sinks : {0, 4, 70}) {
      Case c{.q_len = {1, 40}, .kv_len = {300, 211}, .page_size = 1};
      c.variant = causal() | sliding_window(window, sinks);
      check_case<TypeParam>(c);
    }
  }
}

TYPED_TEST(CpuAttention, SplitKeysAreMerged) {
  Case c{.q_len = {1, 3, 40}, .kv_len = {1500, 700, 900}, .num_ctas = 4, .min_split_keys = 64};
  c.variant = causal();
  EXPECT_GT(check_case<TypeParam>(c), 0);
}

TYPED_TEST(CpuAttention, QueuedKeys) {
  Case c{.q_len = {1, 3, 1}, .kv_len = {1500, 700, 1101}, .num_ctas = 4, .min_split_keys = 64};
  c.variant = causal();
  c.queue_percent = 30;
  EXPECT_GT(check_case<TypeParam>(c), 0);
}

TYPED_TEST(CpuAttention, SharedPrefix) {
  Case c{.q_len = {1, 1, 6, 1}, .kv_len = {0, 17, 20, 80}, .page_size = 16, .shared_keys = 150};
  c.variant = causal();
  EXPECT_GT(check_case<TypeParam>(c), 0);
  c.page_size = 0;
  EXPECT_GT(check_case<TypeParam>(c), 0);
}

TYPED_TEST(CpuAttention, NothingAtAll) {
  check_case<TypeParam>({.q_len = {}, .kv_len = {}});
  check_case<TypeParam>({.q_len = {0}, .kv_len = {5}, .padding_rows = 0});
}

TYPED_TEST(CpuAttention, SoftCap) {
  Case c{.q_len = {1, 30}, .kv_len = {100, 77}};
  const float cap = 2.0f;
  c.variant = causal() | soft_cap(cap);
  Functors functors;
  functors.logits_transform = [=](double x, int) { return cap * std::tanh(x / cap); };
  check_case<TypeParam>(c, functors, {__builtin_bit_cast(unsigned, cap)});
}

// Text compiled by the host compiler: FlashSigmoid, whose weights add up without softmax.
TYPED_TEST(CpuAttention, SigmoidFromText) {
  const float bias = -1.5f;
  Case c{.q_len = {1, 30, 2}, .kv_len = {900, 77, 0}, .num_kv_heads = 3};
  c.num_ctas = 4;  // as many as one thread has
  c.min_split_keys = 64;
  c.variant = causal() | custom("sigmoid", "Sigmoid", R"(struct Sigmoid {
      PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, float logit) {
        return 1.0f / (1.0f + exp(-(logit + p.bias)));
      }
    };)",
                                {{"bias", VariantParam::kFloat, bias}}, /*use_softmax=*/false);
  Functors functors;
  functors.logits_transform = [=](double x, int) { return 1 / (1 + std::exp(-(x + bias))); };
  EXPECT_GT(check_case<TypeParam>(c, functors, {__builtin_bit_cast(unsigned, bias)}, {"auto"}), 0);
}

// All the other functors at once: rotary positions on q and k, scaled values, a mask by head and
// position, halved outputs.
TYPED_TEST(CpuAttention, EveryFunctorFromText) {
  Case c{.q_len = {1, 25}, .kv_len = {90, 70}, .dim_qk = 32, .dim_vo = 24};
  c.variant = causal() | custom("all", "All", R"(struct All {
      template <class Row>
      PLAIT_HD static void rotate(const RowContext& c, Row& row) {
        row.map_half_pairs([&](int i, float& a, float& b) {
          const float angle = 0.01f * (i + 1) * c.position;
          const float x = a, y = b, cosine = __builtin_cosf(angle), sine = __builtin_sinf(angle);
          a = x * cosine - y * sine;
          b = x * sine + y * cosine;
        });
      }
      template <class Row>
      PLAIT_HD static void query_transform(const Params&, const RowContext& c, Row& row) {
        rotate(c, row);
      }
      template <class Row>
      PLAIT_HD static void key_transform(const Params&, const RowContext& c, Row& row) {
        rotate(c, row);
      }
      template <class Row>
      PLAIT_HD static void value_transform(const Params& p, const RowContext& c, Row& row) {
        row.map([&](int, float x) { return c.position % 2 == 0 ? x : x * p.scale; });
      }
      PLAIT_HD static bool logits_mask(const Params&, const LogitContext& c) {
        return (c.q_pos - c.k_pos) % 3 != c.qo_head % 3;
      }
      PLAIT_HD static float output_transform(const Params&, const OutputContext&, float x) {
        return 0.5f * x;
      }
    };)",
                                {{"scale", VariantParam::kFloat, 0.25}});
  Functors functors;
  functors.qk_transform = [](std::vector<double>& row, int position) {
    const size_t half = row.size() / 2;
    for (size_t i = 0; i < half; ++i) {
      const double angle = 0.01 * (i + 1) * position, x = row[i], y = row[i + half];
      row[i] = x * std::cos(angle) - y * std::sin(angle);
      row[i + half] = x * std::sin(angle) + y * std::cos(angle);
    }
  };
  functors.value_transform = [](std::vector<double>& row, int position) {
    for (double& x : row) x *= position % 2 == 0 ? 1 : 0.25;
  };
  functors.logits_mask = [](int q_pos, int k_pos, int qo_head) {
    return (q_pos - k_pos) % 3 != qo_head % 3;
  };
  functors.output_transform = [](double x) { return 0.5 * x; };
  check_case<TypeParam>(c, functors, {__builtin_bit_cast(unsigned, 0.25f)}, {"auto"});
}

// A NaN in the cache that a row sees must show, split or not.
TEST(CpuAttention, SeenNanShows) {
  for (const bool split : {false, true}) {
    Case c{.q_len = {1}, .kv_len = {600}, .num_ctas = split ? 4 : 1, .min_split_keys = 64};
    Problem<float> p(c);
    p.v[p.offset(p.v_stride, p.slot_of_key[0][300], 1) + 5] = kNan;
    p.k[p.offset(p.k_stride, p.slot_of_key[0][70], 0) + 2] = kNan;
    const Output<float> got = run(p, "auto");
    EXPECT_EQ(got.num_partial_rows > 0, split);
    EXPECT_TRUE(std::isnan(got.out[0]));  // kv head 0: a key
    EXPECT_TRUE(std::isnan(got.lse[0]));
    EXPECT_TRUE(std::isnan(got.out[4 * 64 + 5]));  // kv head 1: element 5 of a value
    EXPECT_FALSE(std::isnan(got.out[4 * 64 + 4]));
    EXPECT_FALSE(std::isnan(got.lse[4]));
  }
}

TEST(CpuAttention, EqualBitsOnOneThreadAndOnAll) {
  Case c{.q_len = {1, 40}, .kv_len = {2000, 333}, .num_ctas = 1};
  Problem<float> p(c);
  const Output<float> one = run(p, "auto", {0}, /*max_ctas=*/1);
  for (int i = 0; i < 3; ++i) {
    const Output<float> all = run(p, "auto");
    EXPECT_EQ(one.out, all.out);
    EXPECT_EQ(one.lse, all.lse);
  }
}

TEST(CpuAttention, ScratchIsAsLargeAsItsParts) {
  for (const auto& [dim_qk, dim_vo] : {std::pair{8, 256}, {128, 128}, {72, 40}}) {
    std::vector<float> memory(cpu::scratch_floats(dim_qk, dim_vo));
    cpu::Scratch parts;
    EXPECT_EQ(cpu::divide_scratch(memory.data(), dim_qk, dim_vo, parts),
              memory.data() + memory.size());
  }
}

TEST(CpuAttention, UnknownKernelIsRefusedByName) {
  Case c{.q_len = {1}, .kv_len = {1}};
  try {
    make_cpu_executor(config_of(c, Dtype::kFloat32, "sm90a"));
    FAIL() << "accepted";
  } catch (const ArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find("kernel is 'sm90a'"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace plait
