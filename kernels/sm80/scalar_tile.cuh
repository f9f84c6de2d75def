// A warp's part of a tile of one row on CUDA cores: where a query head has its KV head to itself,
// 15 of an MMA's 16 rows would be empty. Same interface as mma_tile.cuh. Logits: a lane takes a
// key, or kLanesOfKey lanes share one's chunks; output: a lane takes pairs of columns.
#pragma once
#include "sm80/smem.cuh"
#include "tile/widen.cuh"

namespace plait::sm80 {

template <KernelConfig kConfig, int kShape>
struct ScalarTile {
  static constexpr int kTileQ = 1, kSplit = kConfig.num_warps, kRowWarps = 1, kRowsOfWarp = 1;
  static constexpr int kRowBlocks = 1;
  static constexpr int kKeys = kConfig.tile_kv / kSplit;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimVo = kConfig.head_dim_vo;
  static constexpr Dtype kDtypeQ = kConfig.dtype_q, kDtypeKv = kConfig.dtype_kv;
  static constexpr Dtype kRead = read_dtype(kConfig);
  static constexpr Dtype kDtypeP = Dtype::kFloat32;
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

  template <class Beside>
  PLAIT_DEVICE void multiply_q_k(const unsigned char* q, const float*, const unsigned char* k,
                                 const Beside& beside) {
    beside(0, 1);
    constexpr int kChunks = num_chunks(kDimQk, kRead), kCols = kChunkBytes / bytes_of(kRead);
    const int part = lane() / kLanesOfRow;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      float dot[2] = {0.0f, 0.0f};  // two chains
#pragma unroll 4
      for (int step = 0; step < (kChunks + kLanesOfKey - 1) / kLanesOfKey; ++step) {
        const int chunk = step * kLanesOfKey + part;
        if (kChunks % kLanesOfKey != 0 && chunk >= kChunks) break;
        float y[kCols];
        load_chunk<kRead>(k + chunk_offset(kDimQk, key(i), chunk, kRead), y);
#pragma unroll
        for (int first = 0; first < kCols; first += kChunkCols) {
          float x[kChunkCols];
          const int q_chunk = (chunk * kCols + first) / kChunkCols;
          load_chunk<kConfig.dtype_q>(q + chunk_offset(kDimQk, 0, q_chunk), x);
#pragma unroll
          for (int e = 0; e < kChunkCols; ++e) dot[e % 2] += x[e] * y[first + e];
        }
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

  template <class Weigh, class Beside>
  PLAIT_DEVICE void add_p_v(const unsigned char* v, const Weigh& weigh, const Beside& beside) {
    beside(0, 1);
    weigh(0, kLogits);
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
#pragma unroll 8
      for (int j = 0; j < kLanesOfRow; ++j) {
        const float weight = __shfl_sync(~0u, s[0][i], j);
#pragma unroll
        for (int c = 0; c < kOutputs; c += 2) {
          if (padded(kDimVo) % 64 != 0 && column(c) >= padded(kDimVo)) break;
          const Two pair = load_pair(v, first_key() + 32 * i + j, column(c));
          o[0][c] += weight * pair.low;
          o[0][c + 1] += weight * pair.high;
        }
      }
    }
  }

 private:
  template <Dtype kDtype, int kCols>
  static PLAIT_DEVICE void load_chunk(const unsigned char* from, float (&x)[kCols]) {
    struct alignas(kChunkBytes) Chunk {
      unsigned words[4];
    };
    const Chunk chunk = *reinterpret_cast<const Chunk*>(from);
#pragma unroll
    for (int i = 0; i < kCols; i += 2) {
      const unsigned word = chunk.words[i / (kCols / 4)];
      Two two;
      if constexpr (!is_fp8(kDtype)) {
        two = to_floats<Storage<kDtype>>(word);
      } else {
        two = i % 4 == 0 ? floats_of_pair<Storage<kDtype>, 0>(word)
                         : floats_of_pair<Storage<kDtype>, 1>(word);
      }
      x[i] = two.low;
      x[i + 1] = two.high;
    }
  }
  // Columns `column` and the next one of a row of V.
  static PLAIT_DEVICE Two load_pair(const unsigned char* v, int row, int column) {
    if constexpr (is_fp8(kRead)) {
      const int offset = chunk_offset(kDimVo, row, column / kChunkBytes, kRead);
      return floats_of_pair<Storage<kRead>, 0>(
          *reinterpret_cast<const unsigned short*>(v + offset + column % kChunkBytes));
    } else {
      return to_floats<Storage<kRead>>(
          *reinterpret_cast<const unsigned*>(v + element_offset(kDimVo, row, column)));
    }
  }
};

}  // namespace plait::sm80
