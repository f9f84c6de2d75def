// Programmatic dependent launch, of sm_90 and later: a kernel that is launched so may begin while
// the one before it in its stream is ending. Launched otherwise, or after a kernel that lets nobody
// begin, it waits for nothing. tile/begin.cuh says what all kernels of ours do with it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/ (griddepcontrol)
#pragma once
#include "host_device/base.h"

namespace plait::ptx {

// Until the kernels before this one are complete and their writes can be seen.
PLAIT_DEVICE void await_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin once every CTA has said so, or has ended. It takes what room there is.
PLAIT_DEVICE void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace plait::ptx
