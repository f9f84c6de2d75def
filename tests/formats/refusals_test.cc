// Every malformed batch gets one error that names the array, the place and the value.
#include <gtest/gtest.h>

#include "formats/tensors.h"
#include "formats/view.h"

namespace plait {
namespace {

using test::Floats;
using test::Ints;
using test::Longs;

const Device kHost{kCpu, 0};
const Device kGpu{kCuda, 0};

class Refusals : public ::testing::Test {
 protected:
  KvFormat format = paged_kv(16);
  Bounds bounds{4, 32, 128};
  Device device = kHost;
  Ints qo = Ints::list({0, 1, 3, 3});
  Ints indptr = Ints::list({0, 2, 3, 3});
  Ints indices = Ints::list({7, 3, 5});
  Ints last = Ints::list({4, 16, 0});
  Ints len = Ints::list({20, 16, 0});
  Ints table = Ints::full({3, 4}, 2);
  Ints begin = Ints::list({0, 50, 20});
  Batch batch;

  void SetUp() override {
    batch.qo_indptr = qo.view();
    use_csr();
  }
  void use_csr() {
    batch.kv = {};
    batch.kv.kv_page_indptr = indptr.view();
    batch.kv.kv_page_indices = indices.view();
    batch.kv.kv_last_page_len = last.view();
  }
  void use_table() {
    batch.kv = {};
    batch.kv.block_table = table.view();
    batch.kv.kv_len = len.view();
  }
  void use_ragged() {
    format = ragged_kv();
    batch.kv = {};
    batch.kv.kv_begin = begin.view();
    batch.kv.kv_len = len.view();
  }
  std::string plan() {
    return test::refusal([&] {
      FormatView view;
      make_view(format, bounds, batch, device, view);
    });
  }
  static TensorView on_gpu(TensorView view, int id = 0) {
    view.device_type = kCuda;
    view.device_id = id;
    return view;
  }
};

TEST_F(Refusals, NoneOfTheGoodOnes) {
  EXPECT_EQ(plan(), "");
  use_table();
  EXPECT_EQ(plan(), "");
  use_ragged();
  EXPECT_EQ(plan(), "");
}

TEST_F(Refusals, Queries) {
  batch.qo_indptr = {};
  EXPECT_EQ(plan(), "plan: qo_indptr is missing");
  qo = Ints::list({1, 2, 3, 3});
  batch.qo_indptr = qo.view();
  EXPECT_EQ(plan(), "plan: qo_indptr[0] is 1; it must be 0");
  qo = Ints::list({0, 2, 1, 3});
  batch.qo_indptr = qo.view();
  EXPECT_EQ(plan(), "plan: qo_indptr[2] is 1, less than the 2 before it (request 1)");
  qo = Ints::list({0, 1, 33, 33});
  batch.qo_indptr = qo.view();
  EXPECT_EQ(plan(), "plan: qo_indptr[2] is 33; bounds.query_tokens is 32");
  bounds.max_q_len = 1;
  qo = Ints::list({0, 1, 3, 3});
  batch.qo_indptr = qo.view();
  EXPECT_EQ(plan(), "plan: qo_indptr[2] - qo_indptr[1] is 2; bounds.max_q_len is 1");
  bounds.max_q_len = 0;
  bounds.requests = 2;
  EXPECT_EQ(plan(), "plan: qo_indptr has 4 entries, so 3 requests; bounds.requests is 2");
  bounds.requests = 4;
  qo = Ints::list({0, 1, 3});
  batch.qo_indptr = qo.view();
  EXPECT_EQ(
      plan(),
      "plan: kv_page_indptr has 4 entries; it must have 3 (one more than there are requests or "
      "nodes)");
  qo = Ints::list({});
  batch.qo_indptr = qo.view();
  EXPECT_EQ(plan(),
            "plan: qo_indptr has no entries; it must have one more than there are requests");
}

TEST_F(Refusals, DtypesShapesDevices) {
  Floats floats = Floats::full({4}, 0);
  batch.qo_indptr = floats.view();
  EXPECT_EQ(plan(), "plan: qo_indptr is float32[4] on cpu; index arrays are int32 or int64");
  batch.qo_indptr = table.view();
  EXPECT_EQ(plan(), "plan: qo_indptr is int32[3, 4] on cpu; it must be 1-D");
  TensorView scalar = qo.view();
  scalar.ndim = 0;
  batch.qo_indptr = scalar;
  EXPECT_EQ(plan(), "plan: qo_indptr is a scalar (0-d); it must be 1-D");
  device = kGpu;
  const std::string where =
      " on the host (lengths of flat formats may be on the device if qo_indptr and all tables are)";
  batch.qo_indptr = qo.view();
  batch.kv.kv_last_page_len = on_gpu(last.view());
  EXPECT_EQ(plan(), "plan: kv_last_page_len is on the device; pass kv_last_page_len" + where);
  use_table();
  batch.kv.kv_len = on_gpu(len.view());
  EXPECT_EQ(plan(), "plan: kv_len is on the device; pass kv_len" + where);
  use_table();
  batch.kv.block_table = on_gpu(table.view(), 1);
  EXPECT_EQ(
      plan(),
      "plan: block_table is on cuda:1, but the work is on cuda:0; give it there or on the cpu");
  use_table();
  batch.kv.block_table = len.view();
  EXPECT_EQ(plan(), "plan: block_table is int32[3] on cpu; it must be 2-D: [rows, max blocks]");
  use_csr();
  TensorView null = indices.view();
  null.data = nullptr;
  batch.kv.kv_page_indices = null;
  EXPECT_EQ(plan(), "plan: kv_page_indices is int32[3] on cpu but its pointer is null");
  TensorView odd = indices.view();
  odd.byte_offset = 1;
  batch.kv.kv_page_indices = odd;
  EXPECT_EQ(plan(), "plan: kv_page_indices is not aligned to its 4-byte elements");
}

TEST_F(Refusals, PageTables) {
  for (const int bad : {17, -1}) {
    last = Ints::list({4, bad, 0});
    use_csr();
    EXPECT_EQ(plan(), concat("plan: kv_last_page_len[1] is ", bad,
                             "; it must be 1 ... 16 (page_size), as request 1 has 1 pages"));
  }
  last = Ints::list({0, 16, 0});
  use_csr();
  EXPECT_EQ(plan(),
            "plan: kv_last_page_len[0] is 0; it must be 1 ... 16 (page_size), as request 0 has 2 "
            "pages");
  last = Ints::list({4, 16, 1});
  use_csr();
  EXPECT_EQ(plan(), "plan: kv_last_page_len[2] is 1; it must be 0, as request 2 has no pages");
  last = Ints::list({4, 16, 0});
  indptr = Ints::list({0, 2, 1, 3});
  use_csr();
  EXPECT_EQ(plan(), "plan: kv_page_indptr[2] is 1, less than the 2 before it (request 1)");
  indptr = Ints::list({1, 2, 3, 3});
  use_csr();
  EXPECT_EQ(plan(), "plan: kv_page_indptr[0] is 1; it must be 0");
  indptr = Ints::list({0, 2, 4, 4});
  use_csr();
  EXPECT_EQ(plan(), "plan: kv_page_indptr[2] is 4, but kv_page_indices has 3 entries (request 1)");
  indptr = Ints::list({0, 2, 3, 3});
  indices = Ints::list({7, -3, 5});
  use_csr();
  EXPECT_EQ(plan(), "plan: kv_page_indices[1] is -3; page ids are >= 0 (request 0)");
  Longs wide = Longs::list({7, 3, 1LL << 31});
  batch.kv.kv_page_indices = wide.view();
  EXPECT_EQ(plan(),
            "plan: kv_page_indices[2] is 2147483648; page ids are less than 2^31 (request 1)");
  indices = Ints::list({7, 3, 5});
  use_csr();
  len = Ints::list({20, 15, 0});
  batch.kv.kv_len = len.view();
  EXPECT_EQ(plan(),
            "plan: kv_len[1] is 15, but kv_last_page_len gives request 1 16 keys; give one of the "
            "two");
  batch.kv.kv_last_page_len = {};
  len = Ints::list({20, 17, 0});
  EXPECT_EQ(plan(),
            "plan: kv_len[1] is 17, which takes 2 pages of 16, but kv_page_indptr gives request 1 "
            "only 1");
  use_table();
  len = Ints::list({20, 65, 0});
  EXPECT_EQ(
      plan(),
      "plan: kv_len[1] is 65, which takes 5 pages of 16, but block_table gives request 1 only "
      "4");
  len = Ints::list({20, 16, 0});
  table[5] = -4;  // row 1, column 1: past the one page of request 1
  EXPECT_EQ(plan(), "");
  table[4] = -4;
  EXPECT_EQ(plan(), "plan: block_table[1, 0] is -4; page ids are >= 0 (request 1)");
  table[4] = 2;
  Ints map = Ints::list({0, 3, 1});
  batch.kv.request_map = map.view();
  EXPECT_EQ(plan(), "plan: request_map[1] is 3, but block_table has 3 rows");
  Ints two_rows = Ints::full({2, 4}, 0);
  batch.kv.request_map = {};
  batch.kv.block_table = two_rows.view();
  EXPECT_EQ(plan(),
            "plan: block_table has 2 rows, but there are 3 requests; give a row for each, or "
            "request_map");
}

TEST_F(Refusals, Lengths) {
  use_table();
  len = Ints::list({20, -1, 0});
  EXPECT_EQ(plan(), "plan: kv_len[1] is -1; lengths are 0 ... 128 (bounds.keys)");
  len = Ints::list({20, 129, 0});
  EXPECT_EQ(plan(), "plan: kv_len[1] is 129; lengths are 0 ... 128 (bounds.keys)");
  Longs wide = Longs::list({20, 1LL << 40, 0});
  batch.kv.kv_len = wide.view();
  EXPECT_EQ(plan(), "plan: kv_len[1] is 1099511627776; lengths are 0 ... 128 (bounds.keys)");
  bounds.total_pages = 2;
  use_csr();
  EXPECT_EQ(plan(), "plan: the host page tables have 3 entries; bounds.total_pages is 2");
}

TEST_F(Refusals, RaggedArrays) {
  use_ragged();
  begin = Ints::list({0, -5, 0});
  EXPECT_EQ(plan(), "plan: kv_begin[1] is -5; rows of K and V are 0 ... 281474976710656");
  batch.kv.kv_len = {};
  EXPECT_EQ(plan(), "plan: kv_len is missing; kv_begin needs it");
  batch.kv = {};
  EXPECT_EQ(plan(),
            "plan: kv_indptr is missing; ragged K and V need kv_indptr, or kv_begin and kv_len");
  Ints ptr = Ints::list({0, 3, 2, 9});
  batch.kv.kv_indptr = ptr.view();
  EXPECT_EQ(plan(), "plan: kv_indptr[2] is 2, less than the 3 before it (request 1)");
  ptr = Ints::list({2, 3, 4, 9});
  EXPECT_EQ(
      plan(),
      "plan: kv_indptr[0] is 2; it must be 0 (for rows that start elsewhere give kv_begin and "
      "kv_len)");
  ptr = Ints::list({0, 3, 3, 200});
  EXPECT_EQ(plan(),
            "plan: kv_indptr[3] - kv_indptr[2] is 197; lengths are 0 ... 128 (bounds.keys)");
}

TEST_F(Refusals, ArraysWithoutMeaning) {
  batch.kv.request_map = len.view();
  EXPECT_EQ(plan(), "plan: request_map is given, but it has no meaning without block_table");
  use_table();
  batch.kv.kv_last_page_len = last.view();
  EXPECT_EQ(plan(), "plan: kv_last_page_len is given, but it has no meaning beside block_table");
  use_table();
  batch.kv.kv_page_indptr = indptr.view();
  EXPECT_EQ(plan(), "plan: kv_page_indptr is given, but it has no meaning beside block_table");
  use_csr();
  batch.kv.kv_begin = begin.view();
  EXPECT_EQ(plan(), "plan: kv_begin is given, but it has no meaning for paged K and V");
  use_ragged();
  batch.kv.block_table = table.view();
  EXPECT_EQ(plan(), "plan: block_table is given, but it has no meaning for ragged K and V");
  use_ragged();
  batch.levels.resize(1);
  EXPECT_EQ(plan(),
            "plan: levels are given, but the format has one level; give the tables themselves");
}

TEST_F(Refusals, Missing) {
  batch.kv = {};
  EXPECT_EQ(
      plan(),
      "plan: kv_page_indptr is missing; paged K and V need kv_page_indptr and kv_page_indices, "
      "or block_table");
  batch.kv.kv_page_indptr = indptr.view();
  EXPECT_EQ(plan(), "plan: kv_page_indices is missing");
  batch.kv.kv_page_indices = indices.view();
  EXPECT_EQ(plan(), "plan: kv_len is missing; give kv_len or kv_last_page_len");
  use_table();
  batch.kv.kv_len = {};
  EXPECT_EQ(plan(), "plan: kv_len is missing; block_table needs it");
  device = kGpu;
  use_csr();
  batch.kv.kv_page_indptr = on_gpu(indptr.view());
  EXPECT_EQ(plan(),
            "plan: kv_page_indptr is on cuda:0, but kv_page_indices is on the cpu; give "
            "kv_page_indptr on the cpu too");
  batch.kv.kv_page_indices = on_gpu(indices.view());
  EXPECT_EQ(
      plan(),
      "plan: kv_last_page_len is given, but lengths cannot be computed from a kv_page_indptr on "
      "the device; pass kv_len on the host instead");
  batch.kv.kv_last_page_len = {};
  EXPECT_EQ(plan(),
            "plan: kv_len is missing; a kv_page_indptr on the device needs it (on the host)");
  use_table();
  Ints map = Ints::list({0, 1, 2});
  batch.kv.request_map = on_gpu(map.view());
  EXPECT_EQ(
      plan(),
      "plan: request_map is on cuda:0, but block_table is on the cpu; give request_map on the "
      "cpu too");
}

class LevelRefusals : public Refusals {
 protected:
  Ints begin0 = Ints::list({0}), len0 = Ints::list({5}), nodes = Ints::list({0, 2}),
       requests = Ints::list({0, 2});
  void SetUp() override {
    format = composed_kv(ragged_kv(), 2);
    batch.qo_indptr = qo.view();
    batch.levels.resize(2);
    batch.levels[0].tables.kv_begin = begin0.view();
    batch.levels[0].tables.kv_len = len0.view();
    batch.levels[0].node_indptr = nodes.view();
    batch.levels[0].node_requests = requests.view();
    batch.levels[1].tables.kv_begin = begin.view();
    batch.levels[1].tables.kv_len = len.view();
  }
};

TEST_F(LevelRefusals, All) {
  EXPECT_EQ(plan(), "");
  requests = Ints::list({0, 0});
  EXPECT_EQ(plan(),
            "plan: levels[0].node_requests[1] is 0 again; a level takes each request at most once");
  requests = Ints::list({0, 3});
  EXPECT_EQ(plan(), "plan: levels[0].node_requests[1] is 3; the batch has 3 requests");
  requests = Ints::list({0, 2});
  nodes = Ints::list({0, 3});
  EXPECT_EQ(plan(),
            "plan: levels[0].node_requests has 2 entries; it must have 3 (the last entry of "
            "node_indptr)");
  nodes = Ints::list({0, 2});
  len0 = Ints::list({-2});
  EXPECT_EQ(plan(), "plan: levels[0].kv_len[0] is -2; lengths are 0 ... 128 (bounds.keys)");
  len0 = Ints::list({120});
  EXPECT_EQ(plan(), "plan: request 0 has 140 keys over its levels; bounds.keys is 128");
  len0 = Ints::list({5});
  batch.levels[0].node_indptr = {};
  EXPECT_EQ(plan(), "plan: levels[0].node_requests is given without node_indptr");
  batch.levels[0].node_indptr = nodes.view();
  // Under one node, the keys before it must be equally many.
  std::swap(batch.levels[0], batch.levels[1]);
  EXPECT_EQ(plan(),
            "plan: levels[1].node_requests[1] is 2, which has 0 keys in the levels before, but "
            "request 0 under the same node 0 has 20; they must be equal");
  batch.levels.resize(1);
  EXPECT_EQ(
      plan(),
      "plan: levels has 1 entries; the format has 2 levels; make the Attention with as many, or "
      "give empty ones (compose_radix gives as many as the format has)");
  batch.kv.kv_len = len.view();
  EXPECT_EQ(plan(), "plan: a composed format takes its tables in levels, one set a level");
}

TEST(Format, Refusals) {
  EXPECT_EQ(test::refusal([] { paged_kv(0); }), "paged_kv: page_size is 0; it must be >= 1");
  EXPECT_EQ(
      test::refusal([] { composed_kv(ragged_kv(), 9); }),
      "composed_kv: num_levels is 9; it must be 1 ... 8 (of a deeper tree compose_radix shares "
      "the nodes that save most)");
}

}  // namespace
}  // namespace plait
