// kernels/ptx/copy.cuh for emulate.h. A tensor map holds the
// address of a MappedTensor.
#pragma once
#include <cstring>

#include "cuda/tensor_maps.h"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace plait::ptx {

struct MappedTensor {
  const unsigned char* data;
  cuda::KvMapShape shape;
};

// The 128-byte swizzle: address bits 4-6 are xored with bits 7-9.
inline unsigned swizzled(unsigned address) { return address ^ ((address >> 7 & 7) << 4); }

inline void land_box(void* smem, const void* map, Barrier* barrier, int x, int y, int z, int w) {
  const MappedTensor* tensor;
  std::memcpy(&tensor, map, sizeof tensor);
  const cuda::KvMapShape& shape = tensor->shape;
  const auto inside = [&](int i, int dim) {
    return i >= 0 && static_cast<std::uint64_t>(i) < shape.dims[dim];
  };
  const unsigned begin = smem_address(smem);
  const bool bytes = shape.element_bytes == 1;  // without a swizzle
  if (begin % (bytes ? 128 : 1024) != 0) {      // the swizzle is one of absolute addresses
    throw std::logic_error("a box begins within a period of the swizzle");
  }
  for (unsigned row = 0; row < shape.box[1]; ++row) {
    const int r = y + static_cast<int>(row);
    for (unsigned col = 0; col < shape.box[0]; ++col) {
      const int c = x + static_cast<int>(col);
      unsigned short value = 0;
      if (inside(c, 0) && inside(r, 1) && inside(z, 2) && inside(w, 3)) {
        std::memcpy(&value,
                    tensor->data + shape.element_bytes * c + r * shape.stride_bytes[0] +
                        z * shape.stride_bytes[1] + w * shape.stride_bytes[2],
                    shape.element_bytes);
      }
      const unsigned at = begin + (row * shape.box[0] + col) * shape.element_bytes;
      std::memcpy(emulate::dynamic_smem + (bytes ? at : swizzled(at)), &value, shape.element_bytes);
    }
  }
  mbarrier_complete_tx(barrier,
                       static_cast<int>(shape.box[0] * shape.box[1]) * shape.element_bytes);
}

inline void tma_load_4d(void* smem, const void* map, Barrier* barrier, int x, int y, int z, int w) {
  emulate::cta->nap();
  emulate::cta->land_later([=] { land_box(smem, map, barrier, x, y, z, w); });
}

inline void prefetch_l2(const void*) {}
inline void prefetch_tensor_map(const void*) {}

inline void fence_proxy_async() {}

}  // namespace plait::ptx
