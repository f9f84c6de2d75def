// The sm90a kernel's shared memory and the barriers of its KV ring. Who arrives, who waits:
//   full_k, full_v   [stage]  loaders (or finishers, see load.cuh) arrive, consumers wait
//   raw_k, raw_v     [stage]  loaders arrive, finishers wait: tiles that need a second stage
//   empty_k, empty_v [stage]  every consumer warp arrives, loaders wait
//   q_full, q_empty           finishers and consumer warps, once a unit (item x kv head)
#pragma once
#include "host_device/convert.h"
#include "host_device/variant.h"
#include "ptx/mbarrier.cuh"
#include "sm90/layout.h"
#include "sm90/smem.h"
#include "tile/rows.cuh"

namespace plait::sm90 {

// Named barriers: among finish warps; around the join of split keys; before and in a merge; of each
// consumer warpgroup: order_after and turns (compute.cuh).
enum NamedBarrier {
  kFinishBarrier = 1,
  kJoinReady,
  kJoinWritten,
  kMergeBarrier,
  kOrderBarrier,                     // + warpgroup
  kTurnBarrier = kOrderBarrier + 2,  // + warpgroup
};

// One unit of work: an item and one of its kv heads. Load and finish warps walk the plan; finish
// warps hand each unit on to the consumers, together with its Q. What a tile needs is copied, for
// the rest there is the plan.
struct Unit {
  const WorkItem* item;  // null: there are no more units
  const RowBlock* block;
  int kv_head;
  int first_token, first_row, num_rows;
  int kv_end, kv_pos_begin;
  TileList tiles;
  FullTiles full_tiles;
  unsigned first_tile;  // of the ring
};

template <KernelConfig kConfig>
struct alignas(1024) Smem {
  static constexpr int kStages = kConfig.num_stages;
  static constexpr int kTileQ = tile_q(kConfig);

  unsigned char q[tile_bytes(kTileQ, kConfig.head_dim_qk)];
  unsigned char k[kStages][tile_bytes(kConfig.tile_kv, kConfig.head_dim_qk)];
  unsigned char v[kStages][tile_bytes(kConfig.tile_kv, kConfig.head_dim_vo)];
  int scratch[kTileQ];  // of the join: states; of the merge: tokens
  // Unit u is units[u % 2]: consumers that store u still read it while u + 1 arrives. Whoever
  // writes u + 2 has seen q_empty of u + 1, which no warp gives before it is done with u.
  Unit units[2];
  ptx::Barrier full_k[kStages], full_v[kStages], raw_k[kStages], raw_v[kStages];
  ptx::Barrier empty_k[kStages], empty_v[kStages], q_full, q_empty;
};

// What follows from configuration and variant: who does what in the producer warpgroup. Its first
// kLoadWarps issue copies of K and V; the others, the finishers, load Q and apply second stages.
template <KernelConfig kConfig, class Variant>
struct Roles {
  using Traits = VariantTraits<Variant>;
  static constexpr bool kTma = kConfig.loader != Loader::kGather;
  static constexpr bool kTransformK = Traits::kHasKeyTransform;
  static constexpr bool kTransformV = Traits::kHasValueTransform;
  static constexpr int kLoadWarps = kConfig.loader == Loader::kAffine ? 1 : 2;
  static constexpr int kFinishWarps = 4 - kLoadWarps;
  // Arrivals that complete a phase: TMA counts bytes behind one arrival of each warp; cp.async
  // arrives per lane.
  static constexpr int kRawArrivals = kTma ? kLoadWarps : 32 * kLoadWarps;
  static constexpr int kFullArrivalsK = kTransformK ? kFinishWarps : kRawArrivals;
  static constexpr int kFullArrivalsV = kTransformV ? kFinishWarps : kRawArrivals;
  static constexpr int kConsumerWarps = 4 * kConfig.num_consumer_warpgroups;
};

// Position in the KV ring, counted in tiles since the kernel began.
template <int kStages>
struct RingSlot {
  int stage;
  unsigned parity;
  PLAIT_DEVICE explicit RingSlot(unsigned tile)
      : stage(static_cast<int>(tile % kStages)), parity(tile / kStages & 1u) {}
  PLAIT_DEVICE void advance(int tiles) {  // at most kStages
    stage += tiles;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void init_barriers(Smem<kConfig>& smem) {
  using R = Roles<kConfig, Variant>;
  for (int s = 0; s < kConfig.num_stages; ++s) {
    ptx::mbarrier_init(&smem.full_k[s], R::kFullArrivalsK);
    ptx::mbarrier_init(&smem.full_v[s], R::kFullArrivalsV);
    ptx::mbarrier_init(&smem.raw_k[s], R::kRawArrivals);
    ptx::mbarrier_init(&smem.raw_v[s], R::kRawArrivals);
    ptx::mbarrier_init(&smem.empty_k[s], R::kConsumerWarps);
    ptx::mbarrier_init(&smem.empty_v[s], R::kConsumerWarps);
  }
  ptx::mbarrier_init(&smem.q_full, R::kFinishWarps);
  ptx::mbarrier_init(&smem.q_empty, R::kConsumerWarps);
  ptx::fence_mbarrier_init();
}

// Calls body(unit) for the units of this CTA, in the plan's order.
template <KernelConfig kConfig, class F>
PLAIT_DEVICE void for_each_unit(const Params& params, F&& body) {
  const PlanView& plan = *params.plan;
  if (static_cast<int>(blockIdx.x) >= plan.num_ctas) return;
  const int item_end = plan.cta_item_indptr[blockIdx.x + 1];
  unsigned tile = 0;
  for (int i = plan.cta_item_indptr[blockIdx.x]; i < item_end; ++i) {
    const WorkItem& item = plan.items[i];
    const RowBlock& block = plan.row_blocks[item.row_block];
    const TileList tiles = tiles_of(item, params.visible, block.kv_pos_begin, kConfig.tile_kv);
    const FullTiles full_tiles =
        full_tiles_of(item, params.visible, block.kv_pos_begin, kConfig.tile_kv);
    const int head_end = item.kv_head_begin + item.num_heads;
    for (int kv_head = item.kv_head_begin; kv_head < head_end; ++kv_head) {
      body(Unit{&item, &block, kv_head, block.first_token, item.first_row, item.num_rows,
                item.kv_end, block.kv_pos_begin, tiles, full_tiles, tile});
      tile += tiles.size();
    }
  }
}

// Packed row `row` of the unit's tile.
PLAIT_DEVICE PackedRow row_of(const Params& params, const int* row_map, const Unit& unit, int row) {
  const int r = unit.first_row + row;
  const int i = r / params.group_size;
  const int token = unit.first_token + i;
  return {row_map != nullptr ? row_map[token] : token,
          unit.kv_head * params.group_size + (r - i * params.group_size)};
}

}  // namespace plait::sm90
