// The sm90a kernel's shared memory and the barriers of its KV ring. Who arrives, who waits:
//   full_k, full_v     [stage]    loaders (or finishers, finish.cuh) arrive, consumers wait
//   raw_k, raw_v       [stage]    loaders arrive, finishers wait: tiles that need a second stage
//   empty_k, empty_v   [stage]    every consumer warp arrives, loaders wait
//   vacant_k, vacant_v [landing]  of fp8: finishers arrive, loaders wait
//   q_full, q_empty    [q stage]  finishers and consumer warps, once a unit (item x kv head)
//   unit_full          [unit]     one finisher arrives, the producer's warps wait
//   unit_empty         [unit]     every warp arrives, that finisher waits
//   unit_loads_end     [unit]     a loader arrives, that finisher waits, if it will draw an item
// fp8 K and V land in a ring of their own, and finishers make the tile of them: then raw_k and
// raw_v are of that ring, and finishers wait for empty_k and empty_v.
#pragma once
#include "host_device/convert.h"
#include "host_device/kv_address.h"
#include "host_device/softmax_state.h"
#include "host_device/variant.h"
#include "ptx/mbarrier.cuh"
#include "sm90/layout.h"
#include "sm90/smem.h"
#include "tile/draw.cuh"
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
  kTurnBarrier = kOrderBarrier + 3,  // + warpgroup
};

// Invariant mode: a unit is a chunk of an item and kv head. Where a whole head has several, rows
// are folded chunk by chunk (store.cuh), and Unit::partial_row says which of them this is.
enum UnitRows { kFinalRows = -1, kFirstChunk = -2, kMiddleChunk = -3, kLastChunk = -4 };

// One unit of work: an item and one of its kv heads, copied out of the plan so that nobody else has
// to follow its pointers.
struct Unit {
  const WorkItem* item;  // null: there are no more units
  const RowBlock* block;
  int kv_head;
  int first_token, first_row, num_rows;
  int kv_end, kv_pos_begin;  // keys count from the first of tile 0, whose position this is
  TileList tiles;
  FullTiles full_tiles;
  unsigned first_tile;  // of the ring
  int key_split;
  int partial_row;  // of this head's first row; -1: rows are final, or as UnitRows has them
  BlockList list;   // unless there are no tiles; from tile 0 on
};
static_assert(sizeof(Unit) == kUnitBytes);

// The item's shape. (An index into the list of shapes would be a load from memory.)
template <KernelConfig kConfig>
PLAIT_DEVICE TileShape shape_of(const WorkItem& item) {
  if constexpr (kConfig.num_shapes == 1) return kConfig.shapes[0];
  return item.shape == 0 ? kConfig.shapes[0] : kConfig.shapes[1];
}

// Whose partial rows are written without that anybody has been told yet.
template <KernelConfig kConfig>
struct alignas(8) Pending {
  int num_rows;  // of all
  TokenHead heads[num_pending(kConfig)];
};

template <KernelConfig kConfig, bool kFp8 = is_fp8(kConfig.dtype_kv)>
struct LandingRing {};
template <KernelConfig kConfig>
struct alignas(1024) LandingRing<kConfig, true> {
  unsigned char landing_k[kConfig.num_landing_stages][kConfig.tile_kv * kConfig.head_dim_qk];
  unsigned char landing_v[kConfig.num_landing_stages][kConfig.tile_kv * kConfig.head_dim_vo];
};

template <KernelConfig kConfig>
struct alignas(1024) Smem : LandingRing<kConfig> {
  static constexpr bool kFp8 = is_fp8(kConfig.dtype_kv);
  static constexpr int kStages = kConfig.num_stages, kQStages = kConfig.num_q_stages;
  static constexpr int kCopyStages = kFp8 ? kConfig.num_landing_stages : kStages;
  static constexpr int kTileQ = tile_q(kConfig);

  unsigned char q[kQStages][tile_bytes(kTileQ, kConfig.head_dim_qk)];
  unsigned char k[kStages][tile_bytes(kConfig.tile_kv, kConfig.head_dim_qk)];
  unsigned char v[kStages][tile_bytes(kConfig.tile_kv, kConfig.head_dim_vo)];
  // By consumer warpgroup and row, from a unit's last round to its store; then the merge's tokens.
  SoftmaxState states[64 * kConfig.num_consumer_warpgroups];
  Pending<kConfig> pending[4];      // by consumer warp, of kernels that merge units together
  CtaStart start;                   // the first unit points into it
  Unit units[kUnits];               // unit u is units[u % kUnits]
  int positions[kQStages][kTileQ];  // of the queries in q, for masks
  ptx::Barrier full_k[kStages], full_v[kStages];
  ptx::Barrier raw_k[kFp8 ? 2 * kCopyStages : kStages];  // of fp8 then vacant_k; likewise raw_v
  ptx::Barrier raw_v[kFp8 ? 2 * kCopyStages : kStages];
  ptx::Barrier empty_k[kStages], empty_v[kStages], q_full[kQStages], q_empty[kQStages];
  ptx::Barrier unit_full[kUnits], unit_empty[kUnits], unit_loads_end[kUnits];

