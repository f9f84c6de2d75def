// The load warps, which fill the KV ring: by TMA, whole tiles (affine) or pieces of pages (paged: a
// warp for K and one for V), or by cp.async row by row (gather). A tile without a second stage
// (finish.cuh) goes from its copy straight to the consumers.
#pragma once
#include "host_device/kv_address.h"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "sm90/params.h"
#include "sm90/smem.cuh"

namespace plait::sm90 {

// Whether V of a tile holds rows behind the item's keys that must become zeros: a box does not end
// where the keys do. Gathered tiles have the last key again there, which does no harm that it does
// not do itself; but transforms leave those rows out.
template <class R>
PLAIT_DEVICE bool has_foreign_v_rows(const Unit& unit, int tile, int tile_kv) {
  return R::kForeignRows && (tile + 1) * tile_kv > unit.kv_end;
}

// One of K and V: what a loader needs to know to copy a tile of it.
struct Operand {
  const TensorMap* map;       // TMA
  const unsigned char* data;  // gather
  const KvStrides* stride;
  const RowUnits* units;
  int head_dim;
};

// A tile is one box a panel of an affine tensor, issued by one lane.
template <KernelConfig kConfig, class Variant>
struct AffineLoader {
  const Params& params;
  int first_row[3];  // as PagedLoader::page

  PLAIT_DEVICE AffineLoader(const Sm90Maps&, const Params& params) : params(params) {}

  PLAIT_DEVICE void start(const Unit& unit) {
    first_row[0] =
        static_cast<int>(first_entry(params.plan->tables[unit.block->level], *unit.block));
  }
  PLAIT_DEVICE void look_up(const Unit&, int) {}
  PLAIT_DEVICE void advance() {
    first_row[2] = first_row[1];
    first_row[1] = first_row[0];
  }
  template <int kBehind>
  PLAIT_DEVICE void copy(int kv_head, int tile, const Operand& operand, unsigned char* smem,
                         ptx::Barrier* barrier) {
    __syncwarp();  // the lane that copies does not run ahead: others would miss a barrier's phases
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier,
                                   copied_bytes(kConfig, kConfig.tile_kv, operand.head_dim));
    for (int panel = 0; panel < boxes_of(kConfig, operand.head_dim); ++panel) {
      ptx::tma_load_4d(smem + panel * kConfig.tile_kv * kPanelRowBytes, operand.map, barrier,
                       panel * kPanelCols, first_row[kBehind] + tile * kConfig.tile_kv, kv_head, 0);
    }
  }
};

// The block list of a unit by position. Its loads are behind no branch and nobody looks at them at
// once, so that a tile ahead hides their latency; nor is there a division. (With both, looking up
// took longer than a tile of 64 keys takes to arrive.)
struct BlockList {
  const Params& params;
  const Divisor& block_size;
  const unsigned char* entries = nullptr;  // of position 0
  i64 stride = 0;                          // bytes from block to block

  PLAIT_DEVICE BlockList(const Sm90Maps& maps, const Params& params)
      : params(params), block_size(maps.block_size) {}
  PLAIT_DEVICE void start(const Unit& unit) {
    const BlockTable& table = params.plan->tables[unit.block->level];
    stride = table.stride_block * table.index_bytes;  // before first_entry, which branches
    entries = static_cast<const unsigned char*>(table.indices) +
              first_entry(table, *unit.block) * table.index_bytes;
  }
  // Of 8 bytes the low word: a block of K and V that exists. offset: within the block.
  PLAIT_DEVICE int block(int position, int& offset) const {
    const int i = divide(position, block_size);
    offset = position - i * params.block_size;
    return *reinterpret_cast<const int*>(entries +
                                         static_cast<i64>(static_cast<unsigned>(i)) * stride);
  }
};

// A tile is pieces of box_rows rows, each within one page and a multiple of the swizzle's period of
// 8, so that boxes land as the tile is laid out. A lane issues a piece, one box a panel: copies of
// one warp are issued one after the other, those of the warps of K and V overlap. It looks its page
// up a tile before the copy; a warp that copies both keeps it for V's.
template <KernelConfig kConfig, class Variant>
struct PagedLoader {
  static constexpr int kTileKv = kConfig.tile_kv;
  static constexpr int kNoPage = -1;  // outside every tensor: TMA writes zeros
  static_assert(kTileKv / 8 <= 32, "a lane has one piece");

  const int box_rows, num_pieces;
  BlockList list;
  // Of the tile looked up last, the one before (K's) and before that (V's). row: of the page; -1
  // where the piece is behind the keys.
  int page[3], row[3];

