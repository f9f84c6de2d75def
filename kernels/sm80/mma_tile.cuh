// A warp's part of a tile on tensor cores, mma.sync m16n8k16: kRowBlocks blocks of 16 rows against
// kKeys keys. The interface that attention.cuh and store.cuh know, shared with scalar_tile.cuh: a
// thread holds logits s[kRows][kLogits] and output o[kRows][kOutputs] of kRows rows, row(r) and
// column(i) say which. fp8 K and V become float16 fragments in registers: the order of a step's
// elements and of the output's columns is free, so it is the one that four neighbouring bytes have,
// which are what ldmatrix gives a lane.
#pragma once
#include "ptx/mma_sync.cuh"
#include "sm80/smem.cuh"
#include "tile/widen.cuh"

namespace plait::sm80 {

// kBounded: weights are at most 2^8, as those of a softmax.
template <KernelConfig kConfig, int kShape, bool kBounded>
struct MmaTile {
  static constexpr int kTileQ = kConfig.shapes[kShape].tile_q;
  static constexpr int kSplit = kConfig.shapes[kShape].key_split;  // warps that share the rows
  static constexpr int kRowWarps = kConfig.num_warps / kSplit;
  static constexpr int kRowsOfWarp = kTileQ / kRowWarps, kRowBlocks = kRowsOfWarp / 16;
  static constexpr int kKeys = kConfig.tile_kv / kSplit;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimVo = kConfig.head_dim_vo;
  static constexpr Dtype kDtypeQ = kConfig.dtype_q, kDtypeKv = kConfig.dtype_kv;
  static constexpr Dtype kRead = read_dtype(kConfig);
  static constexpr bool kFp8 = is_fp8(kRead);
  static constexpr Dtype kDtypeS = product_dtype(kConfig);
  static constexpr Dtype kDtypeP = kBounded ? kDtypeS : kConfig.dtype_q;  // others overflow float16
  static constexpr int kStepsQk = padded(kDimQk) / 16, kStepsVo = padded(kDimVo) / 16;
  // What one ldmatrix reads: keys and steps of 16 elements of K; steps of 16 columns of V.
  static constexpr int kLoadKeys = kFp8 && kKeys % 32 == 0 ? 32 : 16;
  static constexpr int kLoadSteps = kFp8 ? 32 / kLoadKeys : 1, kLoadColumns = kFp8 ? 2 : 1;
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
  static PLAIT_DEVICE int column(int i) {
    return kFp8 ? i / 4 * 16 + lane() % 4 * 4 + i % 4 : i / 2 * 8 + lane() % 4 * 2 + i % 2;
  }
  static PLAIT_DEVICE bool owns_row() { return lane() % 4 == 0; }

  // s = Q K^T, where Q's rows are to be multiplied with q_scales if products are not of its dtype.
  // beside(step, steps) is called behind each step: what tensor cores hide.
  template <class Beside>
  PLAIT_DEVICE void multiply_q_k(const unsigned char* q, const float* q_scales,
                                 const unsigned char* k, const Beside& beside) {
    const int l = lane();
    // Of A, rows 0 - 15 at both halves of k; of B, keys 0 - 7 at both, then keys 8 - 15. fp8: keys
    // 0
    // - 15 at a step, then at the next, or 0 - 31 at one.
    const unsigned q_address = lane_address<kDimQk, k16Bits>(q, first_row() + l % 16, l / 16);
    const unsigned k_address =
        kFp8 ? lane_address<kDimQk, kRead>(k, first_key() + l % kLoadKeys, l / kLoadKeys)
             : lane_address<kDimQk, kRead>(k, first_key() + l % 8 + l / 16 * 8, l / 8 % 2);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLogits; ++i) s[r][i] = 0.0f;
    }
#pragma unroll
    for (int k16 = 0; k16 < kStepsQk; k16 += kLoadSteps) {
      unsigned a[kLoadSteps][kRowBlocks][4];
#pragma unroll
      for (int step = 0; step < kLoadSteps && k16 + step < kStepsQk; ++step) {
        const unsigned q_chunk = advance<kDimQk, k16Bits>(q_address, 2 * (k16 + step));
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          ptx::ldmatrix_x4(a[step][m], q_chunk + 16 * m * row_bytes(kDimQk));
        }
      }
      const unsigned k_chunk = advance<kDimQk, kRead>(k_address, kFp8 ? k16 : 2 * k16);
#pragma unroll
      for (int n = 0; n < kKeys / kLoadKeys; ++n) {
        unsigned x[4];
        ptx::ldmatrix_x4(x, k_chunk + kLoadKeys * n * row_bytes(kDimQk, kRead));
        constexpr int kOfStep = kLoadKeys / 16;
#pragma unroll
        for (int part = 0; part < kLoadSteps * kOfStep; ++part) {
          const int step = part / kOfStep;
          if (k16 + step >= kStepsQk) break;
          unsigned b[4];
          k_fragment(x, part, b);
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) {
            multiply<kDtypeS, 2, 1>(s[2 * m], s[2 * m + 1], 4 * (kOfStep * n + part % kOfStep),
                                    a[step][m], b);
          }
        }
      }
      beside(k16 / kLoadSteps, (kStepsQk + kLoadSteps - 1) / kLoadSteps);
    }
    if constexpr (kDtypeS != kConfig.dtype_q) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float scale = q_scales[row(r)];
