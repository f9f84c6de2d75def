// The producer warpgroup. Load warps fill the KV ring: by TMA, whole tiles (affine) or pieces of
// pages (paged: a warp for K and one for V), or by cp.async row by row (gather). Finish warps load
// Q and run second stages on tiles already in shared memory: key, value and query transforms in
// place, and zeros over the V rows that no key owns (0 * NaN is NaN). A tile without a second stage
// goes from its copy straight to the consumers. fp8 tiles have one always: they land in a ring of
// their own, and finish warps write the tile of 16-bit elements, which transforms then find in
// place.
#pragma once
#include "host_device/kv_address.h"
#include "host_device/scales.h"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "sm90/params.h"
#include "sm90/smem.cuh"
#include "tile/register_row.cuh"
#include "tile/rows.cuh"
#include "tile/store_out.cuh"
#include "tile/widen.cuh"

namespace plait::sm90 {

// Whether V of a tile holds rows behind the item's keys that must become zeros: a box does not end
// where the keys do. Gathered tiles have the last key again there, which does no harm that it does
// not do itself; but transforms leave those rows out.
template <class R>
PLAIT_DEVICE bool has_foreign_v_rows(const Unit& unit, int tile, int tile_kv) {
  return R::kForeignRows && (tile + 1) * tile_kv > unit.kv_end;
}

// ---- load warps ---------------------------------------------------------------------------------

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

// ---- finish warps -------------------------------------------------------------------------------

// Calls transform(number, accessor) for the first num_rows rows of a tile of `rows` rows, which are
// numbered from first_number on. kInOrder: by position. turn: grows by one from tile to tile, so
// that no warp has the odd run of each.
template <KernelConfig kConfig, class Variant, int kDim, Dtype kDtype, bool kInOrder = true,
          class F>
PLAIT_DEVICE void transform_rows(unsigned char* tile, int rows, int num_rows, int first_number,
                                 unsigned turn, F&& transform) {
  using R = Roles<kConfig, Variant>;
  constexpr int kThreads = 32 * R::kFinishWarps;
  const unsigned thread = (threadIdx.x % 128 - 32 * R::kLoadWarps + 32 * turn) % kThreads;
  plait::transform_rows<Storage<kDtype>, kDim, kInOrder, kRowsOfRun, kThreads>(
      tile, num_rows, first_number, static_cast<int>(thread),
      [&](int row, int col) { return element_offset(rows, row, col); }, transform);
}

// This warp's arrival for data that its lanes wrote with ordinary stores or cp.async; `count` where
// it stands for all who are expected.
PLAIT_DEVICE void arrive_finished(ptx::Barrier* barrier, int count = 1) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier, count);
}

// An fp8 tile that has landed becomes `tile`, which is empty; then its landing stage is vacant.
// With kCut rows beyond the num_keys of the unit become zeros. By all finish warps.
template <KernelConfig kConfig, class Variant, int kDim, bool kCut>
PLAIT_DEVICE void widen_tile(const unsigned char* landing, ptx::Barrier* vacant,
                             unsigned char* tile, int num_keys) {
  using R = Roles<kConfig, Variant>;
  constexpr int kBatch = kConfig.head_dim_qk > 128 ? 2 : 4;  // 4: 8 bytes spilled with 192
  widen_rows<kConfig.dtype_kv, kConfig.dtype_q, kDim, kConfig.tile_kv, 32 * R::kFinishWarps, kBatch,
             kCut>(
      landing, tile, num_keys, threadIdx.x % 128 - 32 * R::kLoadWarps,
      [](unsigned i) { return i * kChunkCols; },
      [](int row, int chunk) { return chunk_offset(kConfig.tile_kv, row, chunk); });
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(vacant);
}

