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
  const unsigned char* data;  // gather, as are the next two
  i64 stride_head;
  int unit_bytes;
  int head_dim;
};
template <KernelConfig kConfig>
PLAIT_DEVICE Operand operand_of(const Sm90Maps& maps, const Params& params, bool is_v) {
  constexpr int kQk = kConfig.head_dim_qk, kVo = kConfig.head_dim_vo;
  return {is_v ? &maps.v : &maps.k, static_cast<const unsigned char*>(is_v ? params.v : params.k),
          is_v ? params.v_stride.head : params.k_stride.head,
          is_v ? maps.v_units.bytes : maps.k_units.bytes, kQk == kVo || !is_v ? kQk : kVo};
}

// A loader knows where three tiles lie: of the one looked up last, of the one whose K is copied,
// which was looked up before, and of the one whose V is. advance() makes each the next.
//
// Affine: a tile is one box a panel, issued by one lane.
template <KernelConfig kConfig, class Variant>
struct AffineLoader {
  static constexpr int kVBehind = Roles<kConfig, Variant>::kLoadsApart ? 1 : 2;
  int first_row[3];

  PLAIT_DEVICE AffineLoader(const Sm90Maps&, const Params&) {}

  PLAIT_DEVICE void look_up(const Unit& unit, int tile) {
    first_row[0] = static_cast<int>(unit.list.begin) + tile * kConfig.tile_kv;
  }
  PLAIT_DEVICE void advance() {
    first_row[2] = first_row[1];
    first_row[1] = first_row[0];
  }
  PLAIT_DEVICE void copy(bool is_v, int kv_head, const Operand& operand, unsigned char* smem,
                         ptx::Barrier* barrier) {
    __syncwarp();  // the lane that copies does not run ahead: others would miss a barrier's phases
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier,
                                   copied_bytes(kConfig, kConfig.tile_kv, operand.head_dim));
    const int row = is_v ? first_row[kVBehind] : first_row[1];
    for (int panel = 0; panel < boxes_of(kConfig, operand.head_dim); ++panel) {
      ptx::tma_load_4d(smem + panel * kConfig.tile_kv * kPanelRowBytes, operand.map, barrier,
                       panel * kPanelCols, row, kv_head, 0);
    }
  }
};

// The block list of a unit by position. Its loads are behind no branch and nobody looks at them at
// once, so that a tile ahead hides their latency; nor is there a division. (With both, looking up
// took longer than a tile of 64 keys takes to arrive.)
struct Blocks {
  const Divisor& block_size;
  const int keys;  // of a block

