// How Q, K and V reach shared memory: by cp.async, 16 bytes a lane, every key's row through the
// block table (affine formats are a table without blocks). All threads load and all compute. K and
// V go through a ring of kStages tiles each. The order of a unit's copies, in groups:
//   Q + K(0), V(0), K(1), ... K(S - 1) | K(j) is awaited, V(j + S - 1) issued;
//                                        V(j) is awaited, K(j + S) issued; and so on
// so that behind a tile that is awaited always 2 (S - 1) groups are under way, and a copy is issued
// as soon as all warps have read what it overwrites. One thread a key looks up its block, a tile
// before its copy is issued, and leaves the row's addresses to all lanes that copy it. fp8 tiles
// are copied and, with num_wide_tiles 0, read as they are; else all threads make a 16-bit tile of
// one that is there.
#pragma once
#include "host_device/kv_address.h"
#include "host_device/scales.h"
#include "sm80/smem.cuh"
#include "tile/register_row.cuh"
#include "tile/widen.cuh"

namespace plait::sm80 {

// Calls transform(number, accessor) for the first num_rows rows of a tile, which are numbered from
// first_number on. kInOrder: by position.
template <int kThreads, Dtype kDtype, int kHeadDim, bool kInOrder, class F>
PLAIT_DEVICE void transform_rows(unsigned char* tile, int num_rows, int first_number,
                                 F&& transform) {
  constexpr int kSide = 1;  // beside O and S; 4: 520 bytes spilled (16 x 64, norm and RoPE)
  plait::transform_rows<Storage<kDtype>, kHeadDim, kInOrder, kSide, kThreads>(
      tile, num_rows, first_number, threadIdx.x,
      [](int row, int col) { return element_offset(kHeadDim, row, col); }, transform);
}

template <KernelConfig kConfig, class Variant>
struct Loader {
  using Traits = VariantTraits<Variant>;
  static constexpr int kStages = kConfig.num_stages, kTileKv = kConfig.tile_kv;
  static constexpr int kThreads = num_threads(kConfig);
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimVo = kConfig.head_dim_vo;
  static constexpr bool kAffine = kConfig.loader == plait::Loader::kAffine;
  static constexpr bool kWide = kConfig.num_wide_tiles > 0;
  static constexpr bool kArrangesQ =
      is_fp8(read_dtype(kConfig)) && kConfig.shapes[0].mma == Mma::kMmaSync;
  static_assert(kTileKv <= kThreads, "a thread looks up one key of a tile");
  static_assert(kWide || !is_fp8(kConfig.dtype_kv) ||
                    !(Traits::kHasKeyTransform || Traits::kHasValueTransform),
                "transforms rewrite 16-bit tiles");

  const VariantCall<Variant>& call;
  Smem<kConfig>& smem;
  int next_block = 0;  // of this thread's key, looked up for the next tile

  // Q of tile_q rows, and the first copies. The unit has tiles.
  PLAIT_DEVICE void start(int tile_q) {
    copy_q(tile_q);
#pragma unroll 1
    for (int i = threadIdx.x; i < kStages * kTileKv; i += kThreads) {
      store_address(i / kTileKv, i % kTileKv, look_up(i / kTileKv, i % kTileKv));
    }
    next_block = look_up(kStages, threadIdx.x);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < kStages; ++j) {
      issue_k(j, j);
      if (j + 1 < kStages) issue_v(j, j);
    }
    if constexpr (Traits::kHasQueryTransform || kArrangesQ) {
      ptx::cp_async_wait<2 * (kStages - 1)>();
      __syncthreads();
      if constexpr (Traits::kHasQueryTransform) transform_q();
      if constexpr (Traits::kHasQueryTransform && kArrangesQ) __syncthreads();
      if constexpr (kArrangesQ) arrange_q();
    }
  }

