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

// Never the non-coherent path, never a stale line of L1. base[index], but `other`, without any
// access, for index < 0.
PLAIT_DEVICE float load_relaxed_if(int index, const float* base, float other) {
#if defined(__CUDA_ARCH__)
  float x;
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ge.s32 valid, %2, 0;\n"
      "mov.b32 %0, %3;\n"
      "@valid ld.relaxed.gpu.global.f32 %0, [%1];\n"
      "}"
      : "=&f"(x)
      : "l"(base + index), "r"(index), "f"(other)
      : "memory");
  return x;
#else
  return index >= 0 ? base[index] : other;
#endif
}
// Four at `address`, 16-byte aligned; zeros, without any access, for index < 0.
PLAIT_DEVICE void load_relaxed_if(int index, const float* address, float (&x)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ge.s32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@valid ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&f"(x[0]), "=&f"(x[1]), "=&f"(x[2]), "=&f"(x[3])
      : "l"(address), "r"(index)
      : "memory");
#else
  for (int i = 0; i < 4; ++i) x[i] = index >= 0 ? address[i] : 0.0f;
#endif
}

}  // namespace plait::ptx
