// mbarrier in shared memory: arrival counts, transaction bytes, waits by phase parity.
// PTX manual: "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once
#include "ptx/nap.cuh"
#include "ptx/smem.cuh"

namespace plait::ptx {

using Barrier = unsigned long long;

PLAIT_DEVICE void mbarrier_init(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count)
               : "memory");
}

// Makes initialised barriers visible to the async proxy (TMA) as well.
PLAIT_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PLAIT_DEVICE void mbarrier_arrive(Barrier* barrier, int count = 1) {
  nap();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(count)
               : "memory");
}

PLAIT_DEVICE void mbarrier_arrive_expect_tx(Barrier* barrier, int bytes) {
  nap();
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase with this parity has completed. A fresh barrier is in phase 0: waiting for
// parity 1 returns at once.
PLAIT_DEVICE void mbarrier_wait(Barrier* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait_loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra wait_done;\n"
      "bra wait_loop;\n"
      "wait_done:\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
  nap();
}

// Whether the phase with this parity has completed.
PLAIT_DEVICE bool mbarrier_test(Barrier* barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Arrives once this thread's cp.async issued so far have landed; does not block. The arrival is one
// of those the barrier was initialised for (noinc).
PLAIT_DEVICE void cp_async_mbarrier_arrive(Barrier* barrier) {
  nap();
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

}  // namespace plait::ptx
