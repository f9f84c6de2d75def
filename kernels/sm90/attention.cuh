// The sm90a attention kernel: persistent CTAs, one producer warpgroup that fills a ring of K and V
// tiles, consumer warpgroups that compute on wgmma. Formats differ only in the loader (load.cuh);
// every shape of the configuration runs in this one loop. Read: kernel at the end, then produce.cuh
// (load.cuh, finish.cuh), compute.cuh, store.cuh. docs/kernels.md draws the pipeline.
#pragma once
#include "sm90/produce.cuh"
#include "sm90/store.cuh"
#include "tile/begin.cuh"

namespace plait::sm90 {

template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void check_config() {
  static_assert(kConfig.head_dim_qk % 8 == 0 && kConfig.head_dim_qk <= 256 &&
                    kConfig.head_dim_vo % 8 == 0 && kConfig.head_dim_vo <= 256,
                "the sm90a template takes head dims of multiples of 8 up to 256");
  static_assert(kConfig.tile_kv % 16 == 0, "P V takes 16 keys a step");
  static_assert(kConfig.dtype_q == kConfig.dtype_out && bytes_of(kConfig.dtype_q) == 2,
                "the sm90a template takes bfloat16 or float16");
  static_assert(kConfig.dtype_q == kConfig.dtype_kv ||
                    (is_fp8(kConfig.dtype_kv) && kConfig.head_dim_qk % 16 == 0 &&
                     kConfig.head_dim_vo % 16 == 0 && kConfig.num_landing_stages >= 2),
                "K and V have q's dtype, or are fp8 in rows of whole 16 bytes");
  static_assert(kConfig.num_stages >= 2, "K runs one tile ahead of V");
  // Else the tile before in a stage is the other warpgroup's, and a wait for the next by parity may
  // take the one before that for it.
  static_assert(kConfig.num_stages % key_split(kConfig) == 0,
                "with split keys every stage is one warpgroup's");
  static_assert(key_split(kConfig) <= kConfig.num_consumer_warpgroups,
                "a warpgroup for each part of the keys");
  // With more, at the end of a unit a stage of V is given up only for a K that comes behind it.
  static_assert(key_split(kConfig) <= 2 || loads_apart(kConfig),
                "one warp copies K and V for two parts of the keys at most");
  static_assert(kConfig.chunk_keys == 0 ||
                    (!splits_keys(kConfig) && kConfig.chunk_keys % kConfig.tile_kv == 0),
                "in invariant mode keys are split at whole chunks alone");
  static_assert(kConfig.num_q_stages >= (splits_keys(kConfig) ? 2 : 1),
                "the join uses Q's buffer while the next unit's Q is read");
  // A CTA starts with the same number everywhere; increase_registers waits for ever for more than
  // the producer gives up.
  constexpr int kWarpgroups = kConfig.num_consumer_warpgroups + 1;
  constexpr int kRegisters = 65536 / (128 * kWarpgroups * kConfig.ctas_per_sm) / 8 * 8;
  static_assert(
      kConfig.producer_registers + kConfig.num_consumer_warpgroups * kConfig.consumer_registers <=
          kWarpgroups * kRegisters,
      "more registers than the CTA has");
  static_assert(sizeof(Smem<kConfig>) == sm90_smem_bytes(kConfig), "the host launches with this");
}

// The consumers' pipeline, and what is done with each unit that comes out of it.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void consume(const Sm90Call<Variant>& call, Smem<kConfig>& smem) {
  using Traits = VariantTraits<Variant>;
  const Params& params = call.params;
  const PlanView& plan = *params.plan;
  const float scale_log2 = Traits::kHasLogitsTransform
                               ? kLog2e
                               : logit_scale<Variant, kConfig.dtype_kv>(params) * kLog2e;
  const int warpgroup = threadIdx.x / 128;
  Consumer<kConfig, Variant> consumer{smem, params, call.variant, scale_log2};
  consumer.run([&](unsigned u) {
    const Unit& unit = consumer.unit_of(u);
    const bool joins = splits_keys(kConfig) && unit.key_split > 1;
    unsigned char* q = smem.q[u % Smem<kConfig>::kQStages];
    if constexpr (splits_keys(kConfig)) {
      if (joins) join_warpgroups<kConfig, Variant>(consumer, q);
    }
    store_unit<kConfig, Variant>(call, consumer, unit, joins ? 0 : 64 * warpgroup,
                                 !joins || warpgroup == 0, consumer.unit_of(u + 1), q, [&] {
                                   if (stages_rows(kConfig) || joins) consumer.release_q(u);
                                 });
  });
}

template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void attention(const Sm90Call<Variant>& call) {
  check_config<kConfig, Variant>();
  // Where memory is what a tile waits for, no register is held for the address.
  constexpr bool kFixed = tile_q(kConfig) > 64 && !is_fp8(kConfig.dtype_kv);
  Smem<kConfig>& smem =
      *static_cast<Smem<kConfig>*>(kFixed ? ptx::fixed_dynamic_smem() : ptx::dynamic_smem());
  // Consumers make the barriers and the producer asks for the tensor maps while the kernel before
  // ends; then the producer asks for what it needs first, and all meet.
  const bool produces = threadIdx.x >= 128 * kConfig.num_consumer_warpgroups;  // the last warpgroup
  CtaStart start;  // only finish warps get one
  if (produces) {
    prefetch_maps<kConfig, Variant>(call);
  } else if (threadIdx.x < 4) {
    if (threadIdx.x == 0) init_barriers<kConfig, Variant>(smem);
    smem.pending[threadIdx.x].num_rows = 0;
  }
  begin_kernel();
  if (produces) first_loads<kConfig, Variant>(call, start);
  __syncthreads();
  if (produces) {
    ptx::decrease_registers<kConfig.producer_registers>();
    produce<kConfig, Variant>(call, start, smem);
  } else {
    ptx::increase_registers<kConfig.consumer_registers>();
    consume<kConfig, Variant>(call, smem);
  }
}

}  // namespace plait::sm90
