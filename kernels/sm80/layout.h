// Where things lie in the shared memory of the sm80 kernel, as host/device functions that tests
// enumerate, and how much of it a configuration takes, for the launch and the choice of tiles.
// A row of Q, K or V is head_dim elements, padded to a multiple of 16, in chunks of 16 bytes. Eight
// rows at one chunk, which ldmatrix reads at a time, must lie in eight groups of banks: chunks are
// swizzled by the row where a row has a multiple of eight (128 bytes), else rows are an odd number
// of chunks apart. Rows of fp8 K and V are laid out so too, 16 elements a chunk.
#pragma once
#include "host_device/convert.h"

namespace plait::sm80 {

inline constexpr int kChunkBytes = 16;              // what one cp.async writes
inline constexpr int kChunkCols = 8;                // 16-bit elements
inline constexpr Dtype k16Bits = Dtype::kBfloat16;  // or float16, which is laid out alike

PLAIT_HD constexpr int padded(int head_dim) { return (head_dim + 15) / 16 * 16; }
PLAIT_HD constexpr int num_chunks(int head_dim, Dtype dtype = k16Bits) {
  return padded(head_dim) * bytes_of(dtype) / kChunkBytes;
}
PLAIT_HD constexpr bool swizzled(int head_dim, Dtype dtype = k16Bits) {
  return num_chunks(head_dim, dtype) % 8 == 0;
}
PLAIT_HD constexpr int row_bytes(int head_dim, Dtype dtype = k16Bits) {
  const int chunks = num_chunks(head_dim, dtype);
  return (swizzled(head_dim, dtype) ? chunks : chunks | 1) * kChunkBytes;
}
// Byte offset within a tile of chunk `chunk` of `row`.
PLAIT_HD constexpr int chunk_offset(int head_dim, int row, int chunk, Dtype dtype = k16Bits) {
  return row * row_bytes(head_dim, dtype) +
         (swizzled(head_dim, dtype) ? chunk ^ (row & 7) : chunk) * kChunkBytes;
}
PLAIT_HD constexpr int element_offset(int head_dim, int row, int col) {
  return chunk_offset(head_dim, row, col / kChunkCols) + col % kChunkCols * 2;
}

// Lanes that copy one row of `chunks` chunks side by side.
PLAIT_HD constexpr int lanes_per_row(int chunks) {
  return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
}

// The output leaves through shared memory, kSliceCols columns of at most kSliceRows rows a warp at
// a time; rows are 16 bytes more than that apart.
inline constexpr int kSliceRows = 16, kSliceCols = 64, kSliceStride = kSliceCols + 4;

PLAIT_HD constexpr int max_tile_q(const KernelConfig& c) {
  int rows = 0;
  for (int i = 0; i < c.num_shapes; ++i) {
    rows = c.shapes[i].tile_q > rows ? c.shapes[i].tile_q : rows;
  }
  return rows;
}
// Softmax states that the warps of a tile leave: one a row and key split.
PLAIT_HD constexpr int num_states(const KernelConfig& c) {
  int states = 0;
  for (int i = 0; i < c.num_shapes; ++i) {
    const int of_shape = c.shapes[i].tile_q * c.shapes[i].key_split;
    states = of_shape > states ? of_shape : states;
  }
  return states;
}
PLAIT_HD constexpr int num_threads(const KernelConfig& c) { return 32 * c.num_warps; }
// The 16-bit tile that fp8 K and, after Q K, V become where transforms run on it.
PLAIT_HD constexpr int wide_tile_bytes(const KernelConfig& c) {
  const int head_dim = c.head_dim_qk > c.head_dim_vo ? c.head_dim_qk : c.head_dim_vo;
  return c.num_wide_tiles * c.tile_kv * row_bytes(head_dim);
}
PLAIT_HD constexpr int ring_bytes(const KernelConfig& c) {
  const int ring = wide_tile_bytes(c) + c.num_stages * c.tile_kv *
                                            (row_bytes(c.head_dim_qk, c.dtype_kv) +
                                             row_bytes(c.head_dim_vo, c.dtype_kv));
  const int rows = max_tile_q(c) < kSliceRows ? max_tile_q(c) : kSliceRows;
  const int slices = c.num_warps * rows * kSliceStride * 4;
  return ring > slices ? ring : slices;
}
inline constexpr int kUnitBytes = 128;  // Unit, rounded up

}  // namespace plait::sm80

namespace plait {

// At least sizeof(sm80::Smem).
PLAIT_HD constexpr int sm80_smem_bytes(const KernelConfig& c) {
  const int rows = sm80::max_tile_q(c);
  const int q = (rows * sm80::row_bytes(c.head_dim_qk) + 127) / 128 * 128;
  const int row_info = rows * (16 + 4) + merge_scratch(rows) * 4;  // RowInfo, q_scales, merging
  const int addresses = (c.num_stages + 1) * c.tile_kv * 16;
  const int states = sm80::num_states(c) * 8;
  return (q + sm80::ring_bytes(c) + row_info + addresses + states + sm80::kUnitBytes + 127) / 128 *
         128;
}

}  // namespace plait
