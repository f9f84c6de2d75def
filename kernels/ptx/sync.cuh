// Named barriers and register reallocation between warpgroups.
#pragma once
#include "ptx/nap.cuh"

namespace plait::ptx {

PLAIT_DEVICE void named_barrier(int id, int num_threads) {
  nap();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Counts towards a named barrier without waiting for it.
PLAIT_DEVICE void named_barrier_arrive(int id, int num_threads) {
  nap();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

template <int kRegisters>
PLAIT_DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
PLAIT_DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace plait::ptx
