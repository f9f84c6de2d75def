// Where things lie in the shared memory of the sm90a kernel, as host/device functions that tests
// enumerate against the plain layout: the 128-byte swizzle, wgmma's matrix descriptors, and the
// addresses that loaders write. A tile of Q, K or V is stored as panels of 64 elements (128 bytes)
// a row: [panels][rows][64], each panel 1024-byte aligned. Columns from head_dim up to the next
// multiple of 16, which is what wgmma takes, are zeros. fp8 K and V land as they lie in memory,
// dense rows of head_dim bytes, and become such a tile.
// Source: PTX manual, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix
// Descriptor Format".
#pragma once
#include "host_device/convert.h"
#include "host_device/tile_list.h"

namespace plait::sm90 {

inline constexpr int kPanelCols = 64;  // 16-bit elements
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kChunkBytes = 16;  // what one cp.async writes; the swizzle moves whole chunks
inline constexpr int kChunkCols = 8;

// Of a row of `dim` elements.
PLAIT_HD constexpr int panels_of(int dim) { return (dim + kPanelCols - 1) / kPanelCols; }
PLAIT_HD constexpr int padded_dim(int dim) { return (dim + 15) / 16 * 16; }
PLAIT_HD constexpr int tile_bytes(int rows, int dim) {
  return rows * panels_of(dim) * kPanelRowBytes;
}

// What K and V are copied as: bytes of `rows` rows, and the boxes that TMA takes for a row.
PLAIT_HD constexpr int copied_bytes(const KernelConfig& c, int rows, int dim) {
  return is_fp8(c.dtype_kv) ? rows * dim : tile_bytes(rows, dim);
}
PLAIT_HD constexpr int boxes_of(const KernelConfig& c, int dim) {
  return is_fp8(c.dtype_kv) ? 1 : panels_of(dim);
}

// Byte offset within a tile of `rows` rows of chunk `chunk` (8 elements from 8 * chunk) of `row`.
PLAIT_HD constexpr int chunk_offset(int rows, int row, int chunk) {
  const int panel = chunk / 8, in_panel = chunk % 8;
  return panel * rows * kPanelRowBytes + row * kPanelRowBytes +
         ((in_panel ^ (row & 7)) * kChunkBytes);
}
PLAIT_HD constexpr int element_offset(int rows, int row, int col) {
  // As chunk_offset(rows, row, col / 8) + col % 8 * 2, in fewer instructions.
  return col / kPanelCols * rows * kPanelRowBytes + row * kPanelRowBytes +
         ((col % kPanelCols * 2) ^ (row * kChunkBytes & 7 * kChunkBytes));
}

// Descriptors: 14-bit fields in units of 16 bytes; layout type 1 is the 128-byte swizzle. Only the
// low word, leading offset and address, differs between tiles and steps.
PLAIT_HD constexpr unsigned descriptor_low(unsigned smem_address, int leading_bytes) {
  return (smem_address & 0x3ffff) >> 4 | static_cast<unsigned>(leading_bytes >> 4) << 16;
}
PLAIT_HD constexpr i64 descriptor(unsigned low) {
  constexpr int kStrideBytes = 8 * kPanelRowBytes;  // between groups of 8 rows, in both majors
  constexpr i64 kHigh = (kStrideBytes >> 4) | static_cast<i64>(1) << 30;
  return kHigh << 32 | low;
}
// Q and K: rows are M or N, k runs along the row. The leading offset is unused. The 16-wide k step
// `k16` starts 32 bytes further, in the next panel after 4.
PLAIT_HD constexpr unsigned k_major_descriptor(unsigned tile_address) {
  return descriptor_low(tile_address, 16);
}
PLAIT_HD constexpr int k_major_step(int rows, int k16) {  // bytes
  return k16 / 4 * rows * kPanelRowBytes + k16 % 4 * 32;
}
// V: rows are k, N runs along the row. Panels of 64 columns are `rows` rows apart (leading). Step
// k16 starts 16 rows further.
PLAIT_HD constexpr unsigned n_major_descriptor(unsigned tile_address, int rows) {
  return descriptor_low(tile_address, rows * kPanelRowBytes);
}
PLAIT_HD constexpr int n_major_step(int k16) { return k16 * 16 * kPanelRowBytes; }

}  // namespace plait::sm90
