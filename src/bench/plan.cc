// The figures of the planner for `plait bench plan` and `plait bench balance`.
#include "plait/plan.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>

#include "cuda/cost_model.h"
#include "formats/view.h"
#include "host_device/base.h"
#include "plait/bench.h"

namespace plait {
namespace {

constexpr int kGroupSize = 4, kNumKvHeads = 8, kPageSize = 16, kTileQ = 64;

// What the CUDA backend plans decode with on an H200: two CTAs a multiprocessor of the small sm90
// kernel, or one of the kernel that also takes prefill (the shape for few rows).
PlanTarget decode_target(int num_ctas) {
  const bool small = num_ctas > 132;
  const KernelCost& cost = small ? cuda::kSm90DecodeCost : cuda::kSm90MixedCost;
  const int shape = small ? 0 : 1;
  PlanTarget target;
  target.num_ctas = num_ctas;
  target.tile_kv = 64;
  target.group_size = kGroupSize;
  target.num_kv_heads = kNumKvHeads;
  target.num_shapes = 1;
  target.shapes[0] = {.tile_q = kTileQ,
                      .key_split = small ? 1 : 2,
                      .fixed_us = cost.fixed_us[shape],
                      .us_per_key = cost.us_per_key[shape]};
  target.merge_us = cost.merge_us;
  target.max_partial_rows = 2 * num_ctas * kTileQ;
  target.min_split_keys = cost.min_split_keys;
  target.num_sms = small ? 132 : 0;
  target.queue_percent = cuda::kQueuePercent;
  target.min_queued_keys = cuda::kMinQueuedKeys;
  target.min_keys_for_queue = cuda::kMinKeysForQueue;
  return target;
}

TensorView int_tensor(int* data, int ndim, int64_t* shape, const Device& device) {
  TensorView tensor;
  tensor.data = data;
  tensor.device_type = device.type;
  tensor.device_id = device.id;
  tensor.ndim = ndim;
  tensor.dtype_bits = 32;
  tensor.shape = shape;
  return tensor;
}

// One query token a request, over kv_len[i] keys.
BsrView decode_view(const std::vector<int>& kv_len) {
  BsrView view;
  view.num_requests = static_cast<int>(kv_len.size());
  i64 first_block = 0;
  for (int i = 0; i < view.num_requests; ++i) {
    view.row_blocks.push_back({.first_block = first_block,
                               .first_token = i,
                               .num_tokens = 1,
                               .kv_len = kv_len[i],
                               .kv_pos_begin = 0,
                               .level = 0});
    first_block += ceil_div(kv_len[i], kPageSize);
    view.token_request.push_back(i);
    view.token_position.push_back(kv_len[i] - 1);
  }
  return view;
}

// Modelled time of a batch in shares by prefix sums, over that of what the host would choose.
double prefix_sum_ratio(const std::vector<int>& kv_len, const PlanTarget& target) {
  const auto us = [&](Scheduler scheduler) {
    const Plan plan = make_plan(decode_view(kv_len), {.causal = 1}, target, scheduler);
    return static_cast<double>(plan.candidates[plan.chosen].makespan_us);
  };
  return us(Scheduler::kPrefixSum) / us(Scheduler::kAuto);
}

struct Times {
  double median_us, smallest_us;
};

template <class Work>
Times time_of(Work work) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> us;
  const Clock::time_point begin = Clock::now();
  const auto elapsed_us = [](Clock::time_point since) {
    return std::chrono::duration<double, std::micro>(Clock::now() - since).count();
  };
  for (int i = 0; i < 3; ++i) work();
  while (us.size() < 21 || (us.size() < 2001 && elapsed_us(begin) < 2e5)) {
    const Clock::time_point start = Clock::now();
    work();
    us.push_back(elapsed_us(start));
  }
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[0]};
}

}  // namespace

