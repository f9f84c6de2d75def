// Reads memory and keeps nothing: what empties the L2 between two timed calls. Reads rather than
// writes, because dirty lines would cost the timed call 4 to 5 us (measured on an H200).
#pragma once
#include "host_device/utility_calls.h"

namespace plait {

// Any grid.
PLAIT_DEVICE void read_all(const ReadAllCall& call) {
  const i64 num_threads = static_cast<i64>(gridDim.x) * blockDim.x;
  unsigned found = 0;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < call.num_units;
       i += num_threads) {
    unsigned x, y, z, w;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "l"(static_cast<const char*>(call.data) + 16 * i));
    found |= x | y | z | w;
  }
  if (found != 0) *call.found = found;  // never: the memory is zero
}

}  // namespace plait
