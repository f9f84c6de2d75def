#include "cuda/tensor_maps.h"

#include "plait/error.h"

namespace plait::cuda {
namespace {

constexpr std::size_t kMaxEntries = 512;  // K and V of 256 layers

TensorMap encode(const char* name, const void* address, Dtype dtype, int head_dim, int num_kv_heads,
                 i64 num_rows, const KvStrides& stride, int box_rows) {
  const std::uint64_t dims[3] = {static_cast<std::uint64_t>(head_dim),
                                 static_cast<std::uint64_t>(num_kv_heads),
                                 static_cast<std::uint64_t>(num_rows)};
  // The stride of a dimension with one element is never used, but is checked by the driver.
  const i64 row_bytes = head_dim * 2;
  const std::uint64_t strides[2] = {
      static_cast<std::uint64_t>(num_kv_heads > 1 ? stride.head * 2 : row_bytes),
      static_cast<std::uint64_t>(num_rows > 1 ? stride.token * 2 : row_bytes)};
  const std::uint32_t box[3] = {64, 1, static_cast<std::uint32_t>(box_rows)};
  const std::uint32_t element_strides[3] = {1, 1, 1};
  TensorMap map;
  // No L2 promotion: it costs 4 to 5 % of the bandwidth (measured on an H200).
  const int error = driver().TensorMapEncodeTiled(
      &map, dtype == Dtype::kBfloat16 ? kTensorMapBfloat16 : kTensorMapFloat16, 3,
      const_cast<void*>(address), dims, strides, box, element_strides, kInterleaveNone,
      kSwizzle128B, kL2None, kOobZero);
  check(error == kSuccess, "run: ", name, " at ", address, " with ", num_rows, " rows, ",
        num_kv_heads, " heads of ", head_dim, " elements, strides (", stride.token, ", ",
        stride.head,
        ") elements cannot be read by TMA (strides must be positive, rows < 2^32); "
        "kernel=\"plain\" takes it");
  return map;
}

}  // namespace

const TensorMap& TensorMapCache::get(const char* name, const void* address, Dtype dtype,
                                     int head_dim, int num_kv_heads, i64 num_rows,
                                     const KvStrides& stride, int box_rows) {
  for (const Entry& entry : entries_) {
    if (entry.address == address && entry.num_rows == num_rows &&
        entry.stride_token == stride.token && entry.stride_head == stride.head) {
      return entry.map;
    }
  }
  Entry entry{address, num_rows, stride.token, stride.head, {}};
  entry.map = encode(name, address, dtype, head_dim, num_kv_heads, num_rows, stride, box_rows);
  if (entries_.size() < kMaxEntries) {
    entries_.push_back(entry);
    return entries_.back().map;
  }
  Entry& oldest = entries_[next_];
  next_ = (next_ + 1) % kMaxEntries;
  oldest = entry;
  return oldest.map;
}

}  // namespace plait::cuda
