// compose_radix by target: what a GPU and a CPU share of the same tree, on figures computed here
// from the costs of a tile; the levels' tables; and the C API over both kinds of input.
#include "plait/compose_radix.h"

#include <gtest/gtest.h>

#include <bit>
#include <numeric>
#include <random>

#include "cpu/cost_model.h"
#include "cuda/cost_model.h"
#include "formats/tensors.h"
#include "plait/c_api.h"
#include "plait/error.h"

namespace plait {
namespace {

using test::Ints;
using test::Longs;

// As an Attention of these bounds has it on an H200; tile_q 0: the kernel of decodes alone.
PlanTarget sm90_target(int group_size) {
  PlanTarget target;
  target.num_ctas = 132;
  target.tile_kv = 128;
  target.group_size = group_size;
  target.num_kv_heads = 8;
  target.num_shapes = 2;
  const KernelCost& cost = cuda::kSm90MixedCost;
  target.shapes[0] = {128, 1, cost.fixed_us[0], cost.us_per_key[0]};
  target.shapes[1] = {64, 2, cost.fixed_us[1], cost.us_per_key[1]};
  target.merge_us = cost.merge_us;
  return target;
}

PlanTarget cpu_target(int group_size) {
  AttentionConfig config;
  config.num_kv_heads = 8;
  config.num_qo_heads = 8 * group_size;
  config.head_dim_qk = config.head_dim_vo = 128;
  config.kv = composed_kv(paged_kv(16), 4);
  config.bounds = {256, 256, 1 << 20};
  return cpu::plan_target(config, 16);
}

// Decodes: a parent a node, its keys, the node of each request; rows of K and V between a node and
// those below it.
std::vector<NodeChoice> compose(const PlanTarget& target, std::vector<int> parents,
                                std::vector<int> keys, std::vector<int> ends, int gap = 0,
                                int num_levels = 4) {
  std::vector<int> qo(ends.size() + 1), begin(keys.size(), 0);
  std::iota(qo.begin(), qo.end(), 0);
  for (size_t i = 0; i < keys.size(); ++i) {  // rows of K and V behind those of the parent
    if (parents[i] >= 0) begin[i] = begin[parents[i]] + keys[parents[i]] + gap;
  }
  Ints parent = Ints::list(parents), len = Ints::list(keys), node = Ints::list(ends);
  Ints indptr = Ints::list(qo), first = Ints::list(begin);
  RadixTree tree;
  tree.node_parent = parent.view();
  tree.request_node = node.view();
  tree.nodes.kv_begin = first.view();
  tree.nodes.kv_len = len.view();
  return compose_radix(tree, indptr.view(),
                       {composed_kv(ragged_kv(), num_levels), target, Visibility{.causal = 1}})
      .nodes();
}

// num_groups nodes under a root, each with `size` requests that have `own` keys.
struct Groups {
  std::vector<int> parents{-1}, keys, ends;
  Groups(int root_keys, int num_groups, int group_keys, int size, int own) : keys{root_keys} {
    for (int g = 0; g < num_groups; ++g) {
      const int node = static_cast<int>(parents.size());
      parents.push_back(0);
      keys.push_back(group_keys);
      for (int r = 0; r < size; ++r) {
        ends.push_back(static_cast<int>(parents.size()));
        parents.push_back(node);
        keys.push_back(own);
      }
    }
  }
};

TEST(ComposeRadix, SharedPrefixOnSm90) {
  // 64 decodes of group 4 over 8192 keys. Flat: 64 tiles of 64 rows. Shared: 256 rows in two tiles
  // of 128; these and 64 own tiles are then partial.
  std::vector<int> parents{-1}, keys{8192}, ends;
  for (int r = 0; r < 64; ++r) {
    parents.push_back(0);
    keys.push_back(256);
    ends.push_back(r + 1);
  }
  const std::vector<NodeChoice> nodes = compose(sm90_target(4), parents, keys, ends);
  ASSERT_EQ(nodes.size(), 1u);
  const NodeChoice& node = nodes[0];
  EXPECT_EQ(node.level, 0);
  EXPECT_EQ(node.num_rows, 256);
  EXPECT_EQ(node.num_tiles, 2);
  EXPECT_EQ(node.tile_q, 128);
  EXPECT_EQ(node.keys_not_read, 63 * 8192);
  const KernelCost& cost = cuda::kSm90MixedCost;
  EXPECT_NEAR(node.flat_ns * 1e-3, 8 * 64 * 8192 * cost.us_per_key[1], 1);
  EXPECT_NEAR(node.shared_ns * 1e-3,
              8 * (2 * (cost.fixed_us[0] + 8192 * cost.us_per_key[0]) + 66 * cost.merge_us), 1);
}

TEST(ComposeRadix, FullTilesDoNotShare) {
  // Two groups of 32: each fills a tile of 128 rows, and so would every half of the root's 256. The
  // root's keys are read with the groups', twice either way, without a level of joins.
  const Groups g(2048, 2, 1024, 32, 100);
  const std::vector<NodeChoice> nodes = compose(sm90_target(4), g.parents, g.keys, g.ends);
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].level, -1);
  EXPECT_EQ(nodes[0].why, NodeChoice::kDoesNotPay);
  for (int i : {1, 2}) {
    EXPECT_EQ(nodes[i].level, 0);
    EXPECT_EQ(nodes[i].keys_shared, 2048 + 1024);
    EXPECT_EQ(nodes[i].keys_not_read, 31 * (2048 + 1024));
  }
}

