// A warp's part of a tile of one row on CUDA cores: where a query head has its KV head to itself,
// 15 of an MMA's 16 rows would be empty. Same interface as mma_tile.cuh. Logits: a lane takes a
// key, or kLanesOfKey lanes share one's chunks; output: a lane takes pairs of columns.
#pragma once
#include "sm80/smem.cuh"

namespace plait::sm80 {

template <KernelConfig kConfig, int kShape>
struct ScalarTile {
  static constexpr int kTileQ = 1, kSplit = kConfig.num_warps, kRowWarps = 1, kRowsOfWarp = 1;
  static constexpr int kRowBlocks = 1;
  static constexpr int kKeys = kConfig.tile_kv / kSplit;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimVo = kConfig.head_dim_vo;
  static constexpr Dtype kDtypeKv = kConfig.dtype_kv;
  static_assert(kConfig.shapes[kShape].tile_q == 1 && kConfig.shapes[kShape].key_split == kSplit,
                "all warps share one row");
  static_assert(kKeys % 8 == 0 && (32 % kKeys == 0 || kKeys % 32 == 0), "");

  static constexpr int kLanesOfRow = kKeys < 32 ? kKeys : 32;
  static constexpr int kLanesOfKey = 32 / kLanesOfRow;
  static constexpr int kRows = 1, kLogits = (kKeys + 31) / 32, kOutputs = (kDimVo + 63) / 64 * 2;
  static constexpr int kLogitsOfWord = 1;
  static constexpr int kOutputsOfSlice = 2;

  float s[kRows][kLogits];
  float o[kRows][kOutputs];

  static PLAIT_DEVICE int lane() { return threadIdx.x % 32; }
  static PLAIT_DEVICE int split() { return threadIdx.x / 32; }
  static PLAIT_DEVICE int first_key() { return split() * kKeys; }
  static PLAIT_DEVICE int first_row() { return 0; }
  static PLAIT_DEVICE int row(int) { return 0; }
  static PLAIT_DEVICE int key(int i) { return first_key() + lane() % kLanesOfRow + 32 * i; }
  static PLAIT_DEVICE int column(int i) { return i / 2 * 64 + 2 * lane() + i % 2; }
  static PLAIT_DEVICE bool owns_row() { return lane() == 0; }

  PLAIT_DEVICE void multiply_q_k(const unsigned char* q, const unsigned char* k) {
    constexpr int kChunks = num_chunks(kDimQk);
    const int part = lane() / kLanesOfRow;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      float dot[2] = {0.0f, 0.0f};  // two chains
#pragma unroll 4
      for (int step = 0; step < (kChunks + kLanesOfKey - 1) / kLanesOfKey; ++step) {
        const int chunk = step * kLanesOfKey + part;
        if (kChunks % kLanesOfKey != 0 && chunk >= kChunks) break;
        float x[kChunkCols], y[kChunkCols];
        load_chunk<kConfig.dtype_q>(q + chunk_offset(kDimQk, 0, chunk), x);
        load_chunk<kConfig.dtype_q>(k + chunk_offset(kDimQk, key(i), chunk), y);
#pragma unroll
        for (int e = 0; e < kChunkCols; ++e) dot[e % 2] += x[e] * y[e];
      }
      s[0][i] = dot[0] + dot[1];
#pragma unroll
      for (int step = kLanesOfRow; step < 32; step *= 2) {
        s[0][i] += __shfl_xor_sync(~0u, s[0][i], step);
      }
    }
  }

  PLAIT_DEVICE void clear_output() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[0][i] = 0.0f;
  }

  PLAIT_DEVICE void add_p_v(const unsigned char* v) {
    using T = Storage<kConfig.dtype_q>;
    struct alignas(4) Pair {
      T x, y;
    };
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
#pragma unroll 8
      for (int j = 0; j < kLanesOfRow; ++j) {
        const float weight = __shfl_sync(~0u, s[0][i], j);
#pragma unroll
        for (int c = 0; c < kOutputs; c += 2) {
          if (padded(kDimVo) % 64 != 0 && column(c) >= padded(kDimVo)) break;
          const Pair pair = *reinterpret_cast<const Pair*>(
              v + element_offset(kDimVo, first_key() + 32 * i + j, column(c)));
          o[0][c] += weight * to_float(pair.x);
          o[0][c + 1] += weight * to_float(pair.y);
        }
      }
    }
  }

 private:
  template <Dtype kDtype>
  static PLAIT_DEVICE void load_chunk(const unsigned char* from, float (&x)[kChunkCols]) {
    struct alignas(kChunkBytes) Chunk {
      Storage<kDtype> x[kChunkCols];
    };
    const Chunk chunk = *reinterpret_cast<const Chunk*>(from);
#pragma unroll
    for (int e = 0; e < kChunkCols; ++e) x[e] = to_float(chunk.x[e]);
  }
};

}  // namespace plait::sm80
