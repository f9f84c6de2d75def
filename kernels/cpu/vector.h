// A vector of floats as wide as the instruction set this file is compiled for, and what attention
// needs of it: conversion from storage, exp2, the transposition of a block. GCC's and clang's
// vector extensions, no intrinsics beyond the two conversions that compilers do not find.
// Everything is in an inline namespace named after the instruction set: the library compiles these
// files several times, and one set's functions must not be linked into another's.
#pragma once
#include "host_device/base.h"
#include "host_device/convert.h"

#if !defined(PLAIT_CPU_ISA)
#define PLAIT_CPU_ISA native  // compiled at run time, for this machine
#endif
#if defined(__AVX512F__)
#define PLAIT_CPU_LANES(X) \
  X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#elif defined(__AVX__)
#define PLAIT_CPU_LANES(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#else
#define PLAIT_CPU_LANES(X) X(0) X(1) X(2) X(3)
#endif

namespace plait::cpu {
inline namespace PLAIT_CPU_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kNumRegisters = 32;
#else
inline constexpr int kNumRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int IntVec __attribute__((vector_size(4 * kLanes)));
typedef unsigned UintVec __attribute__((vector_size(4 * kLanes)));
typedef unsigned short ShortVec __attribute__((vector_size(2 * kLanes)));
typedef unsigned char ByteVec __attribute__((vector_size(kLanes)));

PLAIT_HD Vec splat(float x) { return x - Vec{}; }  // keeps -0 and NaN

PLAIT_HD Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
PLAIT_HD void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }

PLAIT_HD Vec load(const Bfloat16* p) {
  ShortVec bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
#if defined(__AVX512F__) && !defined(__clang__)  // GCC 12 makes four instructions of the conversion
  typedef short Short16 __attribute__((vector_size(32)));
  const auto wide = __builtin_ia32_pmovzxwd512_mask((Short16)bits, IntVec{}, (unsigned short)-1);
  return (Vec)(wide << 16);
#elif defined(__AVX2__) && !defined(__clang__)
  typedef short Short8 __attribute__((vector_size(16)));
  return (Vec)(__builtin_ia32_pmovzxwd256((Short8)bits) << 16);
#else
  return (Vec)(__builtin_convertvector(bits, UintVec) << 16);
#endif
}
PLAIT_HD Vec load(const Float16* p) {
#if defined(__AVX512F__)
  typedef short Short16 __attribute__((vector_size(32)));
  Short16 bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return __builtin_ia32_vcvtph2ps512_mask(bits, Vec{}, (unsigned short)-1, 4);
#elif defined(__F16C__)
  typedef short Short8 __attribute__((vector_size(16)));
  Short8 bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return __builtin_ia32_vcvtph2ps256(bits);
#else
  ShortVec bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  const UintVec x = __builtin_convertvector(bits, UintVec);
  const UintVec magnitude = x & 0x7fff;
  // Exponent and fraction in their places, then the difference of the biases: right for subnormals.
  const UintVec finite = (UintVec)((Vec)(magnitude << 13) * 0x1p112f);
  const UintVec special = magnitude << 13 | 0x7f800000;
  return (Vec)((magnitude < 0x7c00 ? finite : special) | ((x & 0x8000) << 16));
#endif
}

// Of 8-bit floats: kLanes bytes, each in an element.
PLAIT_HD UintVec load_bytes(const unsigned char* p) {
#if defined(__AVX512F__) && !defined(__clang__)  // as with bfloat16
  typedef char Byte16 __attribute__((vector_size(16)));
  Byte16 bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return (UintVec)__builtin_ia32_pmovzxbd512_mask(bytes, IntVec{}, (unsigned short)-1);
#else
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, UintVec);
#endif
}
// Value of bytes with kFraction fraction bits; those from kSpecial on are no finite numbers, and
// have the fraction that float has there. Subnormals: see to_float(E4m3).
template <int kFraction, int kBias, unsigned kSpecial>
PLAIT_HD Vec from_bytes(UintVec x) {
  constexpr int kShift = 23 - kFraction;
  constexpr float kUnit = __builtin_bit_cast(float, (128u - kBias - kFraction) << 23);
  const UintVec magnitude = x & 0x7f;
  const UintVec normal = (magnitude << kShift) + ((127u - kBias) << 23);
  const UintVec subnormal = (UintVec)(__builtin_convertvector((IntVec)magnitude, Vec) * kUnit);
  const UintVec special = magnitude << kShift | 0x7f800000;
  const UintVec bits = magnitude < (1u << kFraction) ? subnormal
                       : magnitude < kSpecial        ? normal
                                                     : special;
  return (Vec)(bits | (x & 0x80) << 24);
}
PLAIT_HD Vec load(const E4m3* p) { return from_bytes<3, 7, 0x7f>(load_bytes(&p->bits)); }
PLAIT_HD Vec load(const E5m2* p) { return from_bytes<2, 15, 0x7c>(load_bytes(&p->bits)); }

