// Reads memory and keeps nothing: what empties the L2 between two timed calls, and the probe of the
// read bandwidth. Reads rather than writes, because dirty lines would cost the timed call 4 to 5 us
// (measured on an H200).
#pragma once
#include "host_device/utility_calls.h"

namespace plait {

// Any grid. Four loads in flight a thread: 2048 threads then have the 128 KB a multiprocessor that
// an H200's memory needs to be saturated.
PLAIT_DEVICE void read_all(const ReadAllCall& call) {
  constexpr int kLoads = 4;
  struct Unit {
    unsigned x, y, z, w;
  };
  const i64 num_threads = static_cast<i64>(gridDim.x) * blockDim.x;
  unsigned found = 0;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < call.num_units;
       i += kLoads * num_threads) {
    Unit loaded[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      // Past the end the first unit once more: no branch between the loads.
      const i64 unit = i + n * num_threads < call.num_units ? i + n * num_threads : i;
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(loaded[n].x), "=r"(loaded[n].y), "=r"(loaded[n].z), "=r"(loaded[n].w)
                   : "l"(static_cast<const char*>(call.data) + 16 * unit));
    }
#pragma unroll
    for (const Unit& x : loaded) found |= x.x | x.y | x.z | x.w;
  }
  if (found != 0) *call.found = found;  // never: the memory is zero
}

}  // namespace plait
