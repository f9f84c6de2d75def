// How a kernel begins: it waits for the kernels before it, then lets the next one begin.
#pragma once
#include "ptx/dependent_launch.cuh"

namespace plait {

// By every thread, ahead of its first access to memory that another kernel reads or writes. The
// next kernel, whoever's it is, begins when all before this one are complete: what it reads before
// its own wait may come from any kernel but this one. It finds room as CTAs of this one end.
PLAIT_DEVICE void begin_kernel() {
  ptx::await_kernels_before();
  ptx::let_next_kernel_begin();
}

}  // namespace plait