using plait::exp2;  // of floats, beside those of Vec below
using plait::max;

PLAIT_HD Vec max(Vec a, Vec b) { return a > b ? a : b; }

// 2^x to about one rounding, for softmax weights: x <= 0, or a rounding above. 0 below 2^-126; NaN
// stays NaN.
PLAIT_HD Vec exp2(Vec x) {
  const Vec shifted = x + 12582912.0f;  // 1.5 * 2^23: the low bits are now round(x)
  const Vec f = x - (shifted - 12582912.0f);
  Vec y = splat(1.5345853e-4f);  // minimax on [-0.5, 0.5], 2e-9
  y = y * f + 1.3399931e-3f;
  y = y * f + 9.6184891e-3f;
  y = y * f + 5.5503286e-2f;
  y = y * f + 2.4022646e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  const UintVec power = ((UintVec)shifted << 23) + (127u << 23);
  return x < -126.0f ? Vec{} : y * (Vec)power;
}

// The vector with blocks of kStep elements exchanged pairwise.
#define PLAIT_SWAP(j) , ((j) ^ kStep)
template <int kStep>
PLAIT_HD Vec swap_blocks(Vec x) {
  return __builtin_shufflevector(x, x PLAIT_CPU_LANES(PLAIT_SWAP));
}
#undef PLAIT_SWAP
template <int kStep = kLanes / 2>
PLAIT_HD float sum_of(Vec x) {
  x += swap_blocks<kStep>(x);
  if constexpr (kStep == 1) {
    return x[0];
  } else {
    return sum_of<kStep / 2>(x);
  }
}
template <int kStep = kLanes / 2>
PLAIT_HD float max_of(Vec x) {
  x = max(x, swap_blocks<kStep>(x));
  if constexpr (kStep == 1) {
    return x[0];
  } else {
    return max_of<kStep / 2>(x);
  }
}

// One step of a transposition by butterflies: of blocks of kStep x kStep elements, the off-diagonal
// ones change places.  low: a's even blocks, b's even blocks moved up; high: the odd ones.
#define PLAIT_LOW(j) , ((j)&kStep ? kLanes + (j)-kStep : (j))
#define PLAIT_HIGH(j) , ((j)&kStep ? kLanes + (j) : (j) + kStep)
template <int kStep>
PLAIT_HD Vec low_blocks(Vec a, Vec b) {
  return __builtin_shufflevector(a, b PLAIT_CPU_LANES(PLAIT_LOW));
}
template <int kStep>
PLAIT_HD Vec high_blocks(Vec a, Vec b) {
  return __builtin_shufflevector(a, b PLAIT_CPU_LANES(PLAIT_HIGH));
}
#undef PLAIT_LOW
#undef PLAIT_HIGH

// Transposes the kLanes x kLanes block whose rows are x.
template <int kStep = 1>
PLAIT_HD void transpose(Vec (&x)[kLanes]) {
  if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & kStep) continue;
      const Vec a = x[i], b = x[i + kStep];
      x[i] = low_blocks<kStep>(a, b);
      x[i + kStep] = high_blocks<kStep>(a, b);
    }
    transpose<2 * kStep>(x);
  }
}

// The sums of kLanes vectors: lane i of the result is the sum of x[i]. The transposition above,
// with both halves added as they come.
template <int kStep = 1>
PLAIT_HD Vec sums_of(Vec (&x)[kLanes]) {
  if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2 * kStep) {
      const Vec a = x[i], b = x[i + kStep];
      x[i] = low_blocks<kStep>(a, b) + high_blocks<kStep>(a, b);
    }
    return sums_of<2 * kStep>(x);
  } else {
    return x[0];
  }
}

}  // namespace PLAIT_CPU_ISA
}  // namespace plait::cpu
