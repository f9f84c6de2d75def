// The planner on the device (kernels/plan_lengths.cuh), executed on the host (emulate.h), against
// the host's plan of the same lengths: item for item, list for list.
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>

#include "cuda/device_plan.h"
#include "cuda/plan_image.h"
#include "formats/device_lengths.h"
#include "formats/tensors.h"
#include "plan_lengths.cuh"
#include "scheduler/plan_checks.h"

namespace plait::test {
namespace {

constexpr Device kGpu{kCuda, 0};
constexpr int kTickets = 4;

TensorView on_gpu(TensorView view) {  // it is host memory
  view.device_type = kCuda;
  return view;
}

enum class Tables { kRaggedIndptr, kRaggedBegin, kCsr, kCsrLastPage, kPadded, kMapped };

// The same batch with all arrays on the device, and with its lengths on the host.
struct TwoBatches {
  TwoBatches(const std::vector<int>& q_len, const std::vector<int>& kv_len, Tables tables,
             int page_size) {
    const int n = static_cast<int>(q_len.size());
    std::vector<int> qo(n + 1, 0), rows(n + 1, 0), pages(n + 1, 0), last(n), map(n), begin(n);
    int width = 1;
    for (int i = 0; i < n; ++i) {
      qo[i + 1] = qo[i] + q_len[i];
      rows[i + 1] = rows[i] + kv_len[i];
      const int num_pages = (kv_len[i] + page_size - 1) / page_size;
      pages[i + 1] = pages[i] + num_pages;
      last[i] = num_pages == 0 ? 0 : kv_len[i] - (num_pages - 1) * page_size;
      width = std::max(width, num_pages);
      map[i] = (5 * i + 2) % std::max(n, 1);
      begin[i] = 7 * i + 3;
    }
    constexpr int kJunk = -77;
    qo_ = Ints::list(qo, 2, kJunk);
    len_ = Longs::list({kv_len.begin(), kv_len.end()}, 3, kJunk);
    rows_ = Ints::list(rows);
    begin_ = Longs::list({begin.begin(), begin.end()});
    pages_ = Ints::list(pages, 2, kJunk);
    indices_ = Ints::full({pages[n] + 1}, 9);
    last_ = Ints::list(last);
    map_ = Ints::list(map, 3, kJunk);
    table_ = Ints::full({std::max(n, 1), width}, 9);
    device.qo_indptr = on_gpu(qo_.view());
    host.qo_indptr = qo_.view();
    host.kv.kv_len = len_.view();
    switch (tables) {
      case Tables::kRaggedIndptr:
        device.kv.kv_indptr = on_gpu(rows_.view());
        host.kv.kv_indptr = rows_.view();
        break;
      case Tables::kRaggedBegin:
        device.kv.kv_begin = on_gpu(begin_.view());
        host.kv.kv_begin = begin_.view();
        break;
      case Tables::kCsr:
      case Tables::kCsrLastPage:
        device.kv.kv_page_indptr = host.kv.kv_page_indptr = on_gpu(pages_.view());
        device.kv.kv_page_indices = host.kv.kv_page_indices = on_gpu(indices_.view());
        if (tables == Tables::kCsrLastPage) device.kv.kv_last_page_len = on_gpu(last_.view());
        break;
      case Tables::kMapped:
        device.kv.request_map = host.kv.request_map = on_gpu(map_.view());
        [[fallthrough]];
      case Tables::kPadded:
        device.kv.block_table = host.kv.block_table = on_gpu(table_.view());
        break;
    }
    if (tables != Tables::kRaggedIndptr && tables != Tables::kCsrLastPage) {
      device.kv.kv_len = on_gpu(len_.view());
    }
  }
  Batch device, host;

