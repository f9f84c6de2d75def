// Tensor maps (TMA) of K and V, made once a pointer and shape.
#pragma once
#include <vector>

#include "cuda/driver.h"
#include "host_device/config.h"

namespace plait::cuda {

// What a map says of a tensor of 16-bit elements, or of 8 bits. Dimensions (head_dim, row in page,
// kv head, page), the first one dense; an affine tensor is one page. Box {64, box_rows, 1, 1},
// 128-byte swizzle; of 8 bits {head_dim, box_rows, 1, 1} without one. Zeros outside.
struct KvMapShape {
  std::uint64_t dims[4];
  std::uint64_t stride_bytes[3];  // of dimensions 1, 2 and 3
  std::uint32_t box[4];
  int element_bytes;
  bool operator==(const KvMapShape&) const = default;
};
// num_blocks: pages, affine: rows. page_size: 0 where affine.
KvMapShape kv_map_shape(int head_dim, int num_kv_heads, i64 num_blocks, int page_size,
                        const KvStrides& stride, int box_rows, int element_bytes = 2);

// Rows of a box for pages of page_size keys under tiles of tile_kv: the most that divide both.
// Below 8 there is none, for the swizzle repeats every 8 rows.
int box_rows_of(int page_size, int tile_kv);

class TensorMapCache {
 public:
  // `address` is 16-byte aligned and strides are multiples of 8 elements (checked before). Throws
  // ArgumentError for what TMA cannot read.
  const TensorMap& get(const char* name, const void* address, Dtype dtype, const KvMapShape& shape);

 private:
  struct Entry {
    const void* address;
    KvMapShape shape;
    TensorMap map;
  };
  std::vector<Entry> entries_;  // a cache of a model has a few; the oldest goes first
  std::size_t next_ = 0;        // the oldest entry of a full cache
};

}  // namespace plait::cuda
