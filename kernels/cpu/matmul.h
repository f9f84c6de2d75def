// The two products of attention on register blocks: Q K^T by dot products (few rows, K read as it
// lies) and C = scale C + A B by broadcasts (many rows with K transposed, and weights times V).
// Written as plain loops over Vec arrays small enough to stay in registers, in functions of their
// own: inlined into the item's loop they spill, and decode takes 1.4 times as long (GCC 12).
#pragma once
#include "cpu/vector.h"

namespace plait::cpu {
inline namespace PLAIT_CPU_ISA {

// Rows of a matrix in one buffer.
struct BufferRows {
  using Element = float;
  const float* base;
  int pitch;
  PLAIT_HD const float* row(int i) const { return base + static_cast<i64>(i) * pitch; }
  PLAIT_HD void prefetch(int, int) const {}
};

// Rows where they lie in a KV cache. Reading column c of row i fetches the same of `ahead`, rows
// wanted soon, into L2: it doubled the rate of decode in bfloat16 where the cache lies in DRAM.
// (Only with few pages open at a time: see kFewKeys.)
template <class T>
struct CacheRows {
  using Element = T;
  const T* base;
  const i64* offsets;
  const T* ahead_base;
  const i64* ahead_offsets;
  PLAIT_HD const T* row(int i) const { return base + offsets[i]; }
  PLAIT_HD void prefetch(int i, int column) const {
    if (column * static_cast<int>(sizeof(T)) % 64 == 0) {
      __builtin_prefetch(ahead_base + ahead_offsets[i] + column, 0, 2);
    }
  }
};

// Register block of dot products: 4 rows of A x kDotKeys rows of B are kLanes sums.
inline constexpr int kDotRows = 4;
inline constexpr int kDotKeys = kLanes / kDotRows;

// c[r][k] = sum over d < dim of a[r][d] * b.row(k)[d], for r < num_rows rounded up to kDotRows and
// k < num_keys. dim is a multiple of kLanes. Rows of b are read once for every kDotRows rows, from
// L1 after the first; entries of c up to the next multiple of kDotKeys are overwritten.
template <class Rows>
__attribute__((noinline)) void dot_products(const float* a, int a_pitch, int num_rows,
                                            const Rows& b, int num_keys, int dim, float* c,
                                            int c_pitch) {
  for (int k = 0; k < num_keys; k += kDotKeys) {
    const typename Rows::Element* keys[kDotKeys];
    for (int j = 0; j < kDotKeys; ++j) keys[j] = b.row(min(k + j, num_keys - 1));
    for (int r = 0; r < num_rows; r += kDotRows) {
      Vec sums[kLanes] = {};
      for (int d = 0; d < dim; d += kLanes) {
        Vec x[kDotRows];
#pragma GCC unroll 4
        for (int i = 0; i < kDotRows; ++i) x[i] = load(a + (r + i) * a_pitch + d);
#pragma GCC unroll 4
        for (int j = 0; j < kDotKeys; ++j) {
          if (r == 0) b.prefetch(min(k + j, num_keys - 1), d);
          const Vec y = load(keys[j] + d);
#pragma GCC unroll 4
          for (int i = 0; i < kDotRows; ++i) sums[i * kDotKeys + j] += x[i] * y;
        }
      }
      const Vec products = sums_of(sums);
      for (int i = 0; i < kDotRows; ++i) {
        __builtin_memcpy(c + (r + i) * c_pitch + k,
                         reinterpret_cast<const char*>(&products) + i * kDotKeys * sizeof(float),
                         kDotKeys * sizeof(float));
      }
    }
  }
}

// Rows x vectors of accumulators of one register block, with room for the vectors of B.
inline constexpr int kBlockVecs = kNumRegisters == 32 ? 4 : 2;

// c[0 ... kRows)[0 ... kVecs vectors) = scale[r] * c + a b over num_k rows of b, from `column` on.
template <int kRows, int kVecs, class Rows>
__attribute__((noinline)) void matmul_block(const float* a, int a_pitch, const Rows& b, int column,
                                            int num_k, const float* scale, float* c, int c_pitch) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      sums[i][j] = scale == nullptr ? Vec{} : load(c + i * c_pitch + j * kLanes) * scale[i];
    }
  }
  for (int k = 0; k < num_k; ++k) {
    const typename Rows::Element* row = b.row(k) + column;
    Vec y[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      b.prefetch(k, column + j * kLanes);
      y[j] = load(row + j * kLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[i][j] += y[j] * a[i * a_pitch + k];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) store(c + i * c_pitch + j * kLanes, sums[i][j]);
  }
}

// C = scale C + A B; scale null: C = A B. num_rows is rounded up to kRows; num_columns is a
// multiple of kLanes.
template <int kRows, class Rows>
inline void matmul(const float* a, int a_pitch, int num_rows, const Rows& b, int num_columns,
                   int num_k, const float* scale, float* c, int c_pitch) {
  int column = 0;
  const auto blocks = [&]<int kVecs>() {
    for (; column + kVecs * kLanes <= num_columns; column += kVecs * kLanes) {
      for (int r = 0; r < num_rows; r += kRows) {
        matmul_block<kRows, kVecs>(a + r * a_pitch, a_pitch, b, column, num_k,
                                   scale == nullptr ? nullptr : scale + r, c + r * c_pitch + column,
                                   c_pitch);
      }
    }
  };
  if constexpr (kBlockVecs == 4) blocks.template operator()<4>();
  blocks.template operator()<2>();
  blocks.template operator()<1>();
}

}  // namespace PLAIT_CPU_ISA
}  // namespace plait::cpu
