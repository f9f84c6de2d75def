// Tensor maps (TMA) of K and V in the affine layout, made once a pointer and shape.
#pragma once
#include <vector>

#include "cuda/driver.h"
#include "host_device/config.h"

namespace plait::cuda {

class TensorMapCache {
 public:
  // Dimensions (head_dim, kv head, row), box {64, 1, box_rows}, 128-byte swizzle; elements of 16
  // bits. `address` is 16-byte aligned and strides are multiples of 8 elements (checked before).
  // Reads beyond num_rows give zeros. num_rows 0: any address, all zeros.
  const TensorMap& get(const char* name, const void* address, Dtype dtype, int head_dim,
                       int num_kv_heads, i64 num_rows, const KvStrides& stride, int box_rows);

 private:
  struct Entry {
    const void* address;
    i64 num_rows, stride_token, stride_head;
    TensorMap map;
  };
  std::vector<Entry> entries_;  // a cache of a model has a few; the oldest goes first
  std::size_t next_ = 0;        // the oldest entry of a full cache
};

}  // namespace plait::cuda
