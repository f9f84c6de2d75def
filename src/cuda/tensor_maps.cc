#include "cuda/tensor_maps.h"

#include <numeric>

#include "plait/error.h"

namespace plait::cuda {
namespace {

constexpr std::size_t kMaxEntries = 512;  // K and V of 256 layers

TensorMap encode(const char* name, const void* address, Dtype dtype, const KvMapShape& shape) {
  const std::uint32_t element_strides[4] = {1, 1, 1, 1};
  TensorMap map;
  // No L2 promotion: it costs 4 to 5 % of the bandwidth (measured on an H200).
  const bool bytes = shape.element_bytes == 1;
  const int error = driver().TensorMapEncodeTiled(
      &map,
      bytes                       ? kTensorMapUint8
      : dtype == Dtype::kBfloat16 ? kTensorMapBfloat16
                                  : kTensorMapFloat16,
      4, const_cast<void*>(address), shape.dims, shape.stride_bytes, shape.box, element_strides,
      kInterleaveNone, bytes ? kSwizzleNone : kSwizzle128B, kL2None, kOobZero);
  check(error == kSuccess, "run: ", name, " at ", address, ", ", shape.dims[3], " x ",
        shape.dims[2], " heads x ", shape.dims[1], " rows of ", shape.dims[0],
        " elements, strides (", shape.stride_bytes[2], ", ", shape.stride_bytes[1], ", ",
        shape.stride_bytes[0],
        ") bytes, cannot be read by TMA (strides must be positive and < 2^40, rows and pages < "
        "2^32); kernel=\"plain\" takes it");
  return map;
}

}  // namespace

KvMapShape kv_map_shape(int head_dim, int num_kv_heads, i64 num_blocks, int page_size,
                        const KvStrides& stride, int box_rows, int element_bytes) {
  const i64 rows = page_size == 0 ? num_blocks : page_size;
  const i64 pages = page_size == 0 ? 1 : num_blocks;
  // The stride of a dimension with one element is never used, but is checked by the driver.
  const auto bytes = [&](i64 count, i64 elements) {
    return static_cast<std::uint64_t>(element_bytes * (count > 1 ? elements : head_dim));
  };
  return {{static_cast<std::uint64_t>(head_dim), static_cast<std::uint64_t>(rows),
           static_cast<std::uint64_t>(num_kv_heads), static_cast<std::uint64_t>(pages)},
          {bytes(rows, stride.token), bytes(num_kv_heads, stride.head), bytes(pages, stride.block)},
          {static_cast<std::uint32_t>(element_bytes == 1 ? head_dim : 64),
           static_cast<std::uint32_t>(box_rows), 1, 1},
          element_bytes};
}

int box_rows_of(int page_size, int tile_kv) { return std::gcd(page_size, tile_kv); }

const TensorMap& TensorMapCache::get(const char* name, const void* address, Dtype dtype,
                                     const KvMapShape& shape) {
  for (const Entry& entry : entries_) {
    if (entry.address == address && entry.shape == shape) return entry.map;
  }
  const Entry entry{address, shape, encode(name, address, dtype, shape)};
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