  PLAIT_DEVICE PagedLoader(const Sm90Maps& maps, const Params& params)
      : box_rows(maps.box_rows), num_pieces(kTileKv / box_rows), list(maps, params) {}

  static PLAIT_DEVICE int piece() { return threadIdx.x % 32; }

  PLAIT_DEVICE void start(const Unit& unit) { list.start(unit); }
  PLAIT_DEVICE void look_up(const Unit& unit, int tile) {
    const int key = tile * kTileKv + piece() * box_rows;
    page[0] = list.block(min(key, unit.kv_end - 1), row[0]);
    if (key >= unit.kv_end) row[0] = -1;
  }
  PLAIT_DEVICE void advance() {
    page[2] = page[1];
    row[2] = row[1];
    page[1] = page[0];
    row[1] = row[0];
  }
  template <int kBehind>
  PLAIT_DEVICE void copy(int kv_head, int, const Operand& operand, unsigned char* smem,
                         ptx::Barrier* barrier) {
    __syncwarp();  // lanes without a piece do not run ahead
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive_expect_tx(barrier, copied_bytes(kConfig, kTileKv, operand.head_dim));
    }
    if (piece() >= num_pieces) return;
    const int row_bytes = is_fp8(kConfig.dtype_kv) ? operand.head_dim : kPanelRowBytes;
    unsigned char* to = smem + piece() * box_rows * row_bytes;
    for (int panel = 0; panel < boxes_of(kConfig, operand.head_dim); ++panel) {
      ptx::tma_load_4d(to + panel * kTileKv * kPanelRowBytes, operand.map, barrier,
                       panel * kPanelCols, row[kBehind], kv_head,
                       row[kBehind] < 0 ? kNoPage : page[kBehind]);
    }
  }
};

// Copies by cp.async. Two warps take four rows each at a time, eight lanes a row: a lane's rows
// then have the same place in the swizzle, and its addresses in shared memory lie a constant apart.
// A lane looks up one or two of its eight lanes' rows, a tile ahead of their copy, and hands them
// round by shuffles, as numbers of 32 bits: a row costs a shuffle, a product and its copies.
// Rows behind the keys are the last key's: copies without a condition.
template <KernelConfig kConfig, class Variant>
struct GatherLoader {
  static constexpr int kTileKv = kConfig.tile_kv;
  static constexpr int kPasses = kTileKv / 8;
  static constexpr int kOwned = (kTileKv + 63) / 64;
  static_assert(Roles<kConfig, Variant>::kLoadWarps == 2 && kTileKv % 8 == 0);

  const RowUnits &k_units, &v_units;
  BlockList list;
  int block[kOwned] = {}, offset[kOwned] = {};  // of the tile looked up last
  // Numbers of rows: of the tile before it, whose K is copied; and of V a tile longer.
  int k_row[kOwned] = {}, v_row[2][kOwned] = {};

  PLAIT_DEVICE GatherLoader(const Sm90Maps& maps, const Params& params)
      : k_units(maps.k_units), v_units(maps.v_units), list(maps, params) {}

  // Of a pass of eight rows, the one that this lane copies.
  static PLAIT_DEVICE int row_of_pass() {
    return threadIdx.x % 128 / 32 * 4 + threadIdx.x % 32 / 8;
  }

  PLAIT_DEVICE void start(const Unit& unit) { list.start(unit); }
  PLAIT_DEVICE void look_up(const Unit& unit, int tile) {
    const int first = tile * kTileKv + threadIdx.x % 8 * 8 + row_of_pass();
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      block[i] = list.block(min(first + 64 * i, unit.kv_end - 1), offset[i]);
    }
  }
  PLAIT_DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      v_row[1][i] = v_row[0][i];
      k_row[i] = k_units.number(block[i], offset[i]);
      v_row[0][i] = v_units.number(block[i], offset[i]);
    }
  }
  template <int kBehind>
  PLAIT_DEVICE void copy(int kv_head, int, const Operand& operand, unsigned char* smem,
                         ptx::Barrier* barrier) {
    const int(&row)[kOwned] = kBehind == 1 ? k_row : v_row[1];
    constexpr bool kFp8 = is_fp8(kConfig.dtype_kv);
    constexpr int kBytes = bytes_of(kConfig.dtype_kv), kCols = kChunkBytes / kBytes;  // of a chunk
    const int head_dim = operand.head_dim, chunk = threadIdx.x % 8, first_row = row_of_pass();
    unsigned char* to = smem + (kFp8 ? first_row * head_dim + chunk * kChunkBytes
                                     : chunk_offset(kTileKv, first_row, chunk));
    const int row_bytes = kFp8 ? head_dim : kPanelRowBytes;
    const int panel_bytes = kFp8 ? kPanelRowBytes : kTileKv * kPanelRowBytes;
    const i64 head = static_cast<unsigned>(kv_head) * operand.stride->head * kBytes;
    const unsigned char* first = ptx::opaque(operand.data + head + chunk * kChunkBytes);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int number = __shfl_sync(~0u, row[pass / 8], pass % 8, 8);
      const unsigned char* from = first + i64{number} * operand.units->bytes;
      for (int panel = 0; panel * 8 * kCols < head_dim; ++panel) {
        const int column = (panel * 8 + chunk) * kCols;
        if (column >= padded_dim(head_dim)) continue;
        unsigned char* panel_to = to + pass * 8 * row_bytes + panel * panel_bytes;
        if (head_dim == padded_dim(head_dim)) {
          ptx::cp_async_16(panel_to, from + panel * kPanelRowBytes);
        } else {
          ptx::cp_async_16(panel_to, from + panel * kPanelRowBytes, column < head_dim ? 16 : 0);
        }
      }
    }
    ptx::cp_async_mbarrier_arrive(barrier);
  }
};

