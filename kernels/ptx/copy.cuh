// Copies into shared memory, cp.async and TMA, and the fences that order them with wgmma.
// PTX manual: "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once
#include "ptx/mbarrier.cuh"

namespace plait::ptx {

// 16 bytes, past L1. `bytes` 0 writes zeros and reads nothing.
PLAIT_DEVICE void cp_async_16(void* smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(smem)),
               "l"(global), "r"(bytes)
               : "memory");
}

PLAIT_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Box at (x, y, z, w) of a 4-D tensor map, zeros where that is outside; the barrier gets its bytes.
PLAIT_DEVICE void tma_load_4d(void* smem, const void* map, Barrier* barrier, int x, int y, int z,
                              int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Orders this thread's ordinary accesses to shared memory (and those it has synchronised with)
// before later accesses by wgmma and TMA.
PLAIT_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace plait::ptx
