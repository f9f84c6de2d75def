// kernels/ptx/dependent_launch.cuh for emulate.h. The kernels before are complete once every thread
// of the CTA waits for them, and not before: what they write must not be looked at until then.
#pragma once
#include "cuda/emulate.h"

namespace plait::ptx {

inline void await_kernels_before() {
  emulate::cta->sync_threads();
  emulate::cta->complete_kernels_before();
}
inline void let_next_kernel_begin() {}

}  // namespace plait::ptx