// Invariant mode: nodes end inside a chunk, begin in one and end in the next, have none of an end.
TEST(ComposeRadix, WholeChunksAreShared) {
  PlanTarget target = sm90_target(4);
  target.chunk_keys = 1024;
  // Under a root of 2500 keys two nodes that reach to 3900 and to 3000, 16 decodes each.
  std::vector<int> parents{-1, 0, 0}, keys{2500, 1400, 500}, ends;
  for (int r = 0; r < 32; ++r) {
    ends.push_back(static_cast<int>(parents.size()));
    parents.push_back(1 + r % 2);
    keys.push_back(50);
  }
  const std::vector<NodeChoice> nodes = compose(target, parents, keys, ends);
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].node, 0);
  EXPECT_EQ(nodes[0].level, 0);
  EXPECT_EQ(nodes[0].kv_len, 2048);
  EXPECT_EQ(nodes[0].keys_not_read, 31 * 2048);
  EXPECT_EQ(nodes[1].node, 1);
  EXPECT_EQ(nodes[1].parent, 0);
  EXPECT_EQ(nodes[1].level, 1);
  EXPECT_EQ(nodes[1].kv_len, 3072 - 2500);
  EXPECT_EQ(nodes[1].keys_shared, 1024);
  EXPECT_EQ(nodes[2].level, -1);
  EXPECT_EQ(nodes[2].why, NodeChoice::kInsideChunk);
}

