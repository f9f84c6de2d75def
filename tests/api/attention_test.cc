// class Attention on the CPU: every layout of K and V gives what attention means (float64, written
// here again), a bad call changes nothing, and each refusal names what was given.
#include "plait/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "formats/tensors.h"

namespace plait {
namespace {

using test::Floats;
using test::Ints;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kQoHeads = 6, kKvHeads = 2, kDimQk = 24, kDimVo = 24, kPage = 4, kPages = 40;

AttentionConfig small_config(const KvFormat& kv) {
  AttentionConfig config;
  config.num_qo_heads = kQoHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim_qk = kDimQk;
  config.head_dim_vo = kDimVo;
  config.dtype = Dtype::kFloat32;
  config.kv = kv;
  config.variant = causal();
  config.bounds = {8, 64, 128};
  return config;
}

Floats random_floats(std::vector<int64_t> shape, unsigned seed) {
  Floats t = Floats::full(std::move(shape), 0);
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (float& x : t.data()) x = uniform(random);
  return t;
}

// Three requests: q_len 3, 1, 5 and kv_len 11, 0, 3, so that two rows of the last see no key. Keys
// lie in slots (page * kPage + offset) of a cache that is NaN everywhere else.
struct Case {
  const std::vector<int> qo_indptr{0, 3, 4, 9}, kv_len{11, 0, 3};
  const std::vector<std::vector<int>> pages{{7, 30, 2}, {}, {19}};
  Floats q = random_floats({9, kQoHeads, kDimQk}, 1);
  Floats k = random_floats({14, kKvHeads, kDimQk}, 2), v = random_floats({14, kKvHeads, kDimVo}, 3);
  Ints qo = Ints::list(qo_indptr), len = Ints::list(kv_len),
       kv_indptr = Ints::list({0, 11, 11, 14});
  Ints page_indptr = Ints::list({0, 3, 3, 4}), page_indices = Ints::list({7, 30, 2, 19});
  Floats out = Floats::full({9, kQoHeads, kDimVo}, 7), lse = Floats::full({9, kQoHeads}, 7);

  int slot(int request, int key) const { return pages[request][key / kPage] * kPage + key % kPage; }
  // A paged cache [kPages, kPage, heads, dim], or with heads first, of `rows`.
  Floats cache(Floats& rows, int dim, bool hnd) const {
    const std::vector<int64_t> shape = hnd ? std::vector<int64_t>{kPages, kKvHeads, kPage, dim}
                                           : std::vector<int64_t>{kPages, kPage, kKvHeads, dim};
    Floats cache = Floats::full(shape, kNan);
    for (int r = 0, row = 0; r < 3; ++r) {
      for (int key = 0; key < kv_len[r]; ++key, ++row) {
        const int page = slot(r, key) / kPage, offset = slot(r, key) % kPage;
        for (int h = 0; h < kKvHeads; ++h) {
          const int at = hnd ? ((page * kKvHeads + h) * kPage + offset) * dim
                             : ((page * kPage + offset) * kKvHeads + h) * dim;
          for (int d = 0; d < dim; ++d) cache[at + d] = rows[(row * kKvHeads + h) * dim + d];
        }
      }
    }
    return cache;
  }
  RunArgs args() {
    RunArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.out = out.view();
    args.lse = lse.view();
    return args;
  }
  Batch ragged() {
    Batch batch{qo.view(), {}, {}};
    batch.kv.kv_indptr = kv_indptr.view();
    return batch;
  }
  Batch csr() {
    Batch batch{qo.view(), {}, {}};
    batch.kv.kv_len = len.view();
    batch.kv.kv_page_indptr = page_indptr.view();
    batch.kv.kv_page_indices = page_indices.view();
    return batch;
  }

