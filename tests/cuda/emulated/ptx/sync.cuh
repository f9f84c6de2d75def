// kernels/ptx/sync.cuh for emulate.h.
#pragma once
#include "cuda/emulate.h"

namespace plait::ptx {

inline void named_barrier(int id, int num_threads) { emulate::cta->sync_named(id, num_threads); }
inline void named_barrier_arrive(int id, int num_threads) {
  emulate::cta->arrive_named(id, num_threads);
}
template <int kRegisters>
void increase_registers() {}
template <int kRegisters>
void decrease_registers() {}

}  // namespace plait::ptx