TEST(ComposeRadix, NoChunkEndsInsideAnUnjoinableNode) {
  PlanTarget target = sm90_target(4);
  target.chunk_keys = 1024;
  try {
    compose(target, {-1, 0, 0}, {1500, 10, 10}, {1, 2}, /*gap=*/3);
    FAIL() << "taken";
  } catch (const ArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find("node 0 ends at key 1500"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(compose(target, {-1, 0, 0}, {1024, 10, 10}, {1, 2}, 3)[0].level, 0);
}

// Whether a prefix over decodes of group 4 with own keys is shared.
bool is_shared(const PlanTarget& target, int prefix, int num_requests) {
  std::vector<int> parents{-1}, keys{prefix}, ends;
  for (int r = 0; r < num_requests; ++r) {
    parents.push_back(0);
    keys.push_back(50);
    ends.push_back(r + 1);
  }
  return compose(target, parents, keys, ends)[0].level >= 0;
}

TEST(ComposeRadix, EveryTargetDecidesByItsOwnCosts) {
  // 9 decodes have 36 rows: a small tile of the GPU, but a large one of the CPU, a key of which
  // costs more than nine of the small ones. A short prefix over 4 is worth the joins on a CPU
  // alone.
  const double gpu_flat = 9 * 400 * 0.0175, gpu_shared = 1 + 400 * 0.0175 + 10 * 1.5;
  EXPECT_LT(gpu_shared, gpu_flat);
  EXPECT_TRUE(is_shared(sm90_target(4), 400, 9));
  EXPECT_GT(400 * cpu::kManyRowsUsPerKey, 9 * 400 * cpu::kFewRowsUsPerKey);
  EXPECT_FALSE(is_shared(cpu_target(4), 400, 9));

  EXPECT_GT(1 + 100 * 0.0175 + 5 * 1.5, 4 * 100 * 0.0175);
  EXPECT_FALSE(is_shared(sm90_target(4), 100, 4));
  EXPECT_LT(cpu::kFewRowsFixedUs + 100 * cpu::kFewRowsUsPerKey + 5 * cpu::kMergeUs,
            4 * 100 * cpu::kFewRowsUsPerKey);
  EXPECT_TRUE(is_shared(cpu_target(4), 100, 4));
}

// What a choice of shared nodes costs, block by block, from the definition: of every node and
// request the keys behind the nearest shared node above it, if it is shared itself or a request.
struct Priced {
  std::vector<int> parents, keys, ends;
  const PlanTarget& target;

  int kv_end(int node) const { return node < 0 ? 0 : kv_end(parents[node]) + keys[node]; }
  bool is_under(int request, int node) const {
    int at = ends[request];
    while (at >= 0 && at != node) at = parents[at];
    return at == node;
  }
  double block(int rows, int num_keys, bool joined) const {
    if (num_keys == 0 || rows == 0) return 0;
    double us = 0;
    for (; rows > 0; rows -= 128) {
      const ShapeModel& shape = target.shapes[rows > 64 ? 0 : 1];
      us += shape.fixed_us + num_keys * shape.us_per_key + (joined ? target.merge_us : 0.0f);
    }
    return target.num_kv_heads * us;
  }
  int base(int node, unsigned shared) const {
    for (int at = node; at >= 0; at = parents[at]) {
      if (shared >> at & 1) return kv_end(at);
    }
    return 0;
  }
  double operator()(unsigned shared) const {
    double us = 0;
    for (int node = 0; node < static_cast<int>(parents.size()); ++node) {
      if ((shared >> node & 1) == 0) continue;
      int rows = 0;
      bool keys_below = false;
      for (int r = 0; r < static_cast<int>(ends.size()); ++r) {
        if (!is_under(r, node)) continue;
        rows += target.group_size;
        keys_below |= kv_end(ends[r]) > kv_end(node);
      }
      const int begin = base(parents[node], shared);
      us += block(rows, kv_end(node) - begin, begin > 0 || keys_below);
    }
    for (const int end : ends) {
      const int begin = base(end, shared);
      us += block(target.group_size, kv_end(end) - begin, begin > 0);
    }
    return us;
  }
  int most_on_a_path(unsigned shared) const {
    int most = 0;
    for (const int end : ends) {
      int count = 0;
      for (int at = end; at >= 0; at = parents[at]) count += shared >> at & 1;
      most = std::max(most, count);
    }
    return most;
  }
};

TEST(ComposeRadix, NoChoiceIsCheaper) {
  std::mt19937 random(3);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  const PlanTarget target = sm90_target(8);
  int shared_nodes = 0, flat_nodes = 0, deep = 0;
  for (int round = 0; round < 60; ++round) {
    const int n = 10;
    std::vector<int> parents, keys, ends;
    for (int i = 0; i < n; ++i) {
      parents.push_back(i == 0 ? -1 : below(i + 1) - 1);
      keys.push_back(1 + below(below(3) == 0 ? 3000 : 300));
    }
    for (int r = 0; r < 40; ++r) ends.push_back(below(n));
    const Priced price{parents, keys, ends, target};
    for (const int levels : {2, 3, 4}) {
      const std::vector<NodeChoice> choices = compose(target, parents, keys, ends, 0, levels);
      unsigned chosen = 0;
      for (const NodeChoice& c : choices) chosen |= (c.level >= 0 ? 1u : 0u) << c.node;
      for (const NodeChoice& c :
           choices) {  // the reasons: each node's part, the others as they are
        const unsigned bit = 1u << c.node;
        EXPECT_NEAR((c.flat_ns - c.shared_ns) * 1e-3, price(chosen & ~bit) - price(chosen | bit),
                    0.1);
      }
      ASSERT_LT(price.most_on_a_path(chosen), levels);
      double best = 1e30;
      for (unsigned some = 0; some < 1u << n; ++some) {
        if (price.most_on_a_path(some) < levels) best = std::min(best, price(some));
      }
      EXPECT_NEAR(price(chosen), best, 1e-6 * best) << "round " << round << ", levels " << levels;
      shared_nodes += std::popcount(chosen);
      flat_nodes += n - std::popcount(chosen);
      deep += price.most_on_a_path(chosen) >= 2;
    }
  }
  EXPECT_GT(shared_nodes, 100);
  EXPECT_GT(flat_nodes, 100);
  EXPECT_GT(deep, 10);
}

TEST(ComposeRadix, GroupsLargerThanATile) {
  // 200 heads a group take tiles of 128 and 72 rows a token, however many tokens there are: nobody
  // shares what need not be; and of keys that lie apart 4 tiles are read.
  std::vector<int> parents{-1, 0, 0}, keys{4096, 10, 10}, ends{1, 2};
  EXPECT_TRUE(compose(sm90_target(200), parents, keys, ends).empty());
  const auto nodes = compose(sm90_target(200), parents, keys, ends, 1);
  ASSERT_EQ(nodes.size(), 1u);
  EXPECT_EQ(nodes[0].num_tiles, 4);
  EXPECT_EQ(nodes[0].num_rows, 400);
  EXPECT_EQ(nodes[0].why, NodeChoice::kCannotJoin);
}

// The C API: two requests over a shared page, from a tree and from hashes.
plait_attention* c_attention(int num_levels) {
  plait_config config;
  plait_config_init(&config);
  config.num_qo_heads = config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_vo = 8;
  config.dtype = PLAIT_FLOAT32;
  config.kv_kind = PLAIT_PAGED;
  config.page_size = 256;
  config.num_levels = num_levels;
  config.max_requests = config.max_query_tokens = 4;
  config.max_keys = 1024;
  config.max_ctas = 1;
  plait_attention* attention = nullptr;
  EXPECT_EQ(plait_attention_create(&config, &attention), PLAIT_OK) << plait_last_error();
  return attention;
}

void run_and_check(plait_attention* attention, const plait_levels* levels, const int32_t* qo) {
  plait_batch batch;
  plait_batch_init(&batch);
  batch.num_requests = 4;
  batch.qo_indptr = qo;
  batch.composed = levels;
  ASSERT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_OK) << plait_last_error();
  const std::string table = plait_explain(attention, 0);
  EXPECT_NE(table.find("Shared: 1 of 1 nodes"), std::string::npos) << table;
  EXPECT_NE(std::string(plait_explain(attention, 1)).find("\"why\": \"pays\""), std::string::npos);
  // K is 0 and V of page p is p: out is the mean of 256 times 5 and `own` times the page behind.
  std::vector<float> q(4 * 8, 1), k(6 * 256 * 8, 0), v(k.size()), out(q.size());
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / (256 * 8));
  plait_run_args run;
  plait_run_args_init(&run);
  run.num_rows = 4;
  run.q = q.data();
  run.num_kv_blocks = 6;
  run.k = k.data();
  run.v = v.data();
  run.out = out.data();
  ASSERT_EQ(plait_run(attention, &run, nullptr), PLAIT_OK) << plait_last_error();
  for (int r = 0; r < 4; ++r) {
    const float own = static_cast<float>(10 * (r + 1));
    EXPECT_NEAR(out[8 * r], (256 * 5 + own * r) / (256 + own), 1e-4);
  }
}

