// Cuts of the list, one thread each, and which way of cutting is modelled fastest
// (host_device/shares.h), for kernels/plan_lengths.cuh.
#pragma once
#include "planner/list.cuh"

namespace plait {

PLAIT_DEVICE ListCut of_next_lane(const ListCut& cut) {
  return {{__shfl_down_sync(~0u, cut.at.tile, 1), __shfl_down_sync(~0u, cut.at.head, 1),
           __shfl_down_sync(~0u, cut.at.key, 1)},
          __shfl_down_sync(~0u, cut.shape, 1),
          __shfl_down_sync(~0u, cut.before_ps, 1)};
}

PLAIT_DEVICE void write_cut(int cta, const ListCut& cut) {
  smem.cuts[cta] = cut.at;
  smem.rows_or_first_cut[cta] = static_cast<unsigned short>(cut.num_rows);
}

PLAIT_DEVICE unsigned warp_max(unsigned value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const unsigned other = __shfl_xor_sync(~0u, value, step);
    if (other > value) value = other;
  }
  return value;
}

PLAIT_DEVICE void choose_cuts(const PlanLengthsCall& call, const Found& found) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const int num_ctas = call.num_ctas, num_ways = found.num_ways;
  int way = 0;
  bool is_written = false;
  if (num_ways > 1) {
    // A warp has 32 cuts, so 31 runs.
    unsigned* const loads = smem.loads();
    const int warps_a_way = ceil_div(num_ctas, 31), warps = num_ways * warps_a_way;
    ListCut cut{};
    int cta = 0, way_of_cut = -1;
#pragma unroll 1
    for (int w = warp; w < warps; w += num_warps) {
      way_of_cut = (w >= warps_a_way) + (w >= 2 * warps_a_way);
      cta = (w - way_of_cut * warps_a_way) * 31 + lane;
      cut = list_cut(way_of_cut, min(cta, num_ctas));
      const ListCut next = of_next_lane(cut);
      if (lane == 31 || cta >= num_ctas) continue;
      loads[way_of_cut * num_ctas + cta] = units_of(run_ps(cut, next, call.shapes, call.rules));
      if (cut.shape >= 0) smem.joins[way_of_cut] = 1;
    }
    __syncthreads();
#pragma unroll 1
    for (int w = warp; w < num_ways; w += num_warps) {
      const auto load = [&](int i) { return i < num_ctas ? loads[w * num_ctas + i] : 0; };
      unsigned slowest = 0;
#pragma unroll 2
      for (int i = lane; i < num_loads(num_ctas, call.num_sms); i += 32) {
        const unsigned units = load_of(i, call.num_sms, load);
        if (units > slowest) slowest = units;
      }
      slowest = warp_max(slowest);
      if (lane == 0) smem.slowest[w] = slowest + join_units(call.num_sms, smem.joins[w]);
    }
    __syncthreads();
#pragma unroll
    for (int w = 1; w < kShareWays; ++w) {
      if (smem.slowest[w] < smem.slowest[way]) way = w;
    }
    is_written = warps <= num_warps;
    if (is_written && way_of_cut == way && cta <= num_ctas) write_cut(cta, cut);
  }
  if (!is_written) {
#pragma unroll 1
    for (int cta = threadIdx.x; cta <= num_ctas; cta += blockDim.x) {
      write_cut(cta, list_cut(way, cta));
    }
  }
  __syncthreads();
}

}  // namespace plait
