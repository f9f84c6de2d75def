// Copies into shared memory by cp.async, in groups that are waited for in order.
// PTX manual: "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once
#include "ptx/nap.cuh"
#include "ptx/smem.cuh"

namespace plait::ptx {

// The same address, of whose making the compiler knows nothing: a sum that many addresses begin
// with it would else take apart and add up for each.
PLAIT_DEVICE const unsigned char* opaque(const unsigned char* address) {
  asm("" : "+l"(address));
  return address;
}

// 16 bytes, past L1, to an address in shared memory (of many a constant apart only the first is
// then made from a pointer).
PLAIT_DEVICE void cp_async_16(unsigned smem, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem), "l"(global)
               : "memory");
}

// `bytes` 0 writes zeros and reads nothing.
PLAIT_DEVICE void cp_async_16(unsigned smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global),
               "r"(bytes)
               : "memory");
}

// The same where `wanted`, else nothing; a predicate, since a branch would part the products that
// copies go between.
PLAIT_DEVICE void cp_async_16_if(bool wanted, unsigned smem, const void* global, int bytes) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n"
      "}" ::"r"(smem),
      "l"(global), "r"(bytes), "r"(static_cast<int>(wanted))
      : "memory");
}

// Closes this thread's group; an empty one counts too.
PLAIT_DEVICE void cp_async_commit() {
  nap();
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread but the last `kPending`.
template <int kPending>
PLAIT_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  nap();
}

PLAIT_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace plait::ptx