TEST(ComposeRadix, FromC) {
  plait_attention* attention = c_attention(3);
  const int32_t qo[5] = {0, 1, 2, 3, 4};
  plait_radix_args args;
  plait_radix_args_init(&args);
  args.num_requests = 4;
  args.qo_indptr = qo;
  args.num_nodes = 5;
  const int32_t parent[5] = {-1, 0, 0, 0, 0}, node[4] = {1, 2, 3, 4};
  const int32_t node_len[5] = {256, 10, 20, 30, 40}, node_indptr[6] = {0, 1, 2, 3, 4, 5};
  const int32_t node_pages[5] = {5, 0, 1, 2, 3};
  args.node_parent = parent;
  args.request_node = node;
  args.tables.kv_len = node_len;
  args.tables.kv_page_indptr = node_indptr;
  args.tables.kv_page_indices = node_pages;
  args.tables.num_page_indices = 5;
  plait_levels* levels = nullptr;
  ASSERT_EQ(plait_compose_radix(attention, &args, &levels), PLAIT_OK) << plait_last_error();
  run_and_check(attention, levels, qo);
  plait_levels_destroy(levels);

  plait_radix_args_init(&args);
  args.num_requests = 4;
  args.qo_indptr = qo;
  const int32_t hash_indptr[5] = {0, 1, 2, 3, 4};
  const int64_t ids[4] = {1LL << 60, 1LL << 60, 1LL << 60, 1LL << 60};
  const int32_t kv_len[4] = {266, 276, 286, 296}, table[8] = {5, 0, 5, 1, 5, 2, 5, 3};
  args.hash_indptr = hash_indptr;
  args.hash_ids = ids;
  args.block_tokens = 256;
  args.tables.kv_len = kv_len;
  args.tables.block_table = table;
  args.tables.block_table_rows = 4;
  args.tables.block_table_columns = 2;
  ASSERT_EQ(plait_compose_radix(attention, &args, &levels), PLAIT_OK) << plait_last_error();
  run_and_check(attention, levels, qo);

  plait_batch batch;
  plait_batch_init(&batch);
  batch.qo_indptr = qo;
  batch.composed = levels;
  plait_level level{};
  batch.levels = &level;
  batch.num_levels = 1;
  EXPECT_EQ(plait_plan(attention, &batch, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plait_batch: composed is given beside levels; num_levels must be 0");
  plait_levels_destroy(levels);
  plait_levels_destroy(nullptr);
  args.tables.on_device = PLAIT_ON_DEVICE_BLOCK_TABLE;
  EXPECT_EQ(plait_compose_radix(attention, &args, &levels), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plait_radix_args: tables.on_device is 4; levels are composed on the host: give "
               "host arrays and 0");
  args.tables.on_device = 0;
  args.node_parent = parent;
  EXPECT_EQ(plait_compose_radix(attention, &args, &levels), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "plait_radix_args: both given; taken are node_parent and request_node, or "
               "hash_indptr and hash_ids");
  EXPECT_EQ(plait_compose_radix(nullptr, &args, &levels), PLAIT_INVALID_ARGUMENT);
  EXPECT_EQ(plait_compose_radix(attention, nullptr, &levels), PLAIT_INVALID_ARGUMENT);
  plait_attention_destroy(attention);
  EXPECT_EQ(plait_explain(nullptr, 0), nullptr);
  plait_attention* flat = c_attention(1);
  EXPECT_EQ(plait_explain(flat, 0), nullptr);
  EXPECT_STREQ(plait_last_error(), "current_plan: nothing is planned yet; call plan() first");
  args.node_parent = nullptr;
  EXPECT_EQ(plait_compose_radix(flat, &args, &levels), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(plait_last_error(),
               "compose_radix: the format has 1 level; make it, and the Attention, with "
               "composed_kv(format, num_levels) of 2 ... 8: the last is for what nobody shares");
  plait_attention_destroy(flat);
}

}  // namespace
}  // namespace plait