// Q of a unit into `smem_q`: one row of 16-byte chunks a packed row, zeros beyond the last; and its
// rows' positions. Half a warp's lanes each find one of 16 rows, whose chunks all lanes then copy:
// finding a row for each chunk took longer than short units compute.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void load_q(const Params& params, const typename Variant::Params& variant,
                         const Unit& unit, unsigned char* smem_q, int* positions) {
  using R = Roles<kConfig, Variant>;
  constexpr int kChunks = padded_dim(kConfig.head_dim_qk) / kChunkCols;
  constexpr int kThreads = 32 * R::kFinishWarps, kRows = 16;
  const int rows = shape_of<kConfig>(*unit.item).tile_q;
  const auto* q = static_cast<const unsigned char*>(params.q);
  const int* row_map = params.plan->row_map;
  const int* token_position = params.plan->token_position;
  const int lane = threadIdx.x % 32, finish_warp = threadIdx.x % 128 / 32 - R::kLoadWarps;
  for (int first = kRows * finish_warp; first < rows; first += kRows * R::kFinishWarps) {
    const int own = first + lane % kRows;
    i64 offset = 0;
    int position = 0;
    if (own < unit.num_rows) {
      const PackedRow packed = row_of(params, row_map, unit, own);
      position = token_position[packed.token];
      offset = existing_row(params, packed.token) * params.q_stride.token +
               packed.qo_head * params.q_stride.head;
    }
#pragma unroll 2  // 4 spill in the gather kernel
    for (int i = 0; i < kRows * kChunks / 32; ++i) {
      const int row = (32 * i + lane) / kChunks, chunk = (32 * i + lane) % kChunks;
      const i64 from = __shfl_sync(~0u, offset, row) * 2 + chunk * kChunkBytes;
      const bool valid = first + row < unit.num_rows && chunk * kChunkCols < kConfig.head_dim_qk;
      ptx::cp_async_16(smem_q + chunk_offset(Smem<kConfig>::kTileQ, first + row, chunk),
                       q + (valid ? from : 0), valid ? 16 : 0);
    }
    if (lane < kRows) positions[own] = position;
  }
  ptx::cp_async_wait_all();
  if constexpr (R::Traits::kHasQueryTransform) {
    ptx::named_barrier(kFinishBarrier, kThreads);
    transform_rows<kConfig, Variant, kConfig.head_dim_qk, kConfig.dtype_q, false>(
        smem_q, Smem<kConfig>::kTileQ, unit.num_rows, 0, 0, [&](int row, auto& accessor) {
          const PackedRow packed = row_of(params, row_map, unit, row);
          const RowContext context{params.plan->token_request[packed.token],
                                   params.plan->token_position[packed.token], packed.qo_head};
          Variant::query_transform(variant, context, accessor);
        });
  }
}

// Brings near what the plan says of the parts that this unit is one of. By `num_threads` threads.
PLAIT_DEVICE void prefetch_merge_lists(const Params& params, const Unit& unit, int thread,
                                       int num_threads) {
  constexpr int kSources = 128 / sizeof(MergeSource);  // of a line
  const PlanView& plan = *params.plan;
  const int first = unit.first_row / params.group_size;
  const int last = (unit.first_row + unit.num_rows - 1) / params.group_size;
#pragma unroll 1
  for (int t = first + thread; t <= last; t += num_threads) {
    const int token = token_of(plan, unit.first_token, t);
    const int end = plan.token_merge_indptr[token + 1];
#pragma unroll 1
    for (int i = plan.token_merge_indptr[token]; i < end; i += kSources) {
      ptx::prefetch_l2(plan.merge_sources + i);
    }
  }
}