// Copies K and V of all units, or, by a warp each, one of them as far ahead as the ring has room.
// A warp of both copies K one tile ahead of V, as the consumers of rows need them, from unit to
// unit too. (Those of split keys give up K's stages, and then V's, in the order of their tiles.)
template <KernelConfig kConfig, class Variant, bool kLoadsK, bool kLoadsV>
PLAIT_DEVICE void load_kv(const Sm90Maps& maps, const Params& params, Smem<kConfig>& smem) {
  using R = Roles<kConfig, Variant>;
  using Slot = RingSlot<Smem<kConfig>::kCopyStages>;
  using Loader = Select<kConfig.loader == Loader::kAffine, AffineLoader<kConfig, Variant>,
                        Select<kConfig.loader == Loader::kPaged, PagedLoader<kConfig, Variant>,
                               GatherLoader<kConfig, Variant>>>;
  Loader loader(maps, params);
  const Operand k{&maps.k, static_cast<const unsigned char*>(params.k), &params.k_stride,
                  &maps.k_units, kConfig.head_dim_qk};
  const Operand v{&maps.v, static_cast<const unsigned char*>(params.v), &params.v_stride,
                  &maps.v_units, kConfig.head_dim_vo};
  constexpr int kVBehind = kLoadsK ? 1 : 0;  // tiles
  Slot slot(0);
  int v_tile = -1, v_kv_head = 0;      // whose V is due; -1: there was none
  bool second_stage = R::kTransformV;  // of that V
  const auto copy_v = [&](const Slot& at) {
    if (!kLoadsV || v_tile < 0) return;
    ptx::mbarrier_wait(smem.vacant_v(at.stage), at.parity ^ 1);
    loader.template copy<1 + kVBehind>(
        v_kv_head, v_tile, v, smem.copy_of_v(at.stage),
        second_stage ? &smem.raw_v[at.stage] : &smem.full_v[at.stage]);
  };
  for (unsigned u = 0;; ++u) {
    const Unit& unit = smem.await_unit(u);
    const TileList tiles = unit.tiles;
    const int num_tiles = tiles.size(), kv_head = unit.kv_head;
    if (num_tiles == 0) {  // V is not kept back: more units may come only behind its own
      if (kVBehind > 0) {
        loader.advance();
        copy_v(slot.before());
        v_tile = -1;
      }
      if (unit.item == nullptr) break;
    }
    for (int j = 0, tile = 0, next_tile = 0; j < num_tiles; ++j) {
      if (j == 0) {
        next_tile = tiles[0];
        loader.start(unit);
        loader.look_up(unit, next_tile);
      }
      tile = next_tile;
      loader.advance();
      if (j + 1 < num_tiles) {
        next_tile = tiles[j + 1];
        loader.look_up(unit, next_tile);
      }
      if (kLoadsK) {
        ptx::mbarrier_wait(smem.vacant_k(slot.stage), slot.parity ^ 1);
        loader.template copy<1>(
            kv_head, tile, k, smem.copy_of_k(slot.stage),
            R::kTransformK ? &smem.raw_k[slot.stage] : &smem.full_k[slot.stage]);
      }
      if (kVBehind > 0) copy_v(slot.before());
      v_tile = tile;
      v_kv_head = kv_head;
      second_stage = R::kTransformV || has_foreign_v_rows<R>(unit, tile, kConfig.tile_kv);
      if (kVBehind == 0) copy_v(slot);
      slot.advance(1);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.release_unit(u);
  }
}

}  // namespace plait::sm90