 private:
  Ints qo_, rows_, pages_, indices_, last_, map_, table_;
  Longs len_, begin_;
};

struct Case {
  AttentionConfig config;
  PlanTarget target;
  int num_threads = 128;
};

Case make_case(Tables tables, int page_size, int group_size, int num_kv_heads, int num_ctas) {
  Case s;
  s.config.num_kv_heads = num_kv_heads;
  s.config.num_qo_heads = group_size * num_kv_heads;
  s.config.kv = tables == Tables::kRaggedIndptr || tables == Tables::kRaggedBegin
                    ? ragged_kv()
                    : paged_kv(page_size);
  s.config.device = kGpu;
  s.config.bounds = {.requests = 5000, .query_tokens = 5000, .keys = 200000, .max_q_len = 700};
  s.target.num_ctas = num_ctas;
  s.target.tile_kv = 64;
  s.target.group_size = group_size;
  s.target.num_kv_heads = num_kv_heads;
  s.target.num_shapes = 2;
  s.target.shapes[0] = {.tile_q = 32, .key_split = 1, .fixed_us = 6.7f, .us_per_key = 0.0138f};
  s.target.shapes[1] = {.tile_q = 16, .key_split = 2, .fixed_us = 1.0f, .us_per_key = 0.0175f};
  s.target.merge_us = 1.5f;
  s.target.min_split_keys = 256;
  s.target.max_partial_rows = 2 * num_ctas * 32;
  return s;
}

// Memory as the device has it: all NaN, and as much as was asked for.
struct DevicePlan {
  std::vector<char> memory, head;
  std::vector<unsigned> counters;
  PlanLengthsCall call;
  PlanView view;

