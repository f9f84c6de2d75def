// Ordering between CTAs: one atomic with acquire and release semantics, and loads that see what
// other CTAs wrote in this launch.
// On the host (tests that emulate a kernel, one thread at a time) they are plain.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once
#include "ptx/nap.cuh"

namespace plait::ptx {

// Adds 1 and returns the value before. Writes that this thread observed before (its own, and those
// of threads that it met at a barrier) are visible to whoever reads the new value this way.
PLAIT_DEVICE unsigned arrive_acq_rel(unsigned* counter) {
#if defined(__CUDA_ARCH__)
  nap();
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
#else
  return (*counter)++;
#endif
}

// Never the non-coherent path, never a stale line of L1.
PLAIT_DEVICE float load_relaxed(const float* address) {
#if defined(__CUDA_ARCH__)
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(address) : "memory");
  return x;
#else
  return *address;
#endif
}
PLAIT_DEVICE void load_relaxed(const float* address, float (&x)[4]) {  // 16-byte aligned
#if defined(__CUDA_ARCH__)
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(address)
               : "memory");
#else
  for (int i = 0; i < 4; ++i) x[i] = address[i];
#endif
}

}  // namespace plait::ptx
