// Naps, for tests of who waits for whom: a kernel compiled with PLAIT_NAPS (PLAIT_JIT_NAPS=seed in
// the environment defines it) has warps that sleep now and then where they meet others, at a
// barrier or a copy. Results must keep their bits. Without, as all kernels are shipped, nap() is
// nothing.
#pragma once
#include "host_device/base.h"

namespace plait::ptx {

PLAIT_DEVICE void nap() {
#if defined(PLAIT_NAPS)
  unsigned clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
  // Knuth's multiplicative hash; one draw in 16 sleeps, up to 4 us, as long as some tiles take.
  const unsigned draw = (clock + threadIdx.x / 32 * 7919u + PLAIT_NAPS * 104729u) * 2654435761u;
  asm volatile(  // a predicate: a branch would make ptxas serialise the wgmmas around it
      "{\n"
      ".reg .pred sleeps;\n"
      "setp.lt.u32 sleeps, %0, 0x10000000;\n"
      "@sleeps nanosleep.u32 %1;\n"
      "}" ::"r"(draw),
      "r"(draw >> 12 & 4095u)
      : "memory");
#endif
}

}  // namespace plait::ptx
