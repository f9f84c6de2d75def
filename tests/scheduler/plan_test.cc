// The planner over random batches: coverage, merge lists, bounds, equal plans for equal input; and
// the refusals of a view that breaks the rules.
#include "plait/plan.h"

#include <gtest/gtest.h>

#include "plait/error.h"
#include "scheduler/plan_checks.h"
#include "scheduler/random_views.h"

namespace plait {
namespace {

using namespace plait::testing;  // NOLINT: helpers of these tests

std::string describe(const BsrView& view, const Visibility& v, const PlanTarget& t) {
  return concat("tokens ", view.token_position.size(), " blocks ", view.row_blocks.size(),
                " causal ", v.causal, " window ", v.window_left, " sinks ", v.sink_tokens, " CTAs ",
                t.num_ctas, " tile_kv ", t.tile_kv, " group ", t.group_size, " kv heads ",
                t.num_kv_heads, " tile_q ", t.shapes[0].tile_q, ", ", t.shapes[1].tile_q);
}

void check_random_plans(int first_seed, int num_seeds, BsrView (*make_view)(Random&)) {
  Plan used_again;
  int with_merge = 0, without_merge = 0;
  for (int seed = first_seed; seed < first_seed + num_seeds; ++seed) {
    Random random(seed);
    const BsrView view = make_view(random);
    const Visibility visible = random_visibility(random);
    const PlanTarget target = random_target(random, view);
    const auto draw = random() % 8;
    const Scheduler scheduler = draw % 4 == 0 ? Scheduler::kLpt
                                : draw == 1   ? Scheduler::kPrefixSum
                                              : Scheduler::kAuto;
    SCOPED_TRACE(concat("seed ", seed, ": ", describe(view, visible, target)));
    const Plan plan = make_plan(view, visible, target, scheduler);
    check_plan(view, visible, target, plan);
    if (::testing::Test::HasFatalFailure()) return;
    if (scheduler == Scheduler::kLpt) {
      for (const PlanCandidate& candidate : plan.candidates) {
        ASSERT_EQ(candidate.name, "algorithm_1");
        ASSERT_EQ(candidate.fits, &candidate == &plan.candidates.back());
      }
    }
    make_plan(view, visible, target, scheduler, used_again);
    ASSERT_TRUE(plan == used_again) << "equal input, different plan";
    (plan.num_partial_rows > 0 ? with_merge : without_merge) += 1;
  }
  EXPECT_GT(with_merge, num_seeds / 20);  // else the seeds do not test what they are for
  EXPECT_GT(without_merge, num_seeds / 20);
}

TEST(Plan, RandomFlatBatches) { check_random_plans(0, 250, random_flat_view); }
TEST(Plan, RandomTwoLevelBatches) { check_random_plans(1000, 250, random_two_level_view); }

// Decodes and drafts long enough for a queue, in all its sizes; idle CTAs and heads in many parts.
TEST(Plan, RandomQueues) {
  int with_queue = 0, whole_heads = 0;
  for (int seed = 0; seed < 200; ++seed) {
    Random random(seed);
    std::vector<int> q_len, kv_len;
    for (int i = pick(random, {1, 2, 5, 13, 60}); i > 0; --i) {
      kv_len.push_back(pick(random, {0, 1, 63, 64, 65, 500, 997, 3000}));
      q_len.push_back(std::min(pick(random, {0, 1, 1, 1, 4}), kv_len.back()));
    }
    const BsrView view = flat_view(q_len, kv_len);
    const Visibility visible = random_visibility(random);
    PlanTarget target = random_target(random, view);
    target.group_size = pick(random, {1, 3, 8});
    target.num_ctas = pick(random, {1, 2, 7});
    target.tile_kv = pick(random, {16, 64});
    target.min_split_keys = pick(random, {0, 64});
    target.max_partial_rows *= 4;
    SCOPED_TRACE(concat("seed ", seed, ": ", describe(view, visible, target)));
    const Plan plan = make_plan(view, visible, target);
    check_plan(view, visible, target, plan);
    if (::testing::Test::HasFatalFailure()) return;
    with_queue += plan.num_queued() > 0;
    for (size_t i = plan.cta_item_indptr.back(); i < plan.items.size(); ++i) {
      whole_heads += plan.items[i].partial_row < 0;
    }
  }
  EXPECT_GT(with_queue, 30);
  EXPECT_GT(whole_heads, 0);
}

PlanTarget hopper(int num_ctas) {
  PlanTarget target;
  target.num_ctas = num_ctas;
  target.tile_kv = 64;
  target.group_size = 4;
  target.num_kv_heads = 8;
  target.num_shapes = 2;
  target.shapes[0] = {.tile_q = 128, .key_split = 1, .fixed_us = 1, .us_per_key = 0.022f};
  target.shapes[1] = {.tile_q = 64, .key_split = 2, .fixed_us = 0.5f, .us_per_key = 0.016f};
  target.merge_us = 1;
  target.max_partial_rows = 2 * num_ctas * 128;
  target.min_split_keys = 256;
  return target;
}

TEST(Plan, NothingToDo) {
  const PlanTarget target = hopper(132);
  const Plan empty = make_plan(BsrView{}, {}, target);
  check_plan(BsrView{}, {}, target, empty);
  EXPECT_TRUE(empty.items.empty());
  EXPECT_EQ(empty.balance(), 1.0f);
  // Requests without keys: one item a tile, all heads, final.
  const BsrView view = flat_view({1, 40, 0}, {0, 0, 9});
  const Plan plan = make_plan(view, {.causal = 1}, target);
  check_plan(view, {.causal = 1}, target, plan);
  ASSERT_EQ(plan.items.size(), 3u);
  for (const WorkItem& item : plan.items) {
    EXPECT_EQ(item.num_heads, 8);
    EXPECT_EQ(item.kv_begin, item.kv_end);
    EXPECT_EQ(item.partial_row, -1);
  }
}

TEST(Plan, TokensOfNoBlockGetOne) {
  BsrView view = flat_view({1, 1, 1}, {100, 100, 100});
  view.row_blocks.erase(view.row_blocks.begin() + 1);
  const PlanTarget target = hopper(8);
  const Plan plan = make_plan(view, {}, target);
  check_plan(view, {}, target, plan);
  ASSERT_EQ(plan.row_blocks.size(), 3u);
  EXPECT_EQ(plan.row_blocks[2].first_token, 1);
  EXPECT_EQ(plan.row_blocks[2].kv_len, 0);
}

TEST(Plan, HeadsDoNotMultiplyTheWork) {
  PlanTarget target = hopper(132);
  const BsrView view = flat_view(std::vector<int>(4096, 1), std::vector<int>(4096, 1000));
  for (const int heads : {1, 8, 128}) {
    target.num_kv_heads = heads;
    for (const Scheduler scheduler : {Scheduler::kAuto, Scheduler::kLpt}) {
      const Plan plan = make_plan(view, {.causal = 1}, target, scheduler);
      // Every cut between CTAs adds at most two items to those of the 4096 tiles.
      EXPECT_LE(plan.items.size(), 4096u + 3 * 132u) << heads << " heads";
    }
  }
}

TEST(Plan, HiddenMiddleCostsNothing) {
  // One query at 99999 sees 4 sink tokens and a window of 1000: 17 or 18 KV tiles.
  const PlanTarget target = hopper(1);
  const BsrView view = flat_view({1}, {100000});
  const Visibility visible{.causal = 1, .window_left = 999, .sink_tokens = 4};
  const Plan plan = make_plan(view, visible, target);
  check_plan(view, visible, target, plan);
  EXPECT_LE(plan.candidates[plan.chosen].makespan_us, 8 * (0.5 + 18 * 64 * 0.016) * 1.001);
}

TEST(Plan, TailTakesTheSmallShape) {
  const PlanTarget target = hopper(1);
  const BsrView view = flat_view({32 + 16, 32 + 17, 1}, {64, 64, 64});
  const Plan plan = make_plan(view, {}, target);
  check_plan(view, {}, target, plan);
  std::map<std::pair<int, int>, int> shape;  // by block and first row
  for (const WorkItem& item : plan.items) shape[{item.row_block, item.first_row}] = item.shape;
  const std::map<std::pair<int, int>, int> expected = {
      {{0, 0}, 0}, {{0, 128}, 1}, {{1, 0}, 0}, {{1, 128}, 0}, {{2, 0}, 1}};
  EXPECT_EQ(shape, expected);
}

TEST(Plan, MixedBatchStartsBothKindsSideBySide) {
  std::vector<int> q_len(65, 1), kv_len(65, 3000);
  q_len[0] = kv_len[0] = 4096;
  const PlanTarget target = hopper(132);
  const BsrView view = flat_view(q_len, kv_len);
  const Plan plan = make_plan(view, {.causal = 1}, target);
  check_items(plan, target);
  check_figures(target, plan);
  double small_us = 0, total_us = 0;
  int small_first = 0;
  for (const WorkItem& item : plan.items) {
    total_us += modelled_us(plan, target, item);
    small_us += item.shape == 1 ? modelled_us(plan, target, item) : 0;
  }
  for (int cta = 0; cta < 132; ++cta) {
    small_first += plan.items.at(plan.cta_item_indptr[cta]).shape == 1;
  }
  EXPECT_NEAR(small_first, 132 * small_us / total_us, 8) << to_string(plan);
}

// Joining many rows is dear: beside decodes, which fill every CTA up, no large tile is cut.
TEST(Plan, MixedBatchCutsFewRowsOnly) {
  for (const int chunk : {500, 2048, 4093}) {
    std::vector<int> q_len(64, 1), kv_len(64, 4096);
    q_len[63] = chunk;
    const PlanTarget target = hopper(132);
    const BsrView view = flat_view(q_len, kv_len);
    const Plan plan = make_plan(view, {.causal = 1}, target);
    check_plan(view, {.causal = 1}, target, plan);
    EXPECT_LE(plan.balance(), 1.03f) << to_string(plan);
    for (const WorkItem& item : plan.items) {
      EXPECT_TRUE(item.shape == 1 || item.partial_row < 0) << to_string(plan);
    }
  }
}

TEST(Plan, BalanceWithinTheWorkspace) {
  PlanTarget target = hopper(132);
  target.num_shapes = 1;
  target.shapes[0] = {.tile_q = 64, .key_split = 2, .fixed_us = 1, .us_per_key = 0.0155f};
  target.merge_us = 1.5f;
  target.max_partial_rows = 2 * 132 * 64;
  for (int b = 1; b <= 64; ++b) {
    const BsrView view = flat_view(std::vector<int>(b, 1), std::vector<int>(b, 4096));
    const Plan plan = make_plan(view, {.causal = 1}, target);
    check_figures(target, plan);
    int partial_tiles = 0;
    for (const WorkItem& item : plan.items) {
      partial_tiles += item.partial_row < 0 ? 0 : item.num_heads;
    }
    EXPECT_LE(plan.balance(), 1.08f) << b << " requests";
    EXPECT_LE(partial_tiles, 2 * 132) << b << " requests";
  }
}

TEST(Plan, SharedKeysGoCachefulByCacheful) {
  const BsrView view = flat_view({2048, 4096, 1024}, {2048, 4096, 1024});
  PlanTarget target = hopper(132);
  for (const long long cache_keys : {0, 8192, 32768}) {
    target.cache_keys = cache_keys;
    const Plan plan = make_plan(view, {.causal = 1}, target);
    if (cache_keys == 8192) check_plan(view, {.causal = 1}, target, plan);  // long: one of them
    EXPECT_EQ(plan.candidates[plan.chosen].name, "unsplit");
    EXPECT_LE(plan.balance(), 1.03f) << cache_keys;
    // Keys of the blocks with more keys come first: where an item's keys lie among all.
    const long long first[] = {8 * 4096, 0, 8 * (4096 + 2048)}, keys[] = {2048, 4096, 1024};
    int steps_back = 0;
    for (int cta = 0; cta < plan.num_ctas; ++cta) {
      long long before = 0;
      for (int i = plan.cta_item_indptr[cta]; i < plan.cta_item_indptr[cta + 1]; ++i) {
        const WorkItem& item = plan.items[i];
        const long long place = first[item.row_block] + item.kv_head_begin * keys[item.row_block];
        const long long cacheful = cache_keys > 0 ? place / cache_keys : place / 8192;
        steps_back += cacheful < before;
        before = cacheful;
      }
    }
    EXPECT_EQ(steps_back > 0, cache_keys == 0) << cache_keys;
  }
}

// The parts of heads that a CTA shares with its neighbours come before its whole heads.
TEST(Plan, EqualSharesBeginWithParts) {
  PlanTarget target = hopper(264);
  target.num_shapes = 1;
  target.shapes[0] = {.tile_q = 16, .fixed_us = 1, .us_per_key = 0.032f};
  target.merge_us = 1.5f;
  target.max_partial_rows = 2 * 264 * 16;
  const BsrView view = flat_view(std::vector<int>(64, 1), std::vector<int>(64, 4096));
  const Plan plan = make_plan(view, {.causal = 1}, target);
  check_plan(view, {.causal = 1}, target, plan);
  ASSERT_EQ(plan.candidates[plan.chosen].name, "equal_shares");
  int ctas_with_both = 0;
  for (int cta = 0; cta < plan.num_ctas; ++cta) {
    const auto begin = plan.items.begin() + plan.cta_item_indptr[cta];
    const auto end = plan.items.begin() + plan.cta_item_indptr[cta + 1];
    const auto is_part = [](const WorkItem& item) { return item.partial_row >= 0; };
    EXPECT_TRUE(std::is_partitioned(begin, end, is_part)) << "CTA " << cta;
    ctas_with_both += begin != end && is_part(*begin) && !is_part(*(end - 1));
  }
  EXPECT_GT(ctas_with_both, plan.num_ctas / 2);
}

// Long decodes have a queue whose items grow shorter; batches of few pieces a CTA have none, nor
// has one whose tiles share keys.
TEST(Plan, QueueOfLongDecodes) {
  PlanTarget target = hopper(264);
  target.num_shapes = 1;
  target.shapes[0] = {.tile_q = 16, .fixed_us = 1, .us_per_key = 0.032f};
  target.merge_us = 1.5f;
  target.max_partial_rows = 2 * 264 * 16;
  target.queue_percent = 15;
  target.min_queued_keys = 256;
  target.min_keys_for_queue = 768;
  const BsrView view = flat_view(std::vector<int>(64, 1), std::vector<int>(64, 4096));
  const Plan plan = make_plan(view, {.causal = 1}, target);
  check_plan(view, {.causal = 1}, target, plan);
  ASSERT_GT(plan.num_queued(), 264) << to_string(plan);
  int keys = 0, before = 1 << 30;
  for (size_t i = plan.cta_item_indptr.back(); i < plan.items.size(); ++i) {
    const int of_item = plan.items[i].kv_end - plan.items[i].kv_begin;
    EXPECT_LE(of_item, before);
    before = of_item;
    keys += of_item;
  }
  EXPECT_NEAR(keys, 0.15 * 64 * 8 * 4096, 0.02 * 64 * 8 * 4096);
  EXPECT_NE(to_string(plan).find("in the queue"), std::string::npos);

  const BsrView short_view = flat_view(std::vector<int>(16, 1), std::vector<int>(16, 1024));
  EXPECT_EQ(make_plan(short_view, {.causal = 1}, target).num_queued(), 0);
  const BsrView prefill = flat_view({2048, 4096}, {2048, 4096});
  EXPECT_EQ(make_plan(prefill, {.causal = 1}, target).num_queued(), 0);
}
// A head for each multiprocessor at most: whole, since a CTA that is alone on one reads nearly
// twice as fast and nothing is joined.
TEST(Plan, ShortDecodesStayWholeWhereEachHasAMultiprocessor) {
  PlanTarget target = hopper(264);
  target.num_shapes = 1;
  target.shapes[0] = {.tile_q = 16, .fixed_us = 1, .us_per_key = 0.032f};
  target.merge_us = 1.5f;
  target.num_sms = 132;
  for (const int keys : {512, 300}) {
    const BsrView view = flat_view(std::vector<int>(16, 1), std::vector<int>(16, keys));
    const Plan plan = make_plan(view, {.causal = 1}, target);
    check_plan(view, {.causal = 1}, target, plan);
    EXPECT_EQ(plan.num_partial_rows, 0) << to_string(plan);
    for (int cta = 0; cta < 132; ++cta) {
      EXPECT_LE(plan.cta_item_indptr[cta + 1] - plan.cta_item_indptr[cta], 1);
    }
    EXPECT_EQ(plan.cta_item_indptr[132], static_cast<int>(plan.items.size()));
  }
  // Not where two CTAs are through sooner by more than a join takes.
  EXPECT_EQ(make_plan(flat_view(std::vector<int>(16, 1), std::vector<int>(16, 1024)), {.causal = 1},
                      target)
                .num_partial_rows,
            16 * 8 * 2 * target.group_size);
  // Nor where one is far longer than the others.
  std::vector<int> kv_len(16, 500);
  kv_len[3] = 8000;
  EXPECT_GT(
      make_plan(flat_view(std::vector<int>(16, 1), kv_len), {.causal = 1}, target).num_partial_rows,
      0);
}

TEST(Plan, UnsplitCutsNoKeys) {
  PlanTarget target = hopper(132);
  target.max_partial_rows = 0;
  const BsrView view = flat_view({1, 300, 2}, {100000, 4096, 65});
  const Plan plan = make_plan(view, {.causal = 1}, target, Scheduler::kUnsplit);
  check_plan(view, {.causal = 1}, target, plan);
  EXPECT_EQ(plan.candidates.size(), 1u);
  EXPECT_EQ(plan.num_partial_rows, 0);
  for (const WorkItem& item : plan.items) EXPECT_EQ(item.partial_row, -1);
  EXPECT_GT(make_plan(view, {.causal = 1}, hopper(132)).num_partial_rows, 0);
}

TEST(Plan, AlgorithmOneTakenLiterally) {
  PlanTarget target = hopper(132);
  const BsrView view = flat_view(std::vector<int>(3, 1), std::vector<int>(3, 4096));
  const Plan plan = make_plan(view, {.causal = 1}, target, Scheduler::kLpt);
  // 3 * 4096 * 8 keys / 132 CTAs = 744.7, to a multiple of tile_kv.
  EXPECT_EQ(plan.candidates[0].chunk, 768);
  check_plan(view, {.causal = 1}, target, plan);
  // Where that needs more partial rows than there are, chunks grow until they fit.
  target.max_partial_rows = 4 * 8 * 3 * 3;  // three chunks a head
  const Plan tight = make_plan(view, {.causal = 1}, target, Scheduler::kLpt);
  check_plan(view, {.causal = 1}, target, tight);
  ASSERT_EQ(tight.candidates.size(), 2u);
  EXPECT_FALSE(tight.candidates[0].fits);
  EXPECT_EQ(tight.candidates[tight.chosen].chunk, 1536);
}

TEST(Plan, PartsOfAGroupAreMergedAlone) {
  // 24 heads a group: a tile of 16 rows, one of 8 at half the cost. Half of all work ends within
  // the first, so that it is split and the second is not.
  PlanTarget target = hopper(2);
  target.shapes[0] = {.tile_q = 16, .key_split = 1, .fixed_us = 1, .us_per_key = 0.04f};
  target.shapes[1] = {.tile_q = 8, .key_split = 1, .fixed_us = 1, .us_per_key = 0.02f};
  target.group_size = 24;
  target.num_kv_heads = 1;
  const BsrView view = flat_view({1}, {4096});
  const Plan plan = make_plan(view, {}, target);
  check_plan(view, {}, target, plan);
  ASSERT_EQ(plan.items.size(), 3u) << to_string(plan);
  for (const WorkItem& item : plan.items) EXPECT_EQ(item.partial_row >= 0, item.first_row == 0);
  EXPECT_EQ(plan.merge_indptr, (std::vector<int>{0, 2, 2}));
}

std::string error_of(const BsrView& view, const PlanTarget& target) {
  try {
    make_plan(view, {}, target);
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Plan, RefusesViewsThatBreakTheRules) {
  const BsrView good = flat_view({1, 2}, {10, 20});
  const PlanTarget target = hopper(4);
  EXPECT_EQ(error_of(good, target), "no error");
  BsrView view = good;
  view.row_blocks[1].num_tokens = 3;
  EXPECT_EQ(error_of(view, target), "plan: row_blocks[1] has tokens 1 + 3, but there are 3");
  view = good;
  view.row_blocks[1].first_token = 0;
  EXPECT_EQ(error_of(view, target),
            "plan: row_blocks[1] has query token 0 a second time in level 0");
  view = good;
  view.row_blocks[0].level = 1;
  EXPECT_EQ(error_of(view, target),
            "plan: row_blocks[0].level is 1, must not descend and be less than 1");
  view = good;
  view.row_map = {0, 1, 7};
  EXPECT_EQ(error_of(view, target), "plan: row_map[2] is 7, but there are 3 query tokens");
  view = good;
  view.token_request.pop_back();
  EXPECT_EQ(error_of(view, target), "plan: token_request has 2 entries, token_position 3");
}

TEST(Plan, RefusesWindowsThatWouldOverflow) {
  EXPECT_THROW(make_plan(flat_view({1}, {9}), {.causal = 1, .window_left = 0x7fffffff}, hopper(1)),
               ArgumentError);
}

TEST(Plan, SaysWhatTheWorkspaceLacks) {
  // Two levels over the same token: both must leave partial states, 4 heads a group, 8 groups.
  BsrView view = flat_view({1}, {100});
  view.num_levels = 2;
  view.row_blocks.push_back({.first_block = 0,
                             .first_token = 0,
                             .num_tokens = 1,
                             .kv_len = 50,
                             .kv_pos_begin = 100,
                             .level = 1});
  PlanTarget target = hopper(1);
  target.max_partial_rows = 63;
  EXPECT_NE(error_of(view, target).find("are 64, but the workspace holds 63"), std::string::npos)
      << error_of(view, target);
  target.max_partial_rows = 64;
  EXPECT_EQ(error_of(view, target), "no error");
}

TEST(Plan, PrintsItself) {
  const Plan plan = make_plan(flat_view({1, 1}, {4096, 100}), {.causal = 1}, hopper(132));
  const std::string text = to_string(plan);
  for (const char* word : {"2 query tokens", "4196 keys", "causal", "* ", "equal_shares", "CTAs"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << " is not in\n" << text;
  }
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 9);
}

}  // namespace
}  // namespace plait
