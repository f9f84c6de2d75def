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

// The same at an address that is made once: ptxas for sm_90 else makes it anew, from the CTA's
// place in its cluster, wherever it is used. (For sm_100 too, where the register would be one too
// many.)
PLAIT_DEVICE void* fixed_dynamic_smem() {
#if __CUDA_ARCH__ == 900
  unsigned address = smem_address(dynamic_smem());
  asm("" : "+r"(address));
  return __cvta_shared_to_generic(address);
#else
  return dynamic_smem();
#endif
}

}  // namespace plait::ptx
