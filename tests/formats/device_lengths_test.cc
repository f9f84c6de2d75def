// Lengths on the device: what take_device_lengths() refuses, by name. What it takes is compared
// with the host's view in tests/cuda/plan_lengths_emulated_test.cc. "Device" arrays are host
// memory.
#include "formats/device_lengths.h"

#include <gtest/gtest.h>

#include "formats/tensors.h"

namespace plait::test {
namespace {

TensorView on_gpu(TensorView view, int id = 0) {
  view.device_type = kCuda;
  view.device_id = id;
  return view;
}

class DeviceLengthsRefusals : public ::testing::Test {
 protected:
  DeviceLengthsRefusals() {
    config.num_qo_heads = config.num_kv_heads = 1;
    config.bounds = {.requests = 3, .query_tokens = 8, .keys = 100};
    config.device = {kCuda, 0};
    config.kv = paged_kv(16);
    batch.qo_indptr = on_gpu(qo.view());
    batch.kv.kv_len = on_gpu(len.view());
    batch.kv.block_table = on_gpu(table.view());
  }
  std::string plan() {
    return refusal([&] { take_device_lengths(config, batch); });
  }
  void use_csr() {
    batch.kv = {};
    batch.kv.kv_len = on_gpu(len.view());
    batch.kv.kv_page_indptr = on_gpu(pages.view());
    batch.kv.kv_page_indices = on_gpu(indices.view());
  }
  void use_ragged() {
    config.kv = ragged_kv();
    batch.kv = {};
    batch.kv.kv_indptr = on_gpu(rows.view());
  }
  Ints qo = Ints::list({0, 1, 2, 3}), len = Ints::list({5, 6, 7}),
       rows = Ints::list({0, 5, 11, 18});
  Ints pages = Ints::list({0, 1, 2, 3}), indices = Ints::list({0, 1, 2});
  Ints table = Ints::full({3, 2}, 0);
  AttentionConfig config;
  Batch batch;
};

TEST_F(DeviceLengthsRefusals, TakesEachFormOnce) {
  EXPECT_EQ(plan(), "");
  use_csr();
  EXPECT_EQ(plan(), "");
  use_ragged();
  EXPECT_EQ(plan(), "");
}

TEST_F(DeviceLengthsRefusals, ArraysOfTheHost) {
  constexpr char kHow[] =
      " is on the cpu, but qo_indptr is on cuda:0; give all index arrays there, or all lengths on "
      "the cpu";
  batch.kv.kv_len = len.view();
  EXPECT_EQ(plan(), std::string("plan: kv_len") + kHow);
  batch.kv.kv_len = on_gpu(len.view());
  batch.kv.block_table = table.view();
  EXPECT_EQ(plan(), std::string("plan: block_table") + kHow);
  batch.kv.block_table = on_gpu(table.view());
  batch.kv.request_map = len.view();
  EXPECT_EQ(plan(), std::string("plan: request_map") + kHow);
  batch.kv.request_map = {};
  batch.qo_indptr = on_gpu(qo.view(), 1);
  EXPECT_EQ(plan(),
            "plan: qo_indptr is on cuda:1, but the work is on cuda:0; give it there or on the cpu");
}

TEST_F(DeviceLengthsRefusals, SizesAndMissingArrays) {
  Ints four = Ints::list({1, 2, 3, 4}), five = Ints::list({0, 1, 2, 3, 4}), none = Ints::list({});
  batch.kv.kv_len = on_gpu(four.view());
  EXPECT_EQ(plan(), "plan: kv_len has 4 entries; it must have 3 (one entry a request)");
  batch.kv.kv_len = {};
  EXPECT_EQ(plan(), "plan: kv_len is missing; block_table needs it");
  batch.qo_indptr = on_gpu(five.view());
  EXPECT_EQ(plan(), "plan: qo_indptr has 5 entries, so 4 requests; bounds.requests is 3");
  batch.qo_indptr = on_gpu(none.view());
  EXPECT_EQ(plan(),
            "plan: qo_indptr has no entries; it must have one more than there are requests");
  batch.qo_indptr = on_gpu(qo.view());
  Ints narrow = Ints::full({2, 2}, 0);
  batch.kv.kv_len = on_gpu(len.view());
  batch.kv.block_table = on_gpu(narrow.view());
  EXPECT_EQ(plan(),
            "plan: block_table has 2 rows, but there are 3 requests; give a row for each, "
            "or request_map");
  use_csr();
  batch.kv.kv_len = {};
  EXPECT_EQ(plan(), "plan: kv_len is missing; give kv_len or kv_last_page_len");
  batch.kv = {};
  EXPECT_EQ(plan(),
            "plan: kv_page_indptr is missing; paged K and V need kv_page_indptr and "
            "kv_page_indices, or block_table");
  use_ragged();
  batch.kv = {};
  EXPECT_EQ(plan(),
            "plan: kv_indptr is missing; ragged K and V need kv_indptr, or kv_begin and "
            "kv_len");
}

TEST_F(DeviceLengthsRefusals, LengthsThatCannotBeCompared) {
  use_csr();
  batch.kv.kv_last_page_len = on_gpu(len.view());
  EXPECT_EQ(plan(),
            "plan: kv_len and kv_last_page_len are both given, and on the device they "
            "cannot be compared; give one");
  use_ragged();
  batch.kv.kv_len = on_gpu(len.view());
  EXPECT_EQ(plan(),
            "plan: kv_len is given, but kv_indptr says the same, and on the device they "
            "cannot be compared");
  use_ragged();
  batch.kv.block_table = on_gpu(table.view());
  EXPECT_EQ(plan(), "plan: block_table is given, but it has no meaning for ragged K and V");
}

TEST_F(DeviceLengthsRefusals, WhatTheHostPlans) {
  constexpr char kHow[] = "; pass the lengths (qo_indptr too) on the host";
  config.scheduler = Scheduler::kUnsplit;
  EXPECT_EQ(plan(), std::string("plan: qo_indptr is on the device, where the scheduler is "
                                "'prefix_sum', but the attention was made with 'unsplit'") +
                        kHow);
  config.scheduler = Scheduler::kPrefixSum;
  batch.q_positions = qo.view();
  EXPECT_EQ(plan(), std::string("plan: qo_indptr is on the device, but q_positions are planned on "
                                "the host") +
                        kHow);
  batch.q_positions = {};
  batch.mask.first_masked_key = len.view();
  EXPECT_EQ(plan(), std::string("plan: qo_indptr is on the device, but a custom mask is planned on "
                                "the host") +
                        kHow);
  batch.mask = {};
  config.kv = composed_kv(paged_kv(16), 2);
  EXPECT_EQ(plan(), std::string("plan: qo_indptr is on the device, but a composed format is "
                                "planned on the host") +
                        kHow);
}

}  // namespace
}  // namespace plait::test