  // Where loaders copy to, one of kCopyStages, and what tells them that they may.
  PLAIT_DEVICE unsigned char* copy_of_k(int stage) {
    if constexpr (kFp8) {
      return this->landing_k[stage];
    } else {
      return k[stage];
    }
  }
  PLAIT_DEVICE unsigned char* copy_of_v(int stage) {
    if constexpr (kFp8) {
      return this->landing_v[stage];
    } else {
      return v[stage];
    }
  }
  PLAIT_DEVICE ptx::Barrier* vacant_k(int stage) {
    return kFp8 ? &raw_k[kCopyStages + stage] : &empty_k[stage];
  }
  PLAIT_DEVICE ptx::Barrier* vacant_v(int stage) {
    return kFp8 ? &raw_v[kCopyStages + stage] : &empty_v[stage];
  }

  PLAIT_DEVICE Unit& await_unit(unsigned u) {
    ptx::mbarrier_wait(&unit_full[u % kUnits], u / kUnits & 1);
    return units[u % kUnits];
  }
  PLAIT_DEVICE bool has_unit(unsigned u) {
    return ptx::mbarrier_test(&unit_full[u % kUnits], u / kUnits & 1);
  }
  // By one lane of a warp that is done with unit u.
  PLAIT_DEVICE void release_unit(unsigned u) { ptx::mbarrier_arrive(&unit_empty[u % kUnits]); }
};

// What follows from configuration and variant: who does what in the producer warpgroup. Its first
// kLoadWarps issue copies of K and V; the others, the finishers, load Q and apply second stages.
template <KernelConfig kConfig, class Variant>
struct Roles {
  using Traits = VariantTraits<Variant>;
  static constexpr bool kTma = kConfig.loader != Loader::kGather;
  static constexpr bool kFp8 = is_fp8(kConfig.dtype_kv);
  // Whether every tile of K, of V has a second stage.
  static constexpr bool kTransformK = kFp8 || Traits::kHasKeyTransform;
  static constexpr bool kTransformV = kFp8 || Traits::kHasValueTransform;
  // Whether rows of V behind the keys must become zeros (finish.cuh).
  static constexpr bool kForeignRows = kTma || Traits::kHasValueTransform;
  // Boxes of pages are issued by one warp where the others have much to do, and K may wait for V.
  static constexpr bool kOneLoads = kTma && (kTransformK || kTransformV) && key_split(kConfig) <= 2;
  static constexpr int kLoadWarps = kConfig.loader == Loader::kAffine || kOneLoads ? 1 : 2;
  static constexpr int kFinishWarps = 4 - kLoadWarps;
  static constexpr bool kLoadsApart = kLoadWarps == 2 && loads_apart(kConfig);
  // Arrivals that complete a phase: TMA counts bytes behind one arrival; cp.async arrives per lane.
  static constexpr int kRawArrivals = kTma ? 1 : 32 * kLoadWarps;
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
  PLAIT_DEVICE RingSlot before() const {
    RingSlot slot = *this;
    slot.stage = stage == 0 ? kStages - 1 : stage - 1;
    slot.parity = parity ^ (stage == 0);
    return slot;
  }
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
#pragma unroll 1  // for NVRTC; the first item takes longer to arrive
  for (int s = 0; s < kConfig.num_stages; ++s) {
    ptx::mbarrier_init(&smem.full_k[s], R::kFullArrivalsK);
    ptx::mbarrier_init(&smem.full_v[s], R::kFullArrivalsV);
    ptx::mbarrier_init(&smem.empty_k[s], R::kConsumerWarps);
    ptx::mbarrier_init(&smem.empty_v[s], R::kConsumerWarps);
  }
#pragma unroll 1
  for (int s = 0; s < Smem<kConfig>::kCopyStages; ++s) {
    ptx::mbarrier_init(&smem.raw_k[s], R::kRawArrivals);
    ptx::mbarrier_init(&smem.raw_v[s], R::kRawArrivals);
    if constexpr (R::kFp8) {
      ptx::mbarrier_init(smem.vacant_k(s), R::kFinishWarps);
      ptx::mbarrier_init(smem.vacant_v(s), R::kFinishWarps);
    }
  }
  for (int s = 0; s < kConfig.num_q_stages; ++s) {
    ptx::mbarrier_init(&smem.q_full[s], R::kFinishWarps);
    ptx::mbarrier_init(&smem.q_empty[s], R::kConsumerWarps);
  }
#pragma unroll 1
  for (int s = 0; s < kUnits; ++s) {
    ptx::mbarrier_init(&smem.unit_full[s], 1);
    ptx::mbarrier_init(&smem.unit_loads_end[s], 1);
    ptx::mbarrier_init(&smem.unit_empty[s], 4 + R::kConsumerWarps);
  }
  ptx::fence_mbarrier_init();
}

// Walks the units of this CTA: of its own items in the plan's order, then of those that it draws.
// One thread does.
template <KernelConfig kConfig>
struct UnitWalker {
  const Params& params;
  int item, item_end, head = 0;  // the next: of the plan; of the item
  int chunk = 0;                 // invariant mode: of the head
  unsigned tile = 0, num_units = 0;

