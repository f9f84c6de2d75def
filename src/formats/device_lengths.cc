#include "formats/device_lengths.h"

#include <algorithm>

#include "formats/index_array.h"
#include "formats/table_refusals.h"

namespace plait {
namespace {

constexpr char kOneEach[] = "one entry a request";
constexpr char kIndptrSize[] = "one more than there are requests";

// An array that is given has to be beside qo_indptr.
void check_beside_qo_indptr(bool on_cpu, const char* name, const Device& device) {
  if (!on_cpu) return;
  refuse("plan: ", name, " is on the cpu, but qo_indptr is on ", to_string(device),
         "; give all index arrays there, or all lengths on the cpu");
}
IndexArray take(const TensorView& tensor, const char* name, const Device& device) {
  IndexArray array(tensor, {"plan", name}, device);
  check_beside_qo_indptr(array.given() && array.on_host(), name, device);
  return array;
}
IndexView view_of(const IndexArray& array) {
  return {array.data(), array.stride(), array.index_bytes()};
}

void refuse_what_the_host_reads(const AttentionConfig& config, const Batch& batch) {
  constexpr char kHow[] = "; pass the lengths (qo_indptr too) on the host";
  if (config.kv.num_levels > 1 || !batch.levels.empty()) {
    refuse("plan: qo_indptr is on the device, but a composed format is planned on the host", kHow);
  }
  if (!batch.nodes.empty()) refuse("plan: nodes are given, but the format has one level");
  const MaskTables& mask = batch.mask;
  if (config.variant.custom_mask() || mask.packed.defined() || mask.bools.defined() ||
      mask.indptr.defined() || mask.first_masked_key.defined()) {
    refuse("plan: qo_indptr is on the device, but a custom mask is planned on the host", kHow);
  }
  if (batch.q_positions.defined()) {
    refuse("plan: qo_indptr is on the device, but q_positions are planned on the host", kHow);
  }
  if (config.scheduler == Scheduler::kLpt || config.scheduler == Scheduler::kUnsplit) {
    refuse(
        "plan: qo_indptr is on the device, where the scheduler is 'prefix_sum', but the "
        "attention was made with '",
        config.scheduler == Scheduler::kLpt ? "lpt" : "unsplit", "'", kHow);
  }
}

void take_ragged(const KvTables& tables, long long n, const Device& device, DeviceLengths& out) {
  const IndexArray indptr = take(tables.kv_indptr, "kv_indptr", device);
  if (indptr.given()) {
    constexpr char kWhy[] = "kv_indptr says the same, and on the device they cannot be compared";
    refuse_given(tables.kv_begin, {"plan", "kv_begin"}, kWhy);
    refuse_given(tables.kv_len, {"plan", "kv_len"}, kWhy);
    indptr.require_size(n + 1, kIndptrSize);
    out.kv_indptr = view_of(indptr);
    return;
  }
  const IndexArray begin = take(tables.kv_begin, "kv_begin", device);
  const IndexArray kv_len = take(tables.kv_len, "kv_len", device);
  if (!begin.given() || !kv_len.given()) {
    refuse("plan: ", begin.given() ? "kv_len" : "kv_indptr",
           " is missing; ragged K and V need kv_indptr, or kv_begin and kv_len");
  }
  begin.require_size(n, kOneEach);
  kv_len.require_size(n, kOneEach);
  out.kv_begin = view_of(begin);
  out.kv_len = view_of(kv_len);
}

void take_csr(const KvTables& tables, long long n, const Device& device, DeviceLengths& out) {
  const IndexArray indptr = take(tables.kv_page_indptr, "kv_page_indptr", device);
  const IndexArray indices = take(tables.kv_page_indices, "kv_page_indices", device);
  if (!indptr.given()) {
    refuse(
        "plan: kv_page_indptr is missing; paged K and V need kv_page_indptr and "
        "kv_page_indices, or block_table");
  }
  if (!indices.given()) refuse("plan: kv_page_indices is missing");
  indptr.require_size(n + 1, kIndptrSize);
  const IndexArray kv_len = take(tables.kv_len, "kv_len", device);
  const IndexArray last = take(tables.kv_last_page_len, "kv_last_page_len", device);
  if (kv_len.given() == last.given()) {
    refuse("plan: ", kv_len.given()
                         ? "kv_len and kv_last_page_len are both given, and on the device they "
                           "cannot be compared; give one"
                         : "kv_len is missing; give kv_len or kv_last_page_len");
  }
  if (kv_len.given()) {
    kv_len.require_size(n, kOneEach);
    out.kv_len = view_of(kv_len);
  } else {
    last.require_size(n, kOneEach);
    out.kv_last_page_len = view_of(last);
  }
  out.kv_indptr = view_of(indptr);
  if (indices.size() == 0) out.max_kv_len = 0;  // no pages: no keys, whatever the lengths say
  out.table.indices = indices.data();
  out.table.index_bytes = indices.index_bytes();
  out.table.stride_block = out.table.stride_list = indices.stride();
  out.table.list_begin = indptr.data();
  out.table.list_begin_bytes = indptr.index_bytes();
  out.stride_list = indptr.stride();
}

void take_padded(const KvTables& tables, long long n, const Device& device, DeviceLengths& out) {
  const TensorView& block_table = tables.block_table;
  check_block_table(block_table, {"plan", "block_table"}, device);
  check_beside_qo_indptr(block_table.on_cpu(), "block_table", device);
  const IndexArray kv_len = take(tables.kv_len, "kv_len", device);
  if (!kv_len.given()) refuse("plan: kv_len is missing; block_table needs it");
  kv_len.require_size(n, kOneEach);
  out.kv_len = view_of(kv_len);
  out.table.indices = block_table.bytes();
  out.table.index_bytes = block_table.dtype_bits / 8;
  out.table.stride_list = block_table.stride(0);
  out.table.stride_block = block_table.stride(1);
  const long long width = block_table.shape[1] * out.page_size;
  out.max_kv_len = static_cast<int>(std::min<long long>(out.max_kv_len, width));
  const IndexArray map = take(tables.request_map, "request_map", device);
  if (map.given()) {
    if (n > 0 && block_table.shape[0] == 0) {
      refuse("plan: block_table has 0 rows, but request_map names one for each of ", n,
             " requests");
    }
    map.require_size(n, kOneEach);
    out.table.list_begin = map.data();
    out.table.list_begin_bytes = map.index_bytes();
    out.stride_list = map.stride();
    return;
  }
  if (block_table.shape[0] < n) {
    refuse("plan: block_table has ", block_table.shape[0], " rows, but there are ", n,
           " requests; give a row for each, or request_map");
  }
  out.stride_list = block_table.stride(0);
}

}  // namespace

bool has_device_lengths(const Batch& batch) {
  return batch.qo_indptr.defined() && !batch.qo_indptr.on_cpu();
}

DeviceLengths take_device_lengths(const AttentionConfig& config, const Batch& batch) {
  const Device& device = config.device;
  const Bounds& bounds = config.bounds;
  const IndexArray qo_indptr(batch.qo_indptr, {"plan", "qo_indptr"}, device);
  refuse_what_the_host_reads(config, batch);
  const long long n = qo_indptr.size() - 1;
  if (n < 0) {
    refuse("plan: qo_indptr has no entries; it must have one more than there are requests");
  }
  if (n > bounds.requests) {
    refuse("plan: qo_indptr has ", n + 1, " entries, so ", n, " requests; bounds.requests is ",
           bounds.requests);
  }
  DeviceLengths out;
  out.qo_indptr = view_of(qo_indptr);
  out.num_requests = static_cast<int>(n);
  out.max_query_tokens = bounds.query_tokens;
  out.max_q_len = bounds.longest_q();
  out.max_kv_len = bounds.keys;
  refuse_unread_tables(batch.kv, config.kv, "plan");
  if (config.kv.kind == KvFormat::kRagged) {
    take_ragged(batch.kv, n, device, out);
    return out;
  }
  out.page_size = config.kv.page_size;
  if (batch.kv.block_table.defined()) {
    take_padded(batch.kv, n, device, out);
  } else {
    take_csr(batch.kv, n, device, out);
  }
  return out;
}

}  // namespace plait