  DevicePlan(const Case& s, const Batch& batch)
      : memory(cuda::device_plan_bytes(s.config, s.target) + 256, static_cast<char>(0xff)),
        head(cuda::head_bytes(s.target.num_ctas) + 256, static_cast<char>(0xff)),
        counters(kTickets + 5000 * s.config.num_kv_heads * 4 + 1, 7) {
    const auto aligned = [](std::vector<char>& bytes) {
      const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
      return reinterpret_cast<char*>((address + 255) / 256 * 256);
    };
    char* const head_at = aligned(head);
    call = cuda::plan_lengths_call(s.config, s.target, take_device_lengths(s.config, batch),
                                   aligned(memory), head_at, counters.data(), kTickets);
    emulate::mode.last_first = !emulate::mode.last_first;  // the next one in another order
    emulate::launch(1, s.num_threads, {0}, [&] { plan_lengths(call); });
    std::memcpy(&view, head_at, sizeof view);
  }
  CtaStart start(int cta) const { return call.starts[cta]; }
};

template <class T>
void expect_array(const char* name, const T* got, const std::vector<T>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(got[i] == want[i]) << name << "[" << i << "] of " << want.size();
  }
}

void expect_equal(const DevicePlan& got, const Plan& want, const FormatView& format) {
  const int num_items = static_cast<int>(want.items.size());
  ASSERT_EQ(got.view.num_tokens, want.num_tokens);
  ASSERT_EQ(got.view.queue_begin, num_items);
  ASSERT_EQ(got.view.queue_end, num_items);
  EXPECT_EQ(got.view.lists_per_head, want.lists_per_head);
  EXPECT_EQ(got.view.row_map, nullptr);
  EXPECT_EQ(got.view.token_mask, nullptr);
  expect_array("row_blocks", got.view.row_blocks, want.row_blocks);
  expect_array("items", got.view.items, want.items);
  expect_array("token_request", got.view.token_request, want.token_request);
  expect_array("token_position", got.view.token_position, want.token_position);
  const BlockTable table = format.tables[0].device_table;
  EXPECT_EQ(std::memcmp(&got.view.tables[0], &table, sizeof table), 0);
  if (want.merge_indptr.empty()) {
    EXPECT_EQ(got.view.merge_indptr, nullptr);
    EXPECT_EQ(got.view.merge_sources, nullptr);
  } else {
    ASSERT_NE(got.view.merge_indptr, nullptr);
    expect_array("merge_indptr", got.view.merge_indptr, want.merge_indptr);
    expect_array("merge_sources", got.view.merge_sources, want.merge_sources);
  }
  for (int cta = 0; cta < want.num_ctas; ++cta) {
    const CtaStart start = got.start(cta), first = cuda::cta_start(want, got.view, cta);
    const bool idle = want.cta_item_indptr[cta] == want.cta_item_indptr[cta + 1];
    ASSERT_EQ(start.item_end - start.item_begin, first.item_end - first.item_begin) << cta;
    if (idle) continue;
    ASSERT_EQ(start.item_begin, first.item_begin) << cta;
    ASSERT_EQ(start.item, first.item) << cta;
    ASSERT_EQ(start.block, first.block) << cta;
    ASSERT_EQ(std::memcmp(&start.table, &first.table, sizeof start.table), 0) << cta;
  }
  const std::size_t zeroed =
      kTickets + (want.merge_indptr.empty() ? 0 : want.merge_indptr.size() - 1);
  for (std::size_t i = 0; i < got.counters.size(); ++i) {
    ASSERT_EQ(got.counters[i], i < zeroed ? 0u : 7u) << "counter " << i;
  }
}

struct Seen {
  int plans = 0, split = 0, whole = 0;
};

void check(const Case& s, const std::vector<int>& q_len, const std::vector<int>& kv_len,
           Tables tables, int page_size, Seen* seen = nullptr) {
  const TwoBatches batch(q_len, kv_len, tables, page_size);
  FormatView format;
  make_view(s.config.kv, s.config.bounds, batch.host, kGpu, format);
  const Plan want =
      make_plan(format.view, s.config.variant.visible, s.target, Scheduler::kPrefixSum);
  const DevicePlan got(s, batch.device);
  expect_equal(got, want, format);
  if (seen == nullptr) return;
  ++seen->plans;
  (want.num_partial_rows > 0 ? seen->split : seen->whole) += 1;
}

std::vector<int> zipf(int n, std::mt19937& random) {
  std::vector<int> lengths(n);
  for (int& length : lengths)
    length = 1 + std::min(30000, 100000 / static_cast<int>(random() % 1000 + 1));
  return lengths;
}

// Decode, of batch sizes around what the threads and shared memory hold.
TEST(PlanLengthsEmulated, DecodeEqualsTheHost) {
  Seen seen;
  int i = 0;
  for (const int n : {0, 1, 2, 16, 127, 129, 257, 512, 513, 1023}) {
    for (const int num_ctas : {1, 132, 264}) {
      SCOPED_TRACE(concat("batch ", n, ", ", num_ctas, " CTAs"));
      std::mt19937 random(100 + i);
      const Tables tables = static_cast<Tables>(i++ % 6);
      Case s = make_case(tables, 16, 4, 8, num_ctas);
      if (num_ctas == 264) s.target.num_sms = 132;
      s.config.variant.visible = {.causal = 1};
      check(s, std::vector<int>(n, 1), zipf(n, random), tables, 16, &seen);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GE(seen.split, 10);
  EXPECT_GE(seen.whole, 3);
}

TEST(PlanLengthsEmulated, LargeBatches) {
  std::mt19937 random(7);
  for (const int num_threads : {384, kPlanLengthsThreads}) {
    Case s = make_case(Tables::kPadded, 16, 1, 2, 132);
    s.num_threads = num_threads;
    check(s, std::vector<int>(4096, 1), zipf(4096, random), Tables::kPadded, 16);
  }
  // As the GPU runs it; few heads, in pieces.
  Case s = make_case(Tables::kCsr, 16, 4, 8, 132);
  s.num_threads = kPlanLengthsThreads;
  check(s, std::vector<int>(16, 1), std::vector<int>(16, 1024), Tables::kCsr, 16);
  check(s, {1}, {131072}, Tables::kCsr, 16);
}

// Sizes around every tile, prefill beside decode, groups larger than a tile, windows and sinks.
TEST(PlanLengthsEmulated, AwkwardBatchesEqualTheHost) {
  Seen seen;
  for (int seed = 0; seed < 120; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](std::initializer_list<int> values) {
      return values.begin()[random() % values.size()];
    };
    const int n = pick({1, 2, 3, 7, 40}), page_size = pick({1, 3, 16, 200});
    const Tables tables = static_cast<Tables>(random() % 6);
    Case s = make_case(tables, page_size, pick({1, 2, 3, 4, 7, 16, 31, 40}), pick({1, 2, 8}),
                       pick({1, 3, 16, 132}));
    s.target.tile_kv = pick({16, 64, 128});
    s.target.min_split_keys = pick({0, 64, 256});
    s.target.num_shapes = pick({1, 2});
    if (random() % 3 == 0) s.target.num_sms = (s.target.num_ctas + 1) / 2;
    Visibility& visible = s.config.variant.visible;
    visible.causal = random() % 2;
    if (random() % 2) visible.window_left = pick({0, 15, 64, 300});
    if (random() % 2) visible.sink_tokens = pick({1, 64, 70});
    std::vector<int> q_len(n), kv_len(n);
    for (int& len : q_len) len = pick({0, 1, 1, 1, 2, 7, 8, 9, 31, 33, 127});
    for (int& len : kv_len) len = pick({0, 1, 63, 64, 65, 127, 129, 509, 997, 4099, 20011});
    SCOPED_TRACE(concat("seed ", seed, ": batch ", n, " group ", s.target.group_size, " heads ",
                        s.target.num_kv_heads, " CTAs ", s.target.num_ctas, " tables ",
                        static_cast<int>(tables)));
    check(s, q_len, kv_len, tables, page_size, &seen);
    if (HasFatalFailure()) return;
  }
  EXPECT_GE(seen.split, 30);
  EXPECT_GE(seen.whole, 10);
}

// An array of its own for each that the planner writes, exactly as long as the bounds say, with a
// guard behind it (and the sanitizers' behind that).
struct ArraysApart {
  static constexpr std::size_t kGuard = 64;
  std::deque<std::vector<char>> memory;

  template <class T>
  void move(T*& array, std::size_t size) {
    memory.emplace_back(size * sizeof(T) + kGuard, static_cast<char>(0x5a));
    array = reinterpret_cast<T*>(memory.back().data());
  }
  void expect_guards() const {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const std::vector<char>& bytes = memory[i];
      const auto changed =
          std::count_if(bytes.end() - kGuard, bytes.end(), [](char byte) { return byte != 0x5a; });
      ASSERT_EQ(changed, 0) << "behind array " << i;
    }
  }
};

// Values that no host has checked: nothing is written beyond any array of the plan, and every row
// and key that is named lies within the bounds.
TEST(PlanLengthsEmulated, WrongLengthsStayWithinTheBounds) {
  constexpr int kRequests = 40, kTokens = 50, kKeys = 700, kHeads = 2, kCtas = 7, kPage = 16;
  int with_parts = 0;
  for (int seed = 0; seed < 90; ++seed) {
    const Tables tables = static_cast<Tables>(seed % 6);
    SCOPED_TRACE(concat("seed ", seed, ", tables ", static_cast<int>(tables)));
    std::mt19937 random(seed);
    const int group_size = seed % 4 == 3 ? 40 : 4;  // larger than a tile
    Case s = make_case(tables, kPage, group_size, kHeads, kCtas);
    s.config.bounds = {
        .requests = kRequests, .query_tokens = kTokens, .keys = kKeys, .max_q_len = 9};
    // Small values, any values, and (every other seed) those that ascend.
    const auto values = [&](int n, int most) {
      std::vector<int> list(n);
      for (int& value : list) {
        value = static_cast<int>(random() % 4 == 0 ? random() : random() % most);
      }
      if (seed / 6 % 2) std::sort(list.begin(), list.end());
      return list;
    };
    Ints qo = Ints::list(values(kRequests + 1, 60)), rows = Ints::list(values(kRequests + 1, 9000)),
         pages = Ints::list(values(kRequests + 1, 900)), len = Ints::list(values(kRequests, 900)),
         last = Ints::list(values(kRequests, 20)), begin = Ints::list(values(kRequests, 900)),
         indices = Ints::full({30}, 0), table = Ints::full({kRequests, 50}, 0);
    Batch batch;
    batch.qo_indptr = on_gpu(qo.view());
    KvTables& kv = batch.kv;
    if (tables != Tables::kRaggedIndptr && tables != Tables::kCsrLastPage) {
      kv.kv_len = on_gpu(len.view());
    }
    switch (tables) {
      case Tables::kRaggedIndptr:
        kv.kv_indptr = on_gpu(rows.view());
        break;
      case Tables::kRaggedBegin:
        kv.kv_begin = on_gpu(begin.view());
        break;
      case Tables::kCsrLastPage:
        kv.kv_last_page_len = on_gpu(last.view());
        [[fallthrough]];
      case Tables::kCsr:
        kv.kv_page_indptr = on_gpu(pages.view());
        kv.kv_page_indices = on_gpu(indices.view());
        break;
      case Tables::kMapped:
        kv.request_map = on_gpu(begin.view());
        [[fallthrough]];
      case Tables::kPadded:
        kv.block_table = on_gpu(table.view());
        break;
    }
    PlanView head;
    std::vector<CtaStart> starts(kCtas);
    std::vector<unsigned> counters(kTickets + kTokens * kHeads * 4 + 1, 7);
    PlanLengthsCall call =
        cuda::plan_lengths_call(s.config, s.target, take_device_lengths(s.config, batch), nullptr,
                                nullptr, counters.data(), kTickets);
    call.head = &head;
    call.starts = starts.data();
    const int tile_q = s.target.shapes[0].tile_q, per_head = lists_per_head(tile_q, group_size);
    const int lists = kTokens * kHeads * per_head;
    const int tiles = group_size > tile_q ? num_row_tiles(kTokens, tile_q, group_size)
                                          : num_row_tiles(kTokens, tile_q, group_size) + kRequests;
    const int tokens_of_tile = std::max(rows_per_tile(tile_q, group_size) / group_size, 1);
    ArraysApart apart;
    apart.move(call.row_blocks, kRequests);
    apart.move(call.items, tiles + 3 * kCtas);
    apart.move(call.token_request, kTokens);
    apart.move(call.token_position, kTokens);
    apart.move(call.merge_indptr, lists + 1);
    apart.move(call.merge_sources, 2 * kCtas * (tokens_of_tile + 1));
    apart.move(call.tile_end_ps, tiles);
    apart.move(call.block_tile_end, kRequests);
    emulate::launch(1, s.num_threads, {0}, [&] { plan_lengths(call); });

    apart.expect_guards();
    if (HasFatalFailure()) return;
    ASSERT_GE(head.num_tokens, 0);
    ASSERT_LE(head.num_tokens, kTokens);
    ASSERT_GE(head.queue_begin, 0);
    ASSERT_LE(head.queue_begin, tiles + 3 * kCtas);
    for (int i = 0; i < head.queue_begin; ++i) {
      const WorkItem& item = head.items[i];
      ASSERT_GE(item.row_block, 0);
      ASSERT_LT(item.row_block, kRequests);
      const RowBlock& block = head.row_blocks[item.row_block];
      ASSERT_GE(block.first_token, 0);
      const int tokens = (item.first_row + item.num_rows + group_size - 1) / group_size;
      ASSERT_LE(block.first_token + tokens, kTokens);
      ASSERT_GE(item.kv_begin, 0);
      ASSERT_LE(item.kv_end, kKeys);
      ASSERT_LE(item.kv_head_begin + item.num_heads, kHeads);
      ASSERT_LT(item.partial_row, s.target.max_partial_rows);
    }
    if (head.merge_indptr != nullptr) {
      ++with_parts;
      const int* const ends = head.merge_indptr;
      ASSERT_EQ(ends[0], 0);
      ASSERT_TRUE(std::is_sorted(ends, ends + head.num_tokens * kHeads * per_head + 1));
      ASSERT_LE(ends[head.num_tokens * kHeads * per_head], 2 * kCtas * tokens_of_tile);
    }
    for (std::size_t i = kTickets + lists; i < counters.size(); ++i) {
      ASSERT_EQ(counters[i], 7u);
    }
  }
  EXPECT_GE(with_parts, 20);
}

}  // namespace
}  // namespace plait::test
