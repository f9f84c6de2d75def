// kernels/ptx/smem.cuh for emulate.h: addresses count from the start of dynamic shared memory.
#pragma once
#include "cuda/emulate.h"

namespace plait::ptx {

inline unsigned smem_address(const void* p) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(p) - emulate::dynamic_smem);
}
inline unsigned char* dynamic_smem() { return emulate::dynamic_smem; }
inline void* fixed_dynamic_smem() { return emulate::dynamic_smem; }

}  // namespace plait::ptx
