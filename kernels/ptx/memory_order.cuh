// Ordering between CTAs: one atomic with acquire and release semantics, and loads that see what
// other CTAs wrote in this launch. And an order for the compiler.
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

// The same, but from `last` the counter goes to 0.
PLAIT_DEVICE unsigned arrive_and_wrap_acq_rel(unsigned* counter, unsigned last) {
#if defined(__CUDA_ARCH__)
  nap();
  unsigned before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
#else
  const unsigned before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
#endif
}

// Puts the counter from `all` to 0 if it is there, and returns whether it was: of all threads that
// try, one is told so. It then sees what was written before the arrivals.
PLAIT_DEVICE bool claim_acquire(unsigned* counter, unsigned all) {
#if defined(__CUDA_ARCH__)
  nap();
  unsigned before;
  asm volatile("atom.cas.acquire.gpu.global.b32 %0, [%1], %2, 0;"
               : "=r"(before)
               : "l"(counter), "r"(all)
               : "memory");
  return before == all;
#else
  if (*counter != all) return false;
  *counter = 0;
  return true;
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
// Four at `address`, 16-byte aligned.
PLAIT_DEVICE void load_relaxed(const float* address, float (&x)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(address)
               : "memory");
#else
  for (int i = 0; i < 4; ++i) x[i] = address[i];
#endif
}
PLAIT_DEVICE unsigned load_relaxed(const unsigned* counter) {
#if defined(__CUDA_ARCH__)
  unsigned x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
#else
  return *counter;
#endif
}

// For a fraction of a microsecond.
PLAIT_DEVICE void sleep_shortly() {
#if defined(__CUDA_ARCH__)
  asm volatile("nanosleep.u32 200;" ::: "memory");
#endif
}

// Adds 1 and returns the value before, without an order.
PLAIT_DEVICE unsigned add_relaxed(unsigned* counter) {
#if defined(__CUDA_ARCH__)
  nap();
  unsigned before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
#else
  return (*counter)++;
#endif
}

// x, which the compiler cannot know before: what follows from it is computed where it is used, not
// kept in registers since the kernel began. On sm_90 ptxas spills without it, elsewhere with it.
PLAIT_DEVICE int known_from_here(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// In a branch that is seldom taken: it stays one, rather than becoming a selection of each value.
PLAIT_DEVICE void keep_branch() {
#if defined(__CUDA_ARCH__)
  asm volatile("");
#endif
}

}  // namespace plait::ptx