#pragma unroll
        for (int i = 0; i < kLogits; ++i) s[r][i] *= scale;
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

  // o += P V, where weigh(i, n) makes P of n elements of each row of s. Weights of the next step
  // are made while tensor cores work on this one.
  template <class Weigh, class Beside>
  PLAIT_DEVICE void add_p_v(const unsigned char* v, const Weigh& weigh, const Beside& beside) {
    const int l = lane();
    const unsigned v_address = lane_address<kDimVo, kRead>(v, first_key() + l % 16, l / 16);
    constexpr int kSteps = kKeys / 16;
    weigh(0, 4);
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      // The accumulator fragment of S is the A fragment of P, two columns a register.
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* p = &s[2 * m + i % 2][4 * k16 + i / 2 * 2];
          a[m][i] = ptx::pack2<kDtypeP>(p[0], p[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kStepsVo; n += kLoadColumns) {
        unsigned x[4];
        ptx::ldmatrix_x4_trans(x, advance<kDimVo, kRead>(v_address, kFp8 ? n : 2 * n) +
                                      16 * k16 * row_bytes(kDimVo, kRead));
#pragma unroll
        for (int step = 0; step < kLoadColumns && n + step < kStepsVo; ++step) {
          unsigned b[4];
          v_fragment(x, step, b);
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) {
            constexpr int kHalf = kFp8 ? 1 : 2, kNext = kFp8 ? 2 : 1;
            multiply<kDtypeP, kHalf, kNext>(o[2 * m], o[2 * m + 1], 4 * (n + step), a[m], b);
          }
        }
      }
      if (k16 + 1 < kSteps) weigh(4 * k16 + 4, 4);
      beside(k16, kSteps);
    }
  }

 private:
  // Address of chunk 0 or 1 of a row, and from there of one an even number of chunks further: where
  // rows are swizzled these are bits of the address, so that steps need no registers of their own.
  template <int kHeadDim, Dtype kDtype>
  static PLAIT_DEVICE unsigned lane_address(const unsigned char* tile, int row, int chunk) {
    return ptx::smem_address(tile) + chunk_offset(kHeadDim, row, chunk, kDtype);
  }
  template <int kHeadDim, Dtype kDtype>
  static PLAIT_DEVICE unsigned advance(unsigned address, int chunks) {
    if constexpr (!swizzled(kHeadDim, kDtype)) return address + chunks * kChunkBytes;
    return (address ^ (chunks % 8 * kChunkBytes)) + chunks / 8 * 8 * kChunkBytes;
  }

  // B of 16 keys and a step of the head dim, from two chunks of keys 0 - 7, then of 8 - 15. fp8:
  // from one chunk of these and of those, the part-th two; Loader::arrange_q has put Q's elements
  // where this fragment's are.
  static PLAIT_DEVICE void k_fragment(const unsigned (&x)[4], int part, unsigned (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (!kFp8) {
        b[i] = x[i];
      } else {
        const unsigned of_key = x[2 * part + i / 2];
        b[i] = i % 2 == 0 ? widen_pair<Storage<kRead>, kDtypeS, 0>(of_key)
                          : widen_pair<Storage<kRead>, kDtypeS, 1>(of_key);
      }
    }
  }
  // B of 16 keys and 16 columns, from keys 0 - 7 and 8 - 15 of two chunks. fp8: a word has columns
  // 2 g and 2 g + 1 of two keys; even columns are the first half's, odd ones the second's.
  static PLAIT_DEVICE void v_fragment(const unsigned (&x)[4], int step, unsigned (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (!kFp8) {
        b[i] = x[i];
      } else {
        const unsigned by_column = swap_middle_bytes(x[2 * step + i % 2]);
        b[i] = i / 2 == 0 ? widen_pair<Storage<kRead>, kDtypeP, 0>(by_column)
                          : widen_pair<Storage<kRead>, kDtypeP, 1>(by_column);
      }
    }
  }

  // Two products of 8 columns each: elements at ... + 3 of the two rows, those of the second
  // product kHalf on, those of a product kNext apart.
  template <Dtype kDtype, int kHalf, int kNext, int kCount>
  static PLAIT_DEVICE void multiply(float (&low)[kCount], float (&high)[kCount], int at,
                                    const unsigned (&a)[4], const unsigned (&b)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = at + kHalf * half, j = i + kNext;
      ptx::mma_m16n8k16<kDtype>(low[i], low[j], high[i], high[j], a, b[2 * half], b[2 * half + 1]);
    }
  }
};

}  // namespace plait::sm80
