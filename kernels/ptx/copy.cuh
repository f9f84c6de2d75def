// Copies into shared memory by TMA, and the fences that order copies with wgmma.
// PTX manual: "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace plait::ptx {

// Box at (x, y, z, w) of a 4-D tensor map, zeros where that is outside; the barrier gets its bytes.
PLAIT_DEVICE void tma_load_4d(void* smem, const void* map, Barrier* barrier, int x, int y, int z,
                              int w) {
  nap();
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Fetch what later accesses will want, as far as L2; a tensor map as far as the copy engine.
PLAIT_DEVICE void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
PLAIT_DEVICE void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Orders this thread's ordinary accesses to shared memory (and those it has synchronised with)
// before later accesses by wgmma and TMA.
PLAIT_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace plait::ptx
