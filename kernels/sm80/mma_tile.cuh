// A warp's part of a tile on tensor cores, mma.sync m16n8k16: kRowBlocks blocks of 16 rows against
// kKeys keys. The interface that attention.cuh and store.cuh know, shared with scalar_tile.cuh: a
// thread holds logits s[kRows][kLogits] and output o[kRows][kOutputs] of kRows rows, row(r) and
// column(i) say which.
#pragma once
#include "ptx/mma_sync.cuh"
#include "sm80/smem.cuh"

namespace plait::sm80 {

template <KernelConfig kConfig, int kShape>
struct MmaTile {
  static constexpr int kTileQ = kConfig.shapes[kShape].tile_q;
  static constexpr int kSplit = kConfig.shapes[kShape].key_split;  // warps that share the rows
  static constexpr int kRowWarps = kConfig.num_warps / kSplit;
  static constexpr int kRowsOfWarp = kTileQ / kRowWarps, kRowBlocks = kRowsOfWarp / 16;
  static constexpr int kKeys = kConfig.tile_kv / kSplit;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimVo = kConfig.head_dim_vo;
  static constexpr Dtype kDtypeKv = kConfig.dtype_kv;
  static_assert(kConfig.num_warps % kSplit == 0 && kTileQ % (16 * kRowWarps) == 0,
                "a warp takes blocks of 16 rows");
  static_assert(kKeys % 16 == 0, "a warp takes steps of 16 keys");

  static constexpr int kRows = 2 * kRowBlocks, kLogits = kKeys / 4, kOutputs = padded(kDimVo) / 4;
  static constexpr int kLanesOfRow = 4;    // lanes that hold a row's logits, l ^ 1 and l ^ 2
  static constexpr int kLogitsOfWord = 8;  // among 32 keys
  static constexpr int kOutputsOfSlice = kSliceCols / 4;

  float s[kRows][kLogits];
  float o[kRows][kOutputs];

  static PLAIT_DEVICE int warp() { return threadIdx.x / 32; }
  static PLAIT_DEVICE int lane() { return threadIdx.x % 32; }
  static PLAIT_DEVICE int first_row() { return warp() % kRowWarps * kRowsOfWarp; }
  static PLAIT_DEVICE int split() { return warp() / kRowWarps; }
  static PLAIT_DEVICE int first_key() { return split() * kKeys; }

  // Row of the tile, key of the tile, column of the output.
  static PLAIT_DEVICE int row(int r) { return first_row() + 8 * r + lane() / 4; }
  static PLAIT_DEVICE int key(int i) { return first_key() + i / 2 * 8 + lane() % 4 * 2 + i % 2; }
  static PLAIT_DEVICE int column(int i) { return i / 2 * 8 + lane() % 4 * 2 + i % 2; }
  static PLAIT_DEVICE bool owns_row() { return lane() % 4 == 0; }

  // s = Q K^T
  PLAIT_DEVICE void multiply_q_k(const unsigned char* q, const unsigned char* k) {
    const int l = lane();
    // Of A, rows 0 - 15 at both halves of k; of B, keys 0 - 7 at both, then keys 8 - 15.
    const unsigned q_address = lane_address<kDimQk>(q, first_row() + l % 16, l / 16);
    const unsigned k_address = lane_address<kDimQk>(k, first_key() + l % 8 + l / 16 * 8, l / 8 % 2);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLogits; ++i) s[r][i] = 0.0f;
    }
#pragma unroll
    for (int k16 = 0; k16 < padded(kDimQk) / 16; ++k16) {
      const unsigned q_chunk = advance<kDimQk>(q_address, 2 * k16);
      const unsigned k_chunk = advance<kDimQk>(k_address, 2 * k16);
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        ptx::ldmatrix_x4(a[m], q_chunk + 16 * m * row_bytes(kDimQk));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, k_chunk + 16 * n * row_bytes(kDimQk));
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply<kConfig.dtype_q>(s[2 * m], s[2 * m + 1], 4 * n, a[m], b);
        }
      }
    }
  }

  PLAIT_DEVICE void clear_output() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[r][i] = 0.0f;
    }
  }

  // o += P V, where s holds P.
  PLAIT_DEVICE void add_p_v(const unsigned char* v) {
    const int l = lane();
    const unsigned v_address = lane_address<kDimVo>(v, first_key() + l % 16, l / 16);
#pragma unroll
    for (int k16 = 0; k16 < kKeys / 16; ++k16) {
      // The accumulator fragment of S is the A fragment of P, two columns a register.
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* p = &s[2 * m + i % 2][4 * k16 + i / 2 * 2];
          a[m][i] = ptx::pack2<kConfig.dtype_q>(p[0], p[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < padded(kDimVo) / 16; ++n) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(b, advance<kDimVo>(v_address, 2 * n) + 16 * k16 * row_bytes(kDimVo));
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply<kConfig.dtype_q>(o[2 * m], o[2 * m + 1], 4 * n, a[m], b);
        }
      }
    }
  }

 private:
  // Address of chunk 0 or 1 of a row, and from there of one an even number of chunks further: where
  // rows are swizzled these are bits of the address, so that steps need no registers of their own.
  template <int kHeadDim>
  static PLAIT_DEVICE unsigned lane_address(const unsigned char* tile, int row, int chunk) {
    return ptx::smem_address(tile) + chunk_offset(kHeadDim, row, chunk);
  }
  template <int kHeadDim>
  static PLAIT_DEVICE unsigned advance(unsigned address, int chunks) {
    if constexpr (!swizzled(kHeadDim)) return address + chunks * kChunkBytes;
    return (address ^ (chunks % 8 * kChunkBytes)) + chunks / 8 * 8 * kChunkBytes;
  }

  // Columns 0 - 7 and 8 - 15 of a step: elements at ... + 3 of the two rows.
  template <Dtype kDtype, int kCount>
  static PLAIT_DEVICE void multiply(float (&low)[kCount], float (&high)[kCount], int at,
                                    const unsigned (&a)[4], const unsigned (&b)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = at + 2 * half;
      ptx::mma_m16n8k16<kDtype>(low[i], low[i + 1], high[i], high[i + 1], a, b[2 * half],
                                b[2 * half + 1]);
    }
  }
};

}  // namespace plait::sm80