  // Causal attention in double. `out` and `lse` by row and head, at the given strides.
  void expect_right(const float* out, int64_t out_token, int64_t out_head, const float* lse,
                    int64_t lse_token, int64_t lse_head) {
    const double scale = 1 / std::sqrt(double{kDimQk});
    for (int r = 0, first_key = 0; r < 3; first_key += kv_len[r], ++r) {
      const int q_len = qo_indptr[r + 1] - qo_indptr[r];
      for (int i = 0; i < q_len; ++i) {
        const int token = qo_indptr[r] + i, num_keys = std::max(0, kv_len[r] - q_len + i + 1);
        for (int head = 0; head < kQoHeads; ++head) {
          const int kv_head = head / (kQoHeads / kKvHeads);
          double sum = 0;
          std::vector<double> expected(kDimVo);
          for (int key = first_key; key < first_key + num_keys; ++key) {
            double logit = 0;
            for (int d = 0; d < kDimQk; ++d) {
              logit += static_cast<double>(q[(token * kQoHeads + head) * kDimQk + d]) *
                       k[(key * kKvHeads + kv_head) * kDimQk + d];
            }
            const double weight = std::exp(logit * scale);
            sum += weight;
            for (int d = 0; d < kDimVo; ++d) {
              expected[d] += weight * v[(key * kKvHeads + kv_head) * kDimVo + d];
            }
          }
          const float* got = out + token * out_token + head * out_head;
          for (int d = 0; d < kDimVo; ++d) {
            const double want = sum == 0 ? 0 : expected[d] / sum;
            ASSERT_NEAR(got[d], want, 2e-6)
                << "token " << token << " head " << head << " dim " << d;
          }
          const float got_lse = lse[token * lse_token + head * lse_head];
          if (sum == 0) {
            ASSERT_EQ(got_lse, -std::numeric_limits<float>::infinity()) << "token " << token;
          } else {
            ASSERT_NEAR(got_lse, std::log(sum), 4e-6) << "token " << token << " head " << head;
          }
        }
      }
    }
  }
  void expect_right() {
    expect_right(out.data().data(), kQoHeads * kDimVo, kDimVo, lse.data().data(), kQoHeads, 1);
  }
};

TEST(Attention, Ragged) {
  Case c;
  Attention attention(small_config(ragged_kv()));
  attention.plan(c.ragged());
  attention.run(c.args());
  c.expect_right();
}

TEST(Attention, PagedLayouts) {
  for (const bool hnd : {false, true}) {
    Case c;
    Attention attention(small_config(paged_kv(kPage, hnd)));
    Floats k = c.cache(c.k, kDimQk, hnd), v = c.cache(c.v, kDimVo, hnd);
    RunArgs args = c.args();
    args.k = k.view();
    args.v = v.view();
    attention.plan(c.csr());
    attention.run(args);
    c.expect_right();

    // K and V of each page beside each other in one 5-D tensor.
    const int page_elements = kPage * kKvHeads * kDimQk;
    Floats joint =
        Floats::full({kPages, 2, hnd ? kKvHeads : kPage, hnd ? kPage : kKvHeads, kDimQk}, kNan);
    for (int page = 0; page < kPages; ++page) {
      for (int i = 0; i < page_elements; ++i) {
        joint[2 * page * page_elements + i] = k[page * page_elements + i];
        joint[(2 * page + 1) * page_elements + i] = v[page * page_elements + i];
      }
    }
    c.out = Floats::full({9, kQoHeads, kDimVo}, 7);
    args.k = joint.view();
    args.v = {};
    attention.run(args);
    c.expect_right();
  }
}

// q, out and lse as slices of wider tensors; what lies between stays as it was.
TEST(Attention, Strides) {
  Case c;
  Attention attention(small_config(ragged_kv()));
  Floats q = Floats::full({9, kQoHeads + 3, kDimQk + 2}, kNan);
  for (int t = 0; t < 9; ++t) {
    for (int h = 0; h < kQoHeads; ++h) {
      for (int d = 0; d < kDimQk; ++d) {
        q[(t * (kQoHeads + 3) + h) * (kDimQk + 2) + d] = c.q[(t * kQoHeads + h) * kDimQk + d];
      }
    }
  }
  q.shape() = {9, kQoHeads, kDimQk};
  Floats out = Floats::full({9, kQoHeads + 1, kDimVo + 5}, 7),
         lse = Floats::full({kQoHeads, 20}, 7);
  out.shape() = {9, kQoHeads, kDimVo};
  lse.shape() = {9, kQoHeads};
  lse.strides() = {1, 20};
  RunArgs args = c.args();
  args.q = q.view();
  args.out = out.view();
  args.lse = lse.view();
  attention.plan(c.ragged());
  attention.run(args);
  c.expect_right(out.data().data(), (kQoHeads + 1) * (kDimVo + 5), kDimVo + 5, lse.data().data(), 1,
                 20);
  for (int t = 0; t < 9; ++t) {
    for (int h = 0; h <= kQoHeads; ++h) {
      for (int d = h < kQoHeads ? kDimVo : 0; d < kDimVo + 5; ++d) {
        ASSERT_EQ(out[(t * (kQoHeads + 1) + h) * (kDimVo + 5) + d], 7);
      }
    }
  }
  for (int h = 0; h < kQoHeads; ++h) {
    for (int t = 9; t < 20; ++t) ASSERT_EQ(lse[h * 20 + t], 7);
  }
}

TEST(Attention, PaddingRowsAndEmptyBatches) {
  Case c;
  Attention attention(small_config(ragged_kv()));
  Floats q = Floats::full({12, kQoHeads, kDimQk}, kNan);
  std::copy(c.q.data().begin(), c.q.data().end(), q.data().begin());
  Floats out = Floats::full({12, kQoHeads, kDimVo}, 7), lse = Floats::full({12, kQoHeads}, 7);
  RunArgs args = c.args();
  args.q = q.view();
  args.out = out.view();
  args.lse = lse.view();
  attention.plan(c.ragged());
  attention.run(args);
  c.expect_right(out.data().data(), kQoHeads * kDimVo, kDimVo, lse.data().data(), kQoHeads, 1);
  const auto expect_padding = [&](int first) {
    for (int i = first * kQoHeads; i < 12 * kQoHeads; ++i) {
      ASSERT_EQ(lse[i], -std::numeric_limits<float>::infinity());
      for (int d = 0; d < kDimVo; ++d) ASSERT_EQ(out[i * kDimVo + d], 0);
    }
  };
  expect_padding(9);

  Ints zero = Ints::list({0});
  Batch none{zero.view(), {}, {}};
  none.kv.kv_indptr = zero.view();
  attention.plan(none);
  attention.run(args);
  expect_padding(0);
  Floats no_q({0, kQoHeads, kDimQk}, {}), no_out({0, kQoHeads, kDimVo}, {}),
      no_lse({0, kQoHeads}, {});
  args.q = no_q.view();
  args.out = no_out.view();
  args.lse = no_lse.view();
  attention.run(args);
}

// A prefix that two requests share, as a level of its own, gives what the flat batch gives.
TEST(Attention, SharedPrefix) {
  Case c;
  Attention attention(small_config(composed_kv(ragged_kv(), 2)));
  // Requests 0 and 2 share rows 0 and 1 as keys 0 and 1: in the flat case, copies of them.
  for (int i = 0; i < 2 * kKvHeads * kDimQk; ++i) {
    c.k[11 * kKvHeads * kDimQk + i] = c.k[i];
    c.v[11 * kKvHeads * kDimQk + i] = c.v[i];
  }
  Ints nodes = Ints::list({0, 2}), requests = Ints::list({0, 2}), begin0 = Ints::list({0}),
       len0 = Ints::list({2}), begin1 = Ints::list({2, 0, 13}), len1 = Ints::list({9, 0, 1});
  Batch batch{c.qo.view(), {}, std::vector<KvLevel>(2)};
  batch.levels[0].tables.kv_begin = begin0.view();
  batch.levels[0].tables.kv_len = len0.view();
  batch.levels[0].node_indptr = nodes.view();
  batch.levels[0].node_requests = requests.view();
  batch.levels[1].tables.kv_begin = begin1.view();
  batch.levels[1].tables.kv_len = len1.view();
  attention.plan(batch);
  attention.run(c.args());
  c.expect_right();
}

// A refused plan() leaves the plan before it, a refused run() the memory.
TEST(Attention, BadCallsChangeNothing) {
  Case c;
  Attention attention(small_config(ragged_kv()));
  EXPECT_EQ(test::refusal([&] { attention.run(c.args()); }),
            "run: nothing is planned yet; call plan() first");
  EXPECT_EQ(test::refusal([&] { attention.current_plan(); }),
            "current_plan: nothing is planned yet; call plan() first");
  attention.plan(c.ragged());
  const Plan before = attention.current_plan();
  Ints bad = Ints::list({0, 11, 10, 14});
  Batch batch = c.ragged();
  batch.kv.kv_indptr = bad.view();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(test::refusal([&] { attention.plan(batch); }),
              "plan: kv_indptr[2] is 10, less than the 11 before it (request 1)");
  }
  batch = c.ragged();
  batch.qo_indptr.device_type = kCuda;
  EXPECT_EQ(test::refusal([&] { attention.plan(batch); }),
            "plan: qo_indptr is on cuda:0, but the work is on cpu; give it there or on the cpu");
  EXPECT_FALSE(attention.planned_on_device());
  EXPECT_TRUE(attention.current_plan() == before);
  RunArgs args = c.args();
  args.sm_scale = kNan;
  EXPECT_EQ(test::refusal([&] { attention.run(args); }),
            "run: sm_scale is nan; it must be finite and > 0 (0: the configuration's)");
  for (const float x : c.out.data()) ASSERT_EQ(x, 7);
  attention.run(c.args());
  c.expect_right();
}

TEST(Attention, RunRefusals) {
  Case c;
  Attention attention(small_config(paged_kv(kPage)));
  Floats k = c.cache(c.k, kDimQk, false), v = c.cache(c.v, kDimVo, false);
  const RunArgs good = [&] {
    RunArgs args = c.args();
    args.k = k.view();
    args.v = v.view();
    return args;
  }();
  attention.plan(c.csr());
  const auto refused = [&](auto change) {
    RunArgs args = good;
    change(args);
    const std::string text = test::refusal([&] { attention.run(args); });
    for (const float x : c.out.data()) EXPECT_EQ(x, 7) << text;
    return text;
  };
  EXPECT_EQ(refused([](RunArgs& a) { a.q = {}; }), "run: q is missing");
  Floats few = Floats::full({8, kQoHeads, kDimQk}, 0);
  EXPECT_EQ(
      refused([&](RunArgs& a) { a.q = few.view(); }),
      "run: q has 8 rows, but 9 query tokens are planned; more rows are taken (padding), fewer "
      "are not");
  Floats wide = Floats::full({9, kQoHeads, 32}, 0);
  EXPECT_EQ(
      refused([&](RunArgs& a) { a.q = wide.view(); }),
      "run: q is float32[9, 6, 32] on cpu; its shape must be [any, 6, 24] (rows, num_qo_heads, "
      "head_dim_qk)");
  EXPECT_EQ(refused([](RunArgs& a) { a.q.dtype_bits = 16; }),
            "run: q is float16[9, 6, 24] on cpu; its dtype must be float32");
  EXPECT_EQ(refused([](RunArgs& a) { a.k.device_type = kCuda; }),
            "run: k is on cuda:0, but the work is on cpu; all tensors of a call must be there");
  EXPECT_EQ(refused([](RunArgs& a) { a.v.data = nullptr; }),
            "run: v is float32[40, 4, 2, 24] on cpu but its pointer is null");
  EXPECT_EQ(refused([](RunArgs& a) { a.v = {}; }), "run: v is missing");
  EXPECT_NE(refused([](RunArgs& a) {
              a.out.byte_offset = 2;
            }).find("it must be aligned to its 4-byte elements"),
            std::string::npos);
  int64_t last_two[] = {kQoHeads * kDimQk * 2, kDimQk * 2, 2}, broadcast[] = {0, kDimVo, 1},
          overlapping[] = {kQoHeads * kDimVo, kDimVo - 1, 1}, broadcast_lse[] = {kQoHeads, 0};
  EXPECT_EQ(refused([&](RunArgs& a) { a.q.strides = last_two; }),
            "run: q has stride 2 in its last dimension; it must be 1");
  EXPECT_EQ(
      refused([&](RunArgs& a) { a.out.strides = broadcast; }),
      "run: out is written, but elements of float32[9, 6, 24] on cpu share memory: a stride of "
      "0 steps into the 1 elements before it");
  EXPECT_EQ(
      refused([&](RunArgs& a) { a.out.strides = overlapping; }),
      "run: out is written, but elements of float32[9, 6, 24] on cpu share memory: a stride of "
      "23 steps into the 24 elements before it");
  EXPECT_EQ(refused([&](RunArgs& a) { a.lse.strides = broadcast_lse; }),
            "run: lse is written, but elements of float32[9, 6] on cpu share memory: a stride of 0 "
            "steps into the 1 elements before it");
  EXPECT_EQ(refused([&](RunArgs& a) { a.k = a.q; }),
            "run: k is float32[9, 6, 24] on cpu; it must have 4 dimensions");
  Floats small_cache = Floats::full({20, kPage, kKvHeads, kDimQk}, 0);
  EXPECT_EQ(refused([&](RunArgs& a) { a.k = a.v = small_cache.view(); }),
            "run: kv_page_indices[1] is 30, but the cache has 20 pages (k.shape[0])");
  Floats other_page = Floats::full({40, 8, kKvHeads, kDimQk}, 0);
  EXPECT_EQ(refused([&](RunArgs& a) { a.k = other_page.view(); }),
            "run: k is float32[40, 8, 2, 24] on cpu; its shape must be [any, 4, 2, 24] (pages, "
            "page_size, num_kv_heads, head_dim)");
  EXPECT_EQ(refused([&](RunArgs& a) {
              a.variant_args.push_back({"cap", 1, {}});
            }),
            "run: variant 'causal' has no parameter 'cap'; it has: none");
  EXPECT_EQ(refused([](RunArgs& a) { a.sm_scale = -1; }),
            "run: sm_scale is -1; it must be finite and > 0 (0: the configuration's)");
  int64_t five[] = {20, 2, kPage, kKvHeads, kDimQk};
  EXPECT_EQ(refused([&](RunArgs& a) {
              a.k.ndim = 5;
              a.k.shape = five;
              a.k.strides = nullptr;
            }),
            "run: v is given beside float32[20, 2, 4, 2, 24] on cpu, which holds K and V; leave it "
            "out");
  attention.run(good);
  c.expect_right();
}

TEST(Attention, RaggedRowsBeyondKAreRefused) {
  Case c;
  Attention attention(small_config(ragged_kv()));
  attention.plan(c.ragged());
  RunArgs args = c.args();
  c.k.shape()[0] = c.v.shape()[0] = 13;
  EXPECT_EQ(test::refusal([&] { attention.run(args); }),
            "run: kv_indptr[3] - 1 is 13, but k has 13 rows (k.shape[0])");
}

TEST(Attention, ConfigRefusals) {
  const auto refused = [](auto change) {
    AttentionConfig config = small_config(paged_kv(kPage));
    change(config);
    const std::string text = test::refusal([&] { Attention attention(config); });
    EXPECT_EQ(text, test::refusal([&] { workspace_bytes(config); }));
    return text;
  };
  EXPECT_EQ(refused([](AttentionConfig&) {}), "");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.num_qo_heads = 7; }),
            "attention: num_qo_heads is 7; it must be a multiple of num_kv_heads, 2");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.num_kv_heads = 0; }),
            "attention: num_kv_heads is 0; it must be >= 1");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.head_dim_qk = 46; }),
            "attention: head_dim_qk is 46; it must be a multiple of 8 from 8 to 256");
  EXPECT_EQ(
      refused([](AttentionConfig& c) { c.head_dim_vo = 512; }),
      "attention: head_dim_vo is 512; it must be a multiple of 8 from 8 to 256 (MLA shapes are "
      "not supported yet)");
  EXPECT_EQ(
      refused([](AttentionConfig& c) { c.dtype = Dtype::kE4m3; }),
      "attention: dtype is float8_e4m3fn, but q and out are float32, bfloat16 or float16; K and "
      "V may be float8_e4m3fn (kv_dtype)");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.kv_dtype = Dtype::kFloat16; }),
            "attention: kv_dtype is float16; it must be dtype, float32, or float8_e4m3fn or "
            "float8_e5m2");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.bounds.keys = 0; }),
            "attention: bounds.keys is 0; it must be 1 ... 1073741824");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.bounds.requests = 0; }),
            "attention: bounds.requests is 0; it must be >= 1");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.kv.page_size = 0; }),
            "attention: kv.page_size is 0; it must be >= 1");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.kv.num_levels = 9; }),
            "attention: kv.num_levels is 9; it must be 1 ... 8 (of a deeper tree compose_radix "
            "shares the nodes that save most)");
  EXPECT_NE(refused([](AttentionConfig& c) {
              c.kv.num_levels = 3;
              c.bounds.query_tokens = (1 << 30) / kQoHeads;
            }).find("attention: bounds.query_tokens 178956970 x num_qo_heads 6 x 3 levels need "),
            std::string::npos);
  EXPECT_EQ(refused([](AttentionConfig& c) {
              c.kv = ragged_kv();
              c.kv.hnd = true;
            }),
            "attention: kv.hnd is set, but a ragged format has no pages");
  EXPECT_NE(refused([](AttentionConfig& c) {
              c.kernel = "sm90a";
            }).find("attention: kernel is 'sm90a', but the CPU here takes 'auto', 'cpu', "),
            std::string::npos);
  EXPECT_EQ(refused([](AttentionConfig& c) { c.device.type = 13; }),
            "attention: device is device 0 of DLPack type 13; plait runs on cpu and cuda");
  EXPECT_EQ(refused([](AttentionConfig& c) { c.sm_scale = -1; }),
            "attention: sm_scale is -1; it must be finite and > 0 (0: 1 / sqrt(head_dim_qk))");
}