template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void finish_tiles(const Params& params, const typename Variant::Params& variant,
                               const CtaStart& start, Smem<kConfig>& smem) {
  using R = Roles<kConfig, Variant>;
  using Slot = RingSlot<kConfig.num_stages>;
  using CopySlot = RingSlot<Smem<kConfig>::kCopyStages>;
  constexpr int kTileKv = kConfig.tile_kv, kThreads = 32 * R::kFinishWarps;
  const int finish_warp = threadIdx.x % 128 / 32 - R::kLoadWarps;
  unsigned raw_v_parity = 0;  // bit s: parity of raw_v[s]'s next phase
  const auto release_unit = [&](unsigned u) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.release_unit(u);
  };
  const auto finish_k = [&](const Unit& unit, int j, int request) {
    const int tile = unit.tiles[j];
    const Slot slot(unit.first_tile + j);
    const CopySlot copy(unit.first_tile + j);
    const int num_keys = min(kTileKv, unit.kv_end - tile * kTileKv);
    ptx::mbarrier_wait(&smem.raw_k[copy.stage], copy.parity);
    if constexpr (R::kFp8) {  // rows without keys may hold anything: their logits are hidden
      ptx::mbarrier_wait(&smem.empty_k[slot.stage], slot.parity ^ 1);
      widen_tile<kConfig, Variant, kConfig.head_dim_qk, false>(
          smem.copy_of_k(copy.stage), smem.vacant_k(copy.stage), smem.k[slot.stage], num_keys);
      if constexpr (R::Traits::kHasKeyTransform) ptx::named_barrier(kFinishBarrier, kThreads);
    }
    if constexpr (R::Traits::kHasKeyTransform) {
      const int first_position = unit.kv_pos_begin + tile * kTileKv;
      transform_rows<kConfig, Variant, kConfig.head_dim_qk, kConfig.dtype_q>(
          smem.k[slot.stage], kTileKv, num_keys, first_position, unit.first_tile + j,
          [&](int position, auto& accessor) {
            dequantise<kConfig.dtype_kv>(accessor, params.k_scale);
            Variant::key_transform(variant, {request, position, unit.kv_head}, accessor);
          });
    }
    arrive_finished(&smem.full_k[slot.stage]);
  };
  const auto finish_v = [&](const Unit& unit, int j, int request) {
    const int tile = unit.tiles[j];
    const bool foreign = has_foreign_v_rows<R>(unit, tile, kTileKv);
    if (!R::kTransformV && (!foreign || finish_warp != 0)) return;
    const Slot slot(unit.first_tile + j);
    const CopySlot copy(unit.first_tile + j);
    const int num_keys = min(kTileKv, unit.kv_end - tile * kTileKv);
    ptx::mbarrier_wait(&smem.raw_v[copy.stage], raw_v_parity >> copy.stage & 1);
    raw_v_parity ^= 1u << copy.stage;
    unsigned char* v = smem.v[slot.stage];
    if constexpr (R::kFp8) {
      ptx::mbarrier_wait(&smem.empty_v[slot.stage], slot.parity ^ 1);
      widen_tile<kConfig, Variant, kConfig.head_dim_vo, R::kForeignRows>(
          smem.copy_of_v(copy.stage), smem.vacant_v(copy.stage), v, num_keys);
      if constexpr (R::Traits::kHasValueTransform) ptx::named_barrier(kFinishBarrier, kThreads);
    }
    if constexpr (R::Traits::kHasValueTransform) {
      const int first_position = unit.kv_pos_begin + tile * kTileKv;
      transform_rows<kConfig, Variant, kConfig.head_dim_vo, kConfig.dtype_q>(
          v, kTileKv, num_keys, first_position, unit.first_tile + j,
          [&](int position, auto& accessor) {
            dequantise<kConfig.dtype_kv>(accessor, params.v_scale);
            Variant::value_transform(variant, {request, position, unit.kv_head}, accessor);
          });
    }
    if (!R::kFp8 && foreign) {
      constexpr int kChunks = kConfig.head_dim_vo / kChunkCols;
      constexpr int kZeroing = R::kTransformV ? kThreads : 32;
      const int thread = (R::kTransformV ? 32 * finish_warp : 0) + threadIdx.x % 32;
      for (int i = thread; i < (kTileKv - num_keys) * kChunks; i += kZeroing) {
        *reinterpret_cast<uint4*>(v + chunk_offset(kTileKv, num_keys + i / kChunks, i % kChunks)) =
            uint4{0, 0, 0, 0};
      }
    }
    arrive_finished(&smem.full_v[slot.stage], R::kTransformV ? 1 : R::kFullArrivalsV);
  };

  // Where both have a second stage K is finished one tile ahead of V, from unit to unit too, as
  // consumers need them: they may give up a stage of V only for the next unit's K. V of the unit's
  // last tile is then left over, and with it the unit.
  constexpr bool kKeepsBack = R::kTransformK && R::kTransformV;
  int left_over = 0, request_of_left_over = 0;  // tiles of unit u - 1 if its last V is
  const auto finish_left_over = [&](unsigned u) {
    if (left_over == 0) return;
    finish_v(smem.units[(u - 1) % kUnits], left_over - 1, request_of_left_over);
    release_unit(u - 1);
    left_over = 0;
  };
  const auto finish_unit = [&](unsigned u) {
    const Unit& unit = smem.units[u % kUnits];
    const int num_tiles = unit.item == nullptr ? 0 : unit.tiles.size();
    if (num_tiles > 0 && unit.partial_row >= 0) {
      prefetch_merge_lists(params, unit, threadIdx.x % 128 - 32 * R::kLoadWarps, kThreads);
    }
    const int request = num_tiles == 0 ? 0 : request_of_keys(*params.plan, *unit.block);
    // Tiles with a second stage: all with a transform, else only a last one with foreign rows.
    for (int j = R::kTransformK || R::kTransformV ? 0 : max(num_tiles - 1, 0); j < num_tiles; ++j) {
      if constexpr (R::kTransformK) finish_k(unit, j, request);
      if constexpr (!kKeepsBack) {
        finish_v(unit, j, request);
      } else if (j == 0) {
        finish_left_over(u);
      } else {
        finish_v(unit, j - 1, request);
      }
    }
    if constexpr (kKeepsBack) {
      if (num_tiles == 0) finish_left_over(u);
      left_over = num_tiles;
      request_of_left_over = request;
      if (num_tiles > 0) return;
    }
    release_unit(u);
  };

  // The tiles of a unit come after the next unit's Q, which so is there in time; but not where K
  // waits for its second stage, since consumers may need the next unit's first K to give up a Q.
  constexpr unsigned kBehind = kConfig.num_q_stages > 1 && !R::kTransformK ? 1 : 0;
  constexpr int kQStages = kConfig.num_q_stages;
  const bool walks = threadIdx.x % 128 == 32 * R::kLoadWarps;
  UnitWalker<kConfig> walker(params, start);
  if (walks) walker.write_first(smem, start);
  bool is_end = false;
  for (unsigned u = 0; !is_end; ++u) {
    const Unit& unit = smem.await_unit(u);
    is_end = unit.item == nullptr;
    const int q_stage = u % kQStages;
    ptx::mbarrier_wait(&smem.q_empty[q_stage], ~(u / kQStages) & 1);
    if (!is_end) {
      load_q<kConfig, Variant>(params, variant, unit, smem.q[q_stage], smem.positions[q_stage]);
    }
    arrive_finished(&smem.q_full[q_stage]);
    if (walks && !is_end) walker.write_next(smem);
    __syncwarp();
    if (u >= kBehind) finish_unit(u - kBehind);
  }
}

