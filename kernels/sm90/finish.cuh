// The finish warps. They load Q and run second stages on tiles already in shared memory: key, value
// and query transforms in place, and zeros over the V rows that no key owns (0 * NaN is NaN). fp8
// tiles have a second stage always: they land in a ring of their own, and finish warps write the
// tile of 16-bit elements, which transforms then find in place. One lane walks the plan's units.
#pragma once
#include "host_device/scales.h"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "sm90/load.cuh"
#include "sm90/smem.cuh"
#include "tile/register_row.cuh"
#include "tile/rows.cuh"
#include "tile/widen.cuh"

namespace plait::sm90 {

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
  const unsigned to = ptx::smem_address(smem_q);
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
      ptx::cp_async_16(to + chunk_offset(Smem<kConfig>::kTileQ, first + row, chunk),
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
template <KernelConfig kConfig>
PLAIT_DEVICE void prefetch_merge_lists(const Params& params, const Unit& unit, int thread,
                                       int num_threads) {
  constexpr int kSources = 128 / sizeof(int);  // of a line
  const PlanView& plan = *params.plan;
  const int first = unit.first_row / params.group_size;
  const int last = (unit.first_row + unit.num_rows - 1) / params.group_size;
#pragma unroll 1
  for (int t = first + thread; t <= last; t += num_threads) {
    const int token = token_of(plan, unit.first_token, t);
    const int list = merge_list<kConfig>(params, {token, unit.kv_head},
                                         unit.first_row - first * params.group_size);
    const int end = plan.merge_indptr[list + 1];
#pragma unroll 1
    for (int i = plan.merge_indptr[list]; i < end; i += kSources) {
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
#pragma unroll 1  // rarely run
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
      prefetch_merge_lists<kConfig>(params, unit, threadIdx.x % 128 - 32 * R::kLoadWarps, kThreads);
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
  // Loaders hear of a unit early, but an item is drawn when the loads before it end. These may need
  // stages back of units that are not finished yet: so then these come first. With second stages of
  // all tiles they may need the unit's own; then nothing is waited for.
  constexpr bool kDrawsLate = !R::kTransformK && !R::kTransformV;
  constexpr int kQStages = kConfig.num_q_stages;
  const bool walks = threadIdx.x % 128 == 32 * R::kLoadWarps;
  if (walks) smem.start = start;
  UnitWalker<kConfig> walker(params, start);
  bool is_end = false;
  for (unsigned u = 0;; ++u) {
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1 && u > kBehind) finish_unit(u - 1 - kBehind);
      if (walks && !is_end && walker.num_units == u &&
          (kDrawsLate && kBehind > 0 && walker.draws()) == (pass == 1)) {
        walker.write(smem, kDrawsLate);
      }
      __syncwarp();
    }
    if (is_end) break;
    const Unit& unit = smem.await_unit(u);
    is_end = unit.item == nullptr;
    const int q_stage = u % kQStages;
    ptx::mbarrier_wait(&smem.q_empty[q_stage], ~(u / kQStages) & 1);
    if (!is_end) {
      load_q<kConfig, Variant>(params, variant, unit, smem.q[q_stage], smem.positions[q_stage]);
    }
    arrive_finished(&smem.q_full[q_stage]);
  }
}

}  // namespace plait::sm90
