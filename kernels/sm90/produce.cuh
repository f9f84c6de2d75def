// The producer warpgroup: what its warps ask for before the CTA's barriers are there, and who of
// them loads (load.cuh) and who finishes (finish.cuh).
#pragma once
#include "sm90/finish.cuh"
#include "sm90/load.cuh"
#include "tile/store_out.cuh"

namespace plait::sm90 {

// Asks for the tensor maps, which are arguments: no kernel writes them.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void prefetch_maps(const Sm90Call<Variant>& call) {
  if (Roles<kConfig, Variant>::kTma && threadIdx.x % 128 == 0) {
    ptx::prefetch_tensor_map(&call.maps.k);
    ptx::prefetch_tensor_map(&call.maps.v);
  }
}

// Asks for the plan's pointers, which are needed once the first unit is known.
PLAIT_DEVICE void prefetch_plan(const Params& params) {
  constexpr int kLineBytes = 128;
  const int lane = threadIdx.x % 32;
  if (lane * kLineBytes < static_cast<int>(sizeof(PlanView))) {
    ptx::prefetch_l2(reinterpret_cast<const char*>(params.plan) + lane * kLineBytes);
  }
}

// Before the barriers are there: load warps ask for what they need first, finish warps get it.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void first_loads(const Sm90Call<Variant>& call, CtaStart& start) {
  const int warp = threadIdx.x % 128 / 32;
  if (warp >= Roles<kConfig, Variant>::kLoadWarps) {
    start = call.params.starts[blockIdx.x];
  } else {
    prefetch_plan(call.params);
  }
}

// Asks for the first two tiles' entries of the block table while the first unit is written.
template <KernelConfig kConfig>
PLAIT_DEVICE void prefetch_blocks(const CtaStart& start, const Divisor& block_size) {
  const WorkItem& item = start.item;
  if (item.kv_begin >= item.kv_end) return;
  const int key = item.kv_begin + threadIdx.x % 32 * (kConfig.tile_kv / 16);
  ptx::prefetch_l2(Blocks::entry(block_list(start.table, start.block),
                                 divide(min(key, item.kv_end - 1), block_size)));
}

template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void produce(const Sm90Call<Variant>& call, const CtaStart& start,
                          Smem<kConfig>& smem) {
  using R = Roles<kConfig, Variant>;
  const int warp = threadIdx.x % 128 / 32;
  if (warp < R::kLoadWarps) {
    if (kConfig.loader != Loader::kAffine && warp == 0) {
      prefetch_blocks<kConfig>(call.params.starts[blockIdx.x], call.maps.block_size);
    }
    load_kv<kConfig, Variant>(call.maps, call.params, smem);
  } else {
    finish_tiles<kConfig, Variant>(call.params, call.variant, start, smem);
    // Here rather than by consumers, whose end is the kernel's.
    store_padding_rows<kConfig, Variant>(call.params, *call.params.plan,
                                         threadIdx.x % 128 - 32 * R::kLoadWarps,
                                         32 * R::kFinishWarps);
  }
}

}  // namespace plait::sm90