TEST(Attention, KernelOfAnInstructionSet) {
  AttentionConfig config = small_config(ragged_kv());
  config.kernel = "cpu baseline";
  Attention attention(config);
  EXPECT_EQ(attention.kernel_name(), "cpu baseline");
  Case c;
  attention.plan(c.ragged());
  attention.run(c.args());
  c.expect_right();
}

TEST(Attention, WorkspaceIsCheckedAndShared) {
  const AttentionConfig config = small_config(ragged_kv());
  const long long bytes = workspace_bytes(config);
  ASSERT_GT(bytes, 1);
  const auto small = std::make_shared<Workspace>(Device{}, bytes - 1);
  EXPECT_EQ(test::refusal([&] { Attention attention(config, small); }),
            concat("attention: the workspace has ", bytes - 1, " bytes; this configuration needs ",
                   bytes, " (workspace_bytes())"));
  const auto shared = std::make_shared<Workspace>(Device{}, bytes);
  Case c;
  Attention first(config, shared), second(config, shared);
  for (Attention* attention : {&first, &second}) attention->plan(c.ragged());
  for (Attention* attention : {&first, &second, &first}) {
    c.out = Floats::full({9, kQoHeads, kDimVo}, 7);
    attention->run(c.args());
    c.expect_right();
  }
}

TEST(Attention, LseWithoutSoftmaxIsRefused) {
  AttentionConfig config = small_config(ragged_kv());
  config.variant = custom("twice", "Twice", R"(struct Twice {
    PLAIT_HD static float logits_transform(const Params&, const LogitContext&, float logit) {
      return 2.0f * logit;
    }
    static constexpr bool kUseSoftmax = false;
  };)",
                          {}, false);
  Attention attention(config);  // by the host compiler that built this test
  Case c;
  attention.plan(c.ragged());
  EXPECT_EQ(test::refusal([&] { attention.run(c.args()); }),
            "run: lse is given, but variant 'twice' has no softmax and so no lse; leave it out");
}

}  // namespace
}  // namespace plait