std::vector<BenchRow> bench_plan() {
  std::vector<BenchRow> rows;
  const Device device{kCuda, 0};  // where the page table is said to be; it is not read
  const KvFormat format = paged_kv(kPageSize);
  const Visibility causal{.causal = 1};
  for (const int num_ctas : {132, 264}) {
    const PlanTarget target = decode_target(num_ctas);
    for (const int num_requests : {1, 16, 256, 4096}) {
      std::vector<int> kv_len(num_requests), qo_indptr(num_requests + 1);
      std::iota(qo_indptr.begin(), qo_indptr.end(), 0);
      for (int i = 0; i < num_requests; ++i) kv_len[i] = 37 * i % 8000 + 1;
      int64_t n = num_requests, n_plus_1 = num_requests + 1;
      int64_t table_shape[2] = {num_requests, 8000 / kPageSize};
      Batch batch;
      batch.qo_indptr = int_tensor(qo_indptr.data(), 1, &n_plus_1, {});
      batch.kv.kv_len = int_tensor(kv_len.data(), 1, &n, {});
      batch.kv.block_table = int_tensor(kv_len.data(), 2, table_shape, device);  // any address
      const Bounds bounds{.requests = num_requests, .query_tokens = num_requests, .keys = 8000};

      FormatView view;
      Plan plan;
      const Times both = time_of([&] {
        make_view(format, bounds, batch, device, view);
        make_plan(view.view, causal, target, Scheduler::kAuto, plan);
      });
      const Times plan_only =
          time_of([&] { make_plan(view.view, causal, target, Scheduler::kAuto, plan); });
      const std::string name =
          "batch " + std::to_string(num_requests) + ", " + std::to_string(num_ctas) + " CTAs";
      rows.push_back({name, "view + plan, median", both.median_us, "us"});
      rows.push_back({name, "view + plan, smallest", both.smallest_us, "us"});
      rows.push_back({name, "plan alone, median", plan_only.median_us, "us"});
      rows.push_back({name, "balance", plan.balance(), "busiest / mean"});
    }
  }
  return rows;
}

std::vector<BenchRow> bench_balance() {
  const PlanTarget target = decode_target(132);
  double worst = 0, sum = 0, most_partial_tiles = 0;
  double few_ratios = 0, many_ratios = 0, unequal_ratios = 0, worst_ratio = 0;
  int worst_b = 0;
  for (int b = 1; b <= 64; ++b) {
    const Plan plan = make_plan(decode_view(std::vector<int>(b, 4096)), {.causal = 1}, target);
    sum += plan.balance();
    if (plan.balance() > worst) {
      worst = plan.balance();
      worst_b = b;
    }
    double partial_tiles = 0;
    for (const WorkItem& item : plan.items) {
      if (item.partial_row >= 0) partial_tiles += item.num_heads;
    }
    most_partial_tiles = std::max(most_partial_tiles, partial_tiles / target.num_ctas);
    const double few = prefix_sum_ratio(std::vector<int>(b, 4096), target);
    const double many = prefix_sum_ratio(std::vector<int>(64 + b, 4096), target);
    std::vector<int> unequal(16);  // of 1 / u, u even: a few long ones among short ones
    for (int i = 0; i < 16; ++i) unequal[i] = 100 + 100000 / (1 + (97 * b + 389 * i) % 1000);
    const double zipf = prefix_sum_ratio(unequal, target);
    few_ratios += few;
    many_ratios += many;
    unequal_ratios += zipf;
    worst_ratio = std::max({worst_ratio, few, many, zipf});
  }
  const std::string name = "b x 4096 keys, b = 1 ... 64, 132 CTAs";
  return {{name, "worst balance", worst, "busiest / mean"},
          {name, "worst at b", static_cast<double>(worst_b), "requests"},
          {name, "mean balance", sum / 64, "busiest / mean"},
          {name, "most partial tiles", most_partial_tiles, "a CTA"},
          {name, "prefix_sum, mean", few_ratios / 64, "modelled time / auto"},
          {"b x 4096 keys, b = 65 ... 128, 132 CTAs", "prefix_sum, mean", many_ratios / 64,
           "modelled time / auto"},
          {"64 times 16 unequal lengths, 132 CTAs", "prefix_sum, mean", unequal_ratios / 64,
           "modelled time / auto"},
          {"all of these", "prefix_sum, worst", worst_ratio, "modelled time / auto"}};
}

}  // namespace plait