  PLAIT_DEVICE UnitWalker(const Params& params, const CtaStart& start)
      : params(params), item(start.item_begin), item_end(start.item_end) {}

  // Whether the next unit's item is still to be drawn.
  PLAIT_DEVICE bool draws() const { return head == 0 && chunk == 0 && item >= item_end; }

  // Waits until everybody is done with the unit that lies where the next one goes, and writes it.
  // draws_late: an item is drawn only when the loads of the unit before end soon, since the queue
  // is for those who are free first.
  PLAIT_DEVICE void write(Smem<kConfig>& smem, bool draws_late) {
    const int place = num_units % kUnits;
    ptx::mbarrier_wait(&smem.unit_empty[place], ~(num_units / kUnits) & 1);
    // Over by then; but a phase that nobody has waited for is an error to compute-sanitizer.
    ptx::mbarrier_wait(&smem.unit_loads_end[place], ~(num_units / kUnits) & 1);
    Unit& unit = smem.units[place];
    if (draws()) {
      if (draws_late && num_units > 0 && has_queue(params)) {
        const unsigned before = num_units - 1;
        ptx::mbarrier_wait(&smem.unit_loads_end[before % kUnits], before / kUnits & 1);
      }
      item = draw_item(params);
    }
    if (item < 0) {
      unit = Unit{.item = nullptr, .first_tile = tile, .key_split = 1, .partial_row = -1};
    } else {
      fill(smem, unit);
    }
    ptx::mbarrier_arrive(&smem.unit_full[place]);
    ++num_units;
  }

 private:
  PLAIT_DEVICE void fill(const Smem<kConfig>& smem, Unit& unit) {
    // The first item is there already: no pointers are followed to it.
    const PlanView& plan = *params.plan;
    const bool at_hand = num_units == 0 && item < item_end;
    const WorkItem& from = at_hand ? smem.start.item : plan.items[item];
    const RowBlock& block = at_hand ? smem.start.block : plan.row_blocks[from.row_block];
    const BlockTable& table = at_hand ? smem.start.table : plan.tables[block.level];
    unit.item = &from;
    unit.block = &block;
    unit.kv_head = from.kv_head_begin + head;
    unit.first_token = block.first_token;
    unit.first_row = from.first_row;
    unit.num_rows = from.num_rows;
    // Windows begin where their keys do. (With fp8 the warps that finish tiles would spill.)
    const int tile_0 = is_fp8(kConfig.dtype_kv) ? 0 : from.kv_begin % kConfig.tile_kv;
    unit.kv_pos_begin = block.kv_pos_begin + tile_0;
    const auto take_keys = [&](const WorkItem& keys) {
      unit.kv_end = keys.kv_end - tile_0;
      unit.tiles = tiles_of(keys, params.visible, unit.kv_pos_begin, kConfig.tile_kv, tile_0);
      unit.full_tiles =
          full_tiles_of(keys, params.visible, unit.kv_pos_begin, kConfig.tile_kv, tile_0);
    };
    int num_chunks = 1;
    if constexpr (kConfig.chunk_keys > 0) {  // tile_0 is 0: cuts fall on whole chunks
      const TileList chunks =
          tiles_of(from, params.visible, block.kv_pos_begin, kConfig.chunk_keys);
      num_chunks = chunks.size();
      take_keys(chunk_of(from, params.visible, block.kv_pos_begin, chunks[chunk],
                         kConfig.chunk_keys, kConfig.tile_kv));
    } else {
      take_keys(from);
    }
    unit.first_tile = tile;
    unit.key_split = shape_of<kConfig>(from).key_split;
    unit.partial_row = from.partial_row < 0 ? -1 : from.partial_row + head * from.num_rows;
    if (unit.tiles.size() > 0) {
      unit.list = block_list(table, block);
      if (kConfig.loader == Loader::kAffine) {
        unit.list.begin += tile_0;
      } else if (tile_0 > 0) {
        unit.list.begin += tile_0 / params.block_size * unit.list.stride;
      }
    }
    tile += unit.tiles.size();
    if constexpr (kConfig.chunk_keys > 0) {
      if (num_chunks > 1 && from.partial_row < 0) {
        unit.partial_row = chunk == 0                ? kFirstChunk
                           : chunk + 1 == num_chunks ? kLastChunk
                                                     : kMiddleChunk;
      }
      if (++chunk < num_chunks) return;
      chunk = 0;
    }
    if (++head == from.num_heads) {
      head = 0;
      ++item;
    }
  }
};

// Packed row `row` of the unit's tile.
PLAIT_DEVICE PackedRow row_of(const Params& params, const int* row_map, const Unit& unit, int row) {
  const int r = unit.first_row + row;
  const int i = r / params.group_size;
  const int token = unit.first_token + i;
  return {row_map != nullptr ? row_map[token] : token,
          unit.kv_head * params.group_size + (r - i * params.group_size)};
}

}  // namespace plait::sm90
