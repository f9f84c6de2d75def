// How Q, K and V reach shared memory: by cp.async, 16 bytes a lane, every key's row through the
// block table (affine formats are a table without blocks). All threads load and all compute. K and
// V go through a ring of kStages tiles each. The order of a unit's copies, in groups:
//   Q + K(0), V(0), K(1), ... K(S - 1) | K(j) is awaited, V(j + S - 1) issued;
//                                        V(j) is awaited, K(j + S) issued; and so on
// so that behind a tile that is awaited always 2 (S - 1) groups are under way, and a copy is issued
// as soon as all warps have read what it overwrites: pass by pass, between the steps of the product
// that follows. Where rows lie at equal strides a lane knows where its own are; else one thread a
// row of K or V looks up its block, a tile before its copy is issued, and leaves the row's address
// to all lanes that copy it. fp8 tiles are copied and, with num_wide_tiles 0, read as they are;
// else all threads make a 16-bit tile of one that is there.
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
  // Rows of K and V of a tile whose addresses a thread finds.
  static constexpr int kFinds = kAffine ? 0 : (2 * kTileKv + kThreads - 1) / kThreads;
  static_assert(kFinds <= 2, "more would be registers");
  static_assert(kWide || !is_fp8(kConfig.dtype_kv) ||
                    !(Traits::kHasKeyTransform || Traits::kHasValueTransform),
                "transforms rewrite 16-bit tiles");

  const VariantCall<Variant>& call;
  Smem<kConfig>& smem;
  int next_block[kFinds > 0 ? kFinds : 1] = {};  // of this thread's rows, of the next tile

  // Q of tile_q rows, and the first copies. The unit has tiles.
  PLAIT_DEVICE void start(int tile_q) {
    copy_q(tile_q);
    if constexpr (!kAffine) {
#pragma unroll 1
      for (int j = 0; j < kStages; ++j) {
        look_up(j);
        store_addresses(j);
      }
      look_up(kStages);
      __syncthreads();
    }
#pragma unroll 1
    for (int j = 0; j < kStages; ++j) {
      TileCopy<kDimQk, false>(*this, j, j)(0, 1);
      if (j + 1 < kStages) TileCopy<kDimVo, true>(*this, j, j)(0, 1);
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
    ptx::cp_async_wait<2 * (kStages - 1)>();
    __syncthreads();
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

  // V of tile j, and all warps are done with K of it.
  PLAIT_DEVICE void await_v(int j, int stage) {
    if constexpr (!kAffine) {
      store_addresses(j + kStages);
      look_up(j + kStages + 1);
    }
    ptx::cp_async_wait<2 * (kStages - 1)>();
    __syncthreads();
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

  // Copies to be called beside a product, step by step. V goes where V of tile j - 1 was, of which
  // all warps are done once K of tile j is awaited; K where that is, once V of tile j is.
  PLAIT_DEVICE auto next_v(int j, int stage) const {
    return TileCopy<kDimVo, true>(*this, j + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
  }
  PLAIT_DEVICE auto next_k(int j, int stage) const {
    return TileCopy<kDimQk, false>(*this, j + kStages, stage);
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

  // Which of a tile's rows this thread's n-th is, and whether of V. False: none.
  static PLAIT_DEVICE bool find(int n, int& row, int& of_v) {
    const int i = n * kThreads + threadIdx.x;
    row = i % kTileKv;
    of_v = i / kTileKv;
    return of_v < 2;
  }

  // Blocks of this thread's rows of the unit's tile j; 0 where there is none.
  PLAIT_DEVICE void look_up(int j) {
    const Unit& unit = smem.unit;
#pragma unroll
    for (int n = 0; n < kFinds; ++n) {
      int row, of_v;
      next_block[n] = 0;
      if (!find(n, row, of_v) || j >= unit.num_tiles) continue;
      const int position = unit.tiles[j] * kTileKv + row;
      if (position >= unit.kv_end) continue;
      next_block[n] = static_cast<int>(
          key_slot(unit.table, unit.first_entry, call.params.block_size, position).block);
    }
  }

  // Where these rows lie, for whoever copies them; of a tile that the unit lacks, some address.
  PLAIT_DEVICE void store_addresses(int j) {
    const Unit& unit = smem.unit;
#pragma unroll
    for (int n = 0; n < kFinds; ++n) {
      int row, of_v;
      if (!find(n, row, of_v)) continue;
      const KvStrides& stride = of_v ? call.params.v_stride : call.params.k_stride;
      const int position = unit.tiles[j] * kTileKv + row;
      const KeySlot slot{next_block[n], position % call.params.block_size};
      smem.addresses[j % (kStages + 1)][of_v][row] =
          (of_v ? unit.v : unit.k) +
          bytes_of(kConfig.dtype_kv) * key_offset(stride, slot, 0, kAffine);
    }
  }

  // This thread's share of a tile of K or V, to be copied.
  template <int kHeadDim, bool kOfV>
  struct TileCopy {
    static constexpr Dtype kDtype = kConfig.dtype_kv;
    static constexpr int kLanes = lanes_per_row(num_chunks(kHeadDim, kDtype));
    static constexpr int kRowsAPass = kThreads / kLanes;
    static constexpr int kPasses = (kTileKv + kRowsAPass - 1) / kRowsAPass;
    static_assert(kRowsAPass % 8 == 0, "the same swizzle in each pass");
    // Of its row of the first pass:
    unsigned char* to;
    const unsigned char* from;              // affine
    const unsigned char* const* addresses;  // else
    i64 distance;                           // affine: between rows in memory
    int num_keys;                           // from that row on
    bool exists;                            // the unit has such a tile

    PLAIT_DEVICE TileCopy(const Loader& loader, int j, int stage) {
      Smem<kConfig>& smem = loader.smem;
      const Unit& unit = smem.unit;
      const int row = threadIdx.x / kLanes, position = unit.tiles[j] * kTileKv + row;
      to = (kOfV ? smem.ring.v[stage] : smem.ring.k[stage]) +
           chunk_offset(kHeadDim, row, threadIdx.x % kLanes, kDtype);
      num_keys = unit.kv_end - position;
      exists = j < unit.num_tiles;
      if constexpr (kAffine) {
        const KvStrides& stride = kOfV ? loader.call.params.v_stride : loader.call.params.k_stride;
        distance = bytes_of(kDtype) * stride.token;
        from = (kOfV ? unit.v : unit.k) + position * distance;
      } else {
        addresses = smem.addresses[j % (kStages + 1)][kOfV] + row;
      }
    }

    // The step-th of `steps` parts; the last one closes the group.
    PLAIT_DEVICE void operator()(int step, int steps) const {
#pragma unroll
      for (int pass = kPasses * step / steps; pass < kPasses * (step + 1) / steps; ++pass) {
        const int row = pass * kRowsAPass;
        const bool is_row = kTileKv % kRowsAPass == 0 || row + threadIdx.x / kLanes < kTileKv;
        const unsigned char* row_from = kAffine  ? from + row * distance
                                        : is_row ? addresses[row]
                                                 : nullptr;
        copy_row<kDtype, kHeadDim>(to + row * row_bytes(kHeadDim, kDtype), exists && is_row,
                                   row < num_keys, row_from);
      }
      if (step + 1 == steps) ptx::cp_async_commit();
    }
  };

  PLAIT_DEVICE void copy_q(int tile_q) {
    const Params& params = call.params;
    constexpr int kLanes = lanes_per_row(num_chunks(kDimQk));
#pragma unroll 1
    for (int row = threadIdx.x / kLanes; row < tile_q; row += kThreads / kLanes) {
      const RowInfo& info = smem.rows[row];
      copy_row<kConfig.dtype_q, kDimQk>(
          smem.q + chunk_offset(kDimQk, row, threadIdx.x % kLanes), true, row < smem.unit.num_rows,
          static_cast<const unsigned char*>(params.q) +
              2 * (existing_row(params, info.token) * params.q_stride.token +
                   info.qo_head * params.q_stride.head));
    }
  }

  // This lane's chunks of the row at `from`, the first one's place being `to`: zeros where the row
  // is not valid, and in the columns that pad it.
  template <Dtype kDtype, int kHeadDim>
  static PLAIT_DEVICE void copy_row(unsigned char* to, bool wanted, bool valid,
                                    const unsigned char* from) {
    constexpr int kChunks = num_chunks(kHeadDim, kDtype), kLanes = lanes_per_row(kChunks);
    static_assert(!swizzled(kHeadDim, kDtype) || kLanes == 8, "a lane's chunks are swizzled alike");
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kChunks / kLanes; ++i) {
      const int chunk = i * kLanes + lane;
      const bool padding = kHeadDim % 16 != 0 && chunk == kHeadDim / kChunkCols;
      ptx::cp_async_16_if(wanted, ptx::smem_address(to) + i * kLanes * kChunkBytes,
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