  // Of 8 bytes the low word: a block of K and V that exists. offset: within the block.
  PLAIT_DEVICE int at(const Unit& unit, int position, int& offset) const {
    const int i = divide(position, block_size);
    offset = position - i * keys;
    return *entry(unit.list, i);
  }
  static PLAIT_DEVICE const int* entry(const BlockList& list, int i) {
    return reinterpret_cast<const int*>(list.begin +
                                        static_cast<i64>(static_cast<unsigned>(i)) * list.stride);
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

  static constexpr int kVBehind = Roles<kConfig, Variant>::kLoadsApart ? 1 : 2;
  const int box_rows, num_pieces;
  Blocks blocks;
  int page[3], row[3];  // row: of the page; -1 where the piece is behind the keys

  PLAIT_DEVICE PagedLoader(const Sm90Maps& maps, const Params& params)
      : box_rows(maps.box_rows),
        num_pieces(kTileKv / box_rows),
        blocks{maps.block_size, params.block_size} {}

  static PLAIT_DEVICE int piece() { return threadIdx.x % 32; }

  PLAIT_DEVICE void look_up(const Unit& unit, int tile) {
    const int key = tile * kTileKv + piece() * box_rows;
    page[0] = blocks.at(unit, min(key, unit.kv_end - 1), row[0]);
    if (key >= unit.kv_end) row[0] = -1;
  }
  PLAIT_DEVICE void advance() {
    page[2] = page[1];
    row[2] = row[1];
    page[1] = page[0];
    row[1] = row[0];
  }
  PLAIT_DEVICE void copy(bool is_v, int kv_head, const Operand& operand, unsigned char* smem,
                         ptx::Barrier* barrier) {
    __syncwarp();  // lanes without a piece do not run ahead
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive_expect_tx(barrier, copied_bytes(kConfig, kTileKv, operand.head_dim));
    }
    if (piece() >= num_pieces) return;
    const int row_bytes = is_fp8(kConfig.dtype_kv) ? operand.head_dim : kPanelRowBytes;
    unsigned char* to = smem + piece() * box_rows * row_bytes;
    const int from_row = is_v ? row[kVBehind] : row[1];
    const int from_page = is_v ? page[kVBehind] : page[1];
    for (int panel = 0; panel < boxes_of(kConfig, operand.head_dim); ++panel) {
      ptx::tma_load_4d(to + panel * kTileKv * kPanelRowBytes, operand.map, barrier,
                       panel * kPanelCols, from_row, kv_head, from_row < 0 ? kNoPage : from_page);
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
  Blocks blocks;
  int block[kOwned] = {}, offset[kOwned] = {};  // of the tile looked up last
  // Numbers of rows: of the tile before it, whose K is copied; and of V a tile longer.
  int k_row[kOwned] = {}, v_row[2][kOwned] = {};

  PLAIT_DEVICE GatherLoader(const Sm90Maps& maps, const Params& params)
      : k_units(maps.k_units), v_units(maps.v_units), blocks{maps.block_size, params.block_size} {}

  // Of a pass of eight rows, the one that this lane copies.
  static PLAIT_DEVICE int row_of_pass() {
    return threadIdx.x % 128 / 32 * 4 + threadIdx.x % 32 / 8;
  }

  PLAIT_DEVICE void look_up(const Unit& unit, int tile) {
    const int first = tile * kTileKv + threadIdx.x % 8 * 8 + row_of_pass();
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      block[i] = blocks.at(unit, min(first + 64 * i, unit.kv_end - 1), offset[i]);
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
  PLAIT_DEVICE void copy(bool is_v, int kv_head, const Operand& operand, unsigned char* smem,
                         ptx::Barrier* barrier) {
    constexpr bool kFp8 = is_fp8(kConfig.dtype_kv);
    constexpr int kBytes = bytes_of(kConfig.dtype_kv), kCols = kChunkBytes / kBytes;  // of a chunk
    constexpr int kMaxDim =
        kConfig.head_dim_qk > kConfig.head_dim_vo ? kConfig.head_dim_qk : kConfig.head_dim_vo;
    constexpr bool kPadded = kConfig.head_dim_qk % 16 != 0 || kConfig.head_dim_vo % 16 != 0;
    const int head_dim = operand.head_dim, chunk = threadIdx.x % 8, first_row = row_of_pass();
    int row[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) row[i] = is_v ? v_row[1][i] : k_row[i];
    const unsigned to = ptx::smem_address(smem) + (kFp8 ? first_row * head_dim + chunk * kChunkBytes
                                                        : chunk_offset(kTileKv, first_row, chunk));
    const int row_bytes = kFp8 ? head_dim : kPanelRowBytes;
    constexpr int kPanelBytes = kFp8 ? kPanelRowBytes : kTileKv * kPanelRowBytes;
    const i64 head = static_cast<unsigned>(kv_head) * operand.stride_head * kBytes;
    const unsigned char* first = ptx::opaque(operand.data + head + chunk * kChunkBytes);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int number = __shfl_sync(~0u, row[pass / 8], pass % 8, 8);
      const unsigned char* from = first + i64{number} * operand.unit_bytes;
#pragma unroll
      for (int panel = 0; panel * 8 * kCols < kMaxDim; ++panel) {
        const int column = (panel * 8 + chunk) * kCols;
        if (column >= padded_dim(head_dim)) continue;
        const unsigned panel_to = to + pass * 8 * row_bytes + panel * kPanelBytes;
        if constexpr (kPadded) {
          ptx::cp_async_16(panel_to, from + panel * kPanelRowBytes, column < head_dim ? 16 : 0);
        } else {
          ptx::cp_async_16(panel_to, from + panel * kPanelRowBytes);
        }
      }
    }
    ptx::cp_async_mbarrier_arrive(barrier);
  }
};

// A copy of K or V of a tile. kv_head: -1: none is due.
struct Due {
  int kv_head;
  bool has_foreign_rows;
};

// Copies K (is_v 0) and V (1) of all units, or, by a warp each, one of them, as far ahead as the
// ring has room. A warp of both copies K one tile ahead of V, as the consumers of rows need them,
// and from unit to unit too if the next one is known by then. (Those of split keys give up K's
// stages, and then V's, in the order of their tiles.) Tiles are looked up one ahead, likewise.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void load_kv(const Sm90Maps& maps, const Params& params, Smem<kConfig>& smem) {
  using R = Roles<kConfig, Variant>;
  using Slot = RingSlot<Smem<kConfig>::kCopyStages>;
  using Loader = Select<kConfig.loader == Loader::kAffine, AffineLoader<kConfig, Variant>,
                        Select<kConfig.loader == Loader::kPaged, PagedLoader<kConfig, Variant>,
                               GatherLoader<kConfig, Variant>>>;
  const int warp = threadIdx.x % 128 / 32;
  const int first_operand = R::kLoadsApart ? warp : 0, end_operand = R::kLoadsApart ? warp + 1 : 2;
  Loader loader(maps, params);
  Slot slot(0);
  bool ahead = false;  // the first tile of the unit to come has been looked up
  int tile = 0;        // the one looked up last
  Due due_v{-1, false};
  for (unsigned u = 0;; ++u) {
    const Unit& unit = smem.await_unit(u);
    if (unit.item == nullptr) break;
    const int num_tiles = unit.tiles.size(), loads_end = max(num_tiles - kTilesBeforeDraw, 0);
    // A round looks up a tile, copies K of the one looked up before and V of the one before that.
    // -1 only looks up, and one more than there are tiles only copies V.
    for (int j = ahead ? 0 : -1; j < num_tiles + !ahead; ++j) {
      if (j == loads_end && threadIdx.x % 128 == 0) {
        ptx::mbarrier_arrive(&smem.unit_loads_end[u % kUnits]);
      }
      loader.advance();
      const bool has_tile = static_cast<unsigned>(j) < static_cast<unsigned>(num_tiles);
      const Due due_k{has_tile ? unit.kv_head : -1,
                      has_foreign_v_rows<R>(unit, tile, kConfig.tile_kv)};
      const Unit* of = &unit;
      int next = j + 1;
      bool known = next < num_tiles;
      if (!known) {
        of = &smem.units[(u + 1) % kUnits];
        next = 0;
        known = ahead = __all_sync(~0u, smem.has_unit(u + 1)) && of->tiles.size() > 0;
      }
      if (known) {
        tile = of->tiles[next];
        loader.look_up(*of, tile);
      }
      if (R::kLoadsApart) due_v = due_k;
#pragma unroll  // else K and V cost 13 % with head_dim 256
      for (int is_v = first_operand; is_v < end_operand; ++is_v) {
        const Due due{is_v ? due_v.kv_head : due_k.kv_head,
                      is_v ? due_v.has_foreign_rows : due_k.has_foreign_rows};
        if (due.kv_head < 0) continue;
        const Slot at = is_v && !R::kLoadsApart ? slot.before() : slot;
        ptx::mbarrier_wait(is_v ? smem.vacant_v(at.stage) : smem.vacant_k(at.stage), at.parity ^ 1);
        const bool second_stage = is_v ? R::kTransformV || due.has_foreign_rows : R::kTransformK;
        ptx::Barrier* barrier = is_v           ? second_stage ? smem.raw_v : smem.full_v
                                : second_stage ? smem.raw_k
                                               : smem.full_k;
        loader.copy(is_v, due.kv_head, operand_of<kConfig>(maps, params, is_v),
                    is_v ? smem.copy_of_v(at.stage) : smem.copy_of_k(at.stage), barrier + at.stage);
      }
      due_v = due_k;
      if (has_tile) slot.advance(1);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.release_unit(u);
  }
}

}  // namespace plait::sm90
