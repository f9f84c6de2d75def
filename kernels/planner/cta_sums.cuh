// Sums and maxima over the threads of a CTA, for kernels/plan_lengths.cuh: three of them at once.
// The CTA has many warps and its multiprocessor few instructions a cycle, so warps without values
// do nothing, and sums of warps are added up by one.
#pragma once
#include "host_device/base.h"

// Called, not inlined: each instruction is run a few times at most, so that fetching it is a part
// of what it costs.
#if defined(__CUDACC__)
#define PLAIT_CALLED __device__ __noinline__
#else
#define PLAIT_CALLED inline
#endif

namespace plait {

// What a thread adds; `most` is not negative.
struct Addends {
  i64 value, also;
  int most;
};
struct CtaSums {
  i64 before, total;   // of the values: of all threads before this one, of all
  i64 also;            // sum of all `also`
  int most_yet, most;  // largest `most` of threads up to this one, of all
};

PLAIT_DEVICE Addends warp_sums_up_to(Addends sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const i64 value = __shfl_up_sync(~0u, sum.value, step);
    const i64 also = __shfl_up_sync(~0u, sum.also, step);
    const int most = __shfl_up_sync(~0u, sum.most, step);
    if (lane >= step) {
      sum.value += value;
      sum.also += also;
      sum.most = max(sum.most, most);
    }
  }
  return sum;
}

// Of the threads below num_threads; the others add nothing, and only the totals are theirs too.
// of_warps: [32], which no thread still reads, that is, not those of the sums before: two sets that
// take turns.
PLAIT_CALLED CtaSums cta_sums(Addends* of_warps, Addends own, int num_threads) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_warps = min(ceil_div(num_threads, 32), static_cast<int>(blockDim.x) / 32);
  Addends sum{};
  if (warp < num_warps) {
    sum = warp_sums_up_to(own);
    if (lane == 31) of_warps[warp] = sum;
  }
  __syncthreads();
  if (num_warps > 1) {
    if (warp == 0) {
      const Addends of_warp = lane < num_warps ? of_warps[lane] : Addends{};
      of_warps[lane] = warp_sums_up_to(of_warp);
    }
    __syncthreads();
  }
  const Addends all = of_warps[num_warps - 1];
  CtaSums sums{sum.value - own.value, all.value, all.also, sum.most, all.most};
  if (warp > 0 && warp < num_warps) {
    const Addends& before = of_warps[warp - 1];
    sums.before += before.value;
    sums.most_yet = max(sums.most_yet, before.most);
  }
  return sums;
}

}  // namespace plait