  // K of tile j, and with the first one Q, is there for all threads.
  PLAIT_DEVICE void await_k(int j, int stage) {
    store_address(j + kStages, threadIdx.x, next_block);
    ptx::cp_async_wait<2 * (kStages - 1)>();
    __syncthreads();
    issue_v(j + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    if constexpr (kWide) widen<kDimQk>(smem.ring.k[stage]);
    if constexpr (Traits::kHasKeyTransform) {
      if constexpr (kWide) __syncthreads();
      const int first = smem.unit.tiles[j] * kTileKv;
      transform_rows<kThreads, kConfig.dtype_q, kDimQk, true>(
          k_tile(stage), min(kTileKv, smem.unit.kv_end - first), smem.unit.kv_pos_begin + first,
          [&](int position, auto& accessor) {
            dequantise<kConfig.dtype_kv>(accessor, call.params.k_scale);
            Variant::key_transform(call.variant, {smem.unit.request, position, smem.unit.kv_head},
                                   accessor);
          });
    }
    if constexpr (kWide || Traits::kHasKeyTransform) __syncthreads();
  }

  PLAIT_DEVICE void await_v(int j, int stage) {
    ptx::cp_async_wait<2 * (kStages - 1)>();
    __syncthreads();
    issue_k(j + kStages, stage);
    next_block = look_up(j + kStages + 1, threadIdx.x);
    if constexpr (kWide) widen<kDimVo>(smem.ring.v[stage]);
    if constexpr (Traits::kHasValueTransform) {
      if constexpr (kWide) __syncthreads();
      const int first = smem.unit.tiles[j] * kTileKv;
      transform_rows<kThreads, kConfig.dtype_q, kDimVo, true>(
          v_tile(stage), min(kTileKv, smem.unit.kv_end - first), smem.unit.kv_pos_begin + first,
          [&](int position, auto& accessor) {
            dequantise<kConfig.dtype_kv>(accessor, call.params.v_scale);
            Variant::value_transform(call.variant, {smem.unit.request, position, smem.unit.kv_head},
                                     accessor);
          });
    }
    if constexpr (kWide || Traits::kHasValueTransform) __syncthreads();
  }

  // What is multiplied, once awaited.
  PLAIT_DEVICE unsigned char* k_tile(int stage) {
    if constexpr (kWide)
      return smem.ring.wide;
    else
      return smem.ring.k[stage];
  }
  PLAIT_DEVICE unsigned char* v_tile(int stage) {
    if constexpr (kWide)
      return smem.ring.wide;
    else
      return smem.ring.v[stage];
  }

 private:
  // All rows: those behind the keys are zeros, as they were copied.
  template <int kHeadDim>
  PLAIT_DEVICE void widen(const unsigned char* from) {
    widen_rows<kConfig.dtype_kv, kConfig.dtype_q, kHeadDim, kTileKv, kThreads, 1, false>(
        from, smem.ring.wide, kTileKv, threadIdx.x,
        [](int i) {
          constexpr int kChunks = kHeadDim / kChunkBytes;
          return chunk_offset(kHeadDim, i / 2 / kChunks, i / 2 % kChunks, kConfig.dtype_kv) +
                 i % 2 * kChunkCols;
        },
        [](int row, int chunk) { return chunk_offset(kHeadDim, row, chunk); });
  }

  // Block of key `i` of the unit's tile j; 0 where there is none. (Affine: nothing to look up.)
  PLAIT_DEVICE int look_up(int j, int i) {
    const Unit& unit = smem.unit;
    if (kAffine || j >= unit.num_tiles || i >= kTileKv) return 0;
    const int position = unit.tiles[j] * kTileKv + i;
    if (position >= unit.kv_end) return 0;
    return static_cast<int>(
        key_slot(unit.table, unit.first_entry, call.params.block_size, position).block);
  }

  // Where that key lies, for whoever copies it.
  PLAIT_DEVICE void store_address(int j, int i, int block) {
    const Params& params = call.params;
    const Unit& unit = smem.unit;
    if (j >= unit.num_tiles || i >= kTileKv) return;
    const int position = unit.tiles[j] * kTileKv + i;
    KeyAddress address{static_cast<const unsigned char*>(params.k),
                       static_cast<const unsigned char*>(params.v)};
    if (position < unit.kv_end) {
      const KeySlot slot = kAffine ? KeySlot{unit.first_entry + position, 0}
                                   : KeySlot{block, position % params.block_size};
      constexpr int kBytes = bytes_of(kConfig.dtype_kv);
      address.k += kBytes * key_offset(params.k_stride, slot, unit.kv_head, kAffine);
      address.v += kBytes * key_offset(params.v_stride, slot, unit.kv_head, kAffine);
    }
    addresses(j)[i] = address;
  }
  PLAIT_DEVICE KeyAddress* addresses(int j) { return smem.addresses[j % (kStages + 1)]; }

  PLAIT_DEVICE void issue_k(int j, int stage) {
    if (j < smem.unit.num_tiles) {
      copy_rows<kConfig.dtype_kv, kDimQk, kTileKv>(
          smem.ring.k[stage], kTileKv, num_keys(j),
          [from = addresses(j)](int row) { return from[row].k; });
    }
    ptx::cp_async_commit();
  }
  PLAIT_DEVICE void issue_v(int j, int stage) {
    if (j < smem.unit.num_tiles) {
      copy_rows<kConfig.dtype_kv, kDimVo, kTileKv>(
          smem.ring.v[stage], kTileKv, num_keys(j),
          [from = addresses(j)](int row) { return from[row].v; });
    }
    ptx::cp_async_commit();
  }
  PLAIT_DEVICE int num_keys(int j) const { return smem.unit.kv_end - smem.unit.tiles[j] * kTileKv; }

  PLAIT_DEVICE void copy_q(int tile_q) {
    const Params& params = call.params;
    copy_rows<kConfig.dtype_q, kDimQk, 0>(smem.q, tile_q, smem.unit.num_rows, [&](int row) {
      const RowInfo& info = smem.rows[row];
      return static_cast<const unsigned char*>(params.q) +
             2 * (existing_row(params, info.token) * params.q_stride.token +
                  info.qo_head * params.q_stride.head);
    });
  }

  // Copies rows [0, num_rows) of kHeadDim elements that start at address(row); zeros behind them,
  // below `rows` (kRows, where that is known), and in the columns that pad a row.
  template <Dtype kDtype, int kHeadDim, int kRows, class F>
  static PLAIT_DEVICE void copy_rows(unsigned char* tile, int rows, int num_rows, F&& address) {
    constexpr int kLanes = lanes_per_row(num_chunks(kHeadDim, kDtype)),
                  kRowsAPass = kThreads / kLanes;
    if constexpr (kRows == 0) {
#pragma unroll 1
      for (int row = threadIdx.x / kLanes; row < rows; row += kRowsAPass) {
        copy_row<kDtype, kHeadDim, kLanes>(tile, row, row < num_rows, address(row));
      }
    } else {
#pragma unroll
      for (int pass = 0; pass < (kRows + kRowsAPass - 1) / kRowsAPass; ++pass) {
        const int row = pass * kRowsAPass + threadIdx.x / kLanes;
        if (kRows % kRowsAPass != 0 && row >= kRows) break;
        copy_row<kDtype, kHeadDim, kLanes>(tile, row, row < num_rows, address(row));
      }
    }
  }

  // This lane's chunks of a row.
  template <Dtype kDtype, int kHeadDim, int kLanes>
  static PLAIT_DEVICE void copy_row(unsigned char* tile, int row, bool valid,
                                    const unsigned char* from) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < num_chunks(kHeadDim, kDtype) / kLanes; ++i) {
      const int chunk = i * kLanes + lane;
      const bool padding = kHeadDim % 16 != 0 && chunk == kHeadDim / kChunkCols;
      ptx::cp_async_16(tile + chunk_offset(kHeadDim, row, chunk, kDtype),
                       padding ? from : from + chunk * kChunkBytes,
                       padding || !valid ? 0 : kChunkBytes);
    }
  }

  // Q as MmaTile wants it beside fp8 K, by four lanes a row. Their order: of 16 elements of a row
  // of K a lane reads four neighbours where a B fragment has elements 2 c, 2 c + 1, 2 c + 8, 2 c +
  // 9; so ldmatrix must find these there in Q. Their numbers: float16, a row times the power of two
  // that takes its largest to 2^14 ... 2^15. What rounds is below 2^-38 of the largest.
  PLAIT_DEVICE void arrange_q() {
    constexpr int kChunks = num_chunks(kDimQk), kLanes = 4;
    const int lane = threadIdx.x % kLanes;
    const int rows = (smem.unit.num_rows + 7) / 8 * 8;  // whole warps
#pragma unroll 1
    for (int row = threadIdx.x / kLanes; row < rows; row += kThreads / kLanes) {
      const auto chunk = [&](int i) -> uint4& {
        return *reinterpret_cast<uint4*>(smem.q + chunk_offset(kDimQk, row, i));
      };
      float down = 1.0f;
      if constexpr (kConfig.dtype_q != product_dtype(kConfig)) {
        int most = 0;  // of the magnitudes' bits, in the upper half of a word
        for (int i = lane; i < kChunks; i += kLanes) {
          const uint4 x = chunk(i);
          const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            most = max(most, static_cast<int>(words[w] & 0x7fffffffu));
            most = max(most, static_cast<int>(words[w] << 16 & 0x7fffffffu));
          }
        }
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        const int up = max((most >> 23) - 127 - 14, -112);  // an exponent
        if (lane == 0) smem.q_scales[row] = __builtin_bit_cast(float, (127 + up) << 23);
        down = __builtin_bit_cast(float, (127 - up) << 23);
      }
      for (int i = 2 * lane; i < kChunks; i += 2 * kLanes) {
        const uint4 x = chunk(i), y = chunk(i + 1);
        chunk(i) =
            uint4{scaled(x.x, down), scaled(x.z, down), scaled(y.x, down), scaled(y.z, down)};
        chunk(i + 1) =
            uint4{scaled(x.y, down), scaled(x.w, down), scaled(y.y, down), scaled(y.w, down)};
      }
    }
  }
  static PLAIT_DEVICE unsigned scaled(unsigned pair, float factor) {
    if constexpr (kConfig.dtype_q == product_dtype(kConfig)) return pair;
    const Two two = to_floats<Storage<kConfig.dtype_q>>(pair);
    return from_floats<Storage<product_dtype(kConfig)>>(two.low * factor, two.high * factor);
  }

  PLAIT_DEVICE void transform_q() {
    transform_rows<kThreads, kConfig.dtype_q, kDimQk,
                   false>(smem.q, smem.unit.num_rows, 0, [&](int row, auto& accessor) {
      const RowInfo& info = smem.rows[row];
      Variant::query_transform(call.variant, {info.request, info.position, info.qo_head}, accessor);
    });
  }
};

}  // namespace plait::sm80
