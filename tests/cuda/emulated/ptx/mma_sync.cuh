// kernels/ptx/mma_sync.cuh for emulate.h, written from the PTX manual's figures of the fragments.
// Sums are exact to float32 rounding; the order of a k16 step's products is not the tensor core's.
#pragma once
#include "host_device/config.h"
#include "host_device/convert.h"
#include "ptx/pack.cuh"
#include "ptx/smem.cuh"

namespace plait::ptx {

// Element (row, col) of matrix `i`, whose rows' addresses the lanes gave.
inline unsigned short matrix_element(const unsigned char* slots, int i, int row, int col) {
  const unsigned address = emulate::lane_value<unsigned>(slots, 8 * i + row);
  unsigned short x;
  std::memcpy(&x, emulate::dynamic_smem + address + 2 * col, sizeof x);
  return x;
}

template <bool kTransposed>
void load_matrices(unsigned (&d)[4], unsigned address) {
  emulate::check_aligned(emulate::dynamic_smem + address, 16);
  const unsigned char* slots = emulate::cta->exchange(~0u, address);
  const int lane = emulate::cta->running % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, col = lane % 4 * 2;
    const unsigned low =
        kTransposed ? matrix_element(slots, i, col, row) : matrix_element(slots, i, row, col);
    const unsigned high = kTransposed ? matrix_element(slots, i, col + 1, row)
                                      : matrix_element(slots, i, row, col + 1);
    d[i] = high << 16 | low;
  }
}
inline void ldmatrix_x4(unsigned (&d)[4], unsigned address) { load_matrices<false>(d, address); }
inline void ldmatrix_x4_trans(unsigned (&d)[4], unsigned address) {
  load_matrices<true>(d, address);
}

inline void stmatrix_x4(unsigned address, const unsigned (&d)[4]) {
  struct Row {
    unsigned address, d[4];
  };
  emulate::check_aligned(emulate::dynamic_smem + address, 16);
  const Row mine{address, {d[0], d[1], d[2], d[3]}};
  const unsigned char* slots = emulate::cta->exchange(~0u, mine);
  const int lane = emulate::cta->running % 32;  // writes what the others have of its row
  for (int col = 0; col < 8; col += 2) {
    const auto from = emulate::lane_value<Row>(slots, lane % 8 * 4 + col / 2);
    std::memcpy(emulate::dynamic_smem + address + 2 * col, &from.d[lane / 8], 4);
  }
}

template <Dtype kDtype>
float half_of(unsigned pair, int high) {
  return to_float(Storage<kDtype>{static_cast<unsigned short>(pair >> (16 * high))});
}

template <Dtype kDtype>
void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, const unsigned (&a)[4], unsigned b0,
                  unsigned b1) {
  struct Fragments {
    unsigned a[4], b[2];
  };
  const Fragments mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const unsigned char* slots = emulate::cta->exchange(~0u, mine);
  const int lane = emulate::cta->running % 32;
  float* const d[2][2] = {{&d0, &d1}, {&d2, &d3}};
  for (int k = 0; k < 16; ++k) {
    const auto row = emulate::lane_value<Fragments>(slots, lane / 4 * 4 + k % 8 / 2);
    for (int col = 0; col < 2; ++col) {
      const auto column =
          emulate::lane_value<Fragments>(slots, (lane % 4 * 2 + col) * 4 + k % 8 / 2);
      const float b = half_of<kDtype>(column.b[k / 8], k % 2);
      for (int high = 0; high < 2; ++high) {
        *d[high][col] += half_of<kDtype>(row.a[k / 8 * 2 + high], k % 2) * b;
      }
    }
  }
}

}  // namespace plait::ptx
