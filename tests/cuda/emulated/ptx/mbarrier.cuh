// kernels/ptx/mbarrier.cuh for emulate.h. A thread that waits
// lets others run; an arrival too many ends the process.
#pragma once
#include "ptx/cp_async.cuh"

namespace plait::ptx {

using Barrier = unsigned long long;

struct BarrierState {
  short count, pending;
  int phase : 1, tx : 31;  // bytes that are expected (> 0) or came early (< 0)
};
static_assert(sizeof(BarrierState) == sizeof(Barrier));

template <class F>
void update(Barrier* barrier, F&& change) {
  auto state = __builtin_bit_cast(BarrierState, *barrier);
  change(state);
  if (state.pending < 0) {
    throw std::logic_error("an mbarrier got more arrivals than it was made for");
  }
  if (state.pending == 0 && state.tx == 0) {
    state.phase = ~state.phase;
    state.pending = state.count;
  }
  *barrier = __builtin_bit_cast(Barrier, state);
}

inline void mbarrier_init(Barrier* barrier, int count) {
  *barrier = __builtin_bit_cast(
      Barrier, BarrierState{static_cast<short>(count), static_cast<short>(count), 0, 0});
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(Barrier* barrier, int count = 1) {
  emulate::cta->nap();
  update(barrier, [&](BarrierState& s) { s.pending = static_cast<short>(s.pending - count); });
}
inline void mbarrier_arrive_expect_tx(Barrier* barrier, int bytes) {
  emulate::cta->nap();
  update(barrier, [&](BarrierState& s) {
    s.tx += bytes;
    --s.pending;
  });
}
inline void mbarrier_complete_tx(Barrier* barrier, int bytes) {  // what TMA does
  update(barrier, [&](BarrierState& s) { s.tx -= bytes; });
}
inline bool mbarrier_test(Barrier* barrier, unsigned parity) {
  return (static_cast<unsigned>(__builtin_bit_cast(BarrierState, *barrier).phase) & 1) != parity;
}
inline void mbarrier_wait(Barrier* barrier, unsigned parity) {
  emulate::cta->wait_until([&] { return mbarrier_test(barrier, parity); });
  emulate::cta->nap();
}
inline void cp_async_mbarrier_arrive(Barrier* barrier) {
  cp_async_wait_all();  // when it arrives, they have landed
  mbarrier_arrive(barrier);
}

}  // namespace plait::ptx