// Asks for the plan's pointers and the tensor maps, which are needed once the first unit is known.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void prefetch(const Sm90Call<Variant>& call) {
  constexpr int kLineBytes = 128;
  const int lane = threadIdx.x % 32;
  if (lane * kLineBytes < static_cast<int>(sizeof(PlanView))) {
    ptx::prefetch_l2(reinterpret_cast<const char*>(call.params.plan) + lane * kLineBytes);
  }
  if (Roles<kConfig, Variant>::kTma && lane == 0) {
    ptx::prefetch_tensor_map(&call.maps.k);
    ptx::prefetch_tensor_map(&call.maps.v);
  }
}

// Before the barriers are there: load warps ask for what they need first, finish warps get it.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE CtaStart begin(const Sm90Call<Variant>& call) {
  const int warp = threadIdx.x % 128 / 32;
  if (warp >= Roles<kConfig, Variant>::kLoadWarps) return call.params.starts[blockIdx.x];
  prefetch<kConfig, Variant>(call);
  return {};
}

template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void produce(const Sm90Call<Variant>& call, const CtaStart& start,
                          Smem<kConfig>& smem) {
  using R = Roles<kConfig, Variant>;
  const int warp = threadIdx.x % 128 / 32;
  if (warp < R::kLoadWarps) {
    if constexpr (!R::kLoadsApart) {
      load_kv<kConfig, Variant, true, true>(call.maps, call.params, smem);
    } else if (warp == 0) {
      load_kv<kConfig, Variant, true, false>(call.maps, call.params, smem);
    } else {
      load_kv<kConfig, Variant, false, true>(call.maps, call.params, smem);
    }
  } else {
    finish_tiles<kConfig, Variant>(call.params, call.variant, start, smem);
    // Here rather than by consumers, whose end is the kernel's.
    store_padding_rows<kConfig, Variant>(call.params, *call.params.plan,
                                         threadIdx.x % 128 - 32 * R::kLoadWarps,
                                         32 * R::kFinishWarps);
  }
}

}  // namespace plait::sm90
