// Addresses in shared memory, and the dynamic shared memory of a launch.
#pragma once
#include "host_device/base.h"

namespace plait::ptx {

PLAIT_DEVICE unsigned smem_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

PLAIT_DEVICE unsigned char* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  return smem_bytes;
}

}  // namespace plait::ptx
