// Storage types of 16-bit and 8-bit floats and their conversion to and from float, rounding to
// nearest even; to 8 bits with saturation: what is larger than the largest finite value becomes it.
// Bits only: no cuda_fp16.h for NVRTC, no compiler extension needed on the host.
// Source of the 8-bit formats: Micikevicius et al., 2022, arXiv:2209.05433.
#pragma once
#include "host_device/base.h"

namespace plait {

struct Bfloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};
struct E4m3 {  // float8_e4m3fn: bias 7, up to 448, no infinity, 0x7f is NaN
  unsigned char bits;
};
struct E5m2 {  // float8_e5m2: the upper byte of a float16
  unsigned char bits;
};

PLAIT_HD float to_float(float x) { return x; }
PLAIT_HD float to_float(Bfloat16 x) {
  return __builtin_bit_cast(float, static_cast<unsigned>(x.bits) << 16);
}
PLAIT_HD float to_float(Float16 x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  // Exponent and fraction in their places, then the difference of the biases: right for subnormals.
  const unsigned magnitude = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  const float finite = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  const unsigned bits =
      magnitude < 0x7c00u ? __builtin_bit_cast(unsigned, finite) : magnitude << 13 | 0x7f800000u;
  return __builtin_bit_cast(float, bits | sign);
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890  // before it there is no such instruction
PLAIT_HD float to_float(E4m3 x) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(x.bits)));
  return to_float(Float16{static_cast<unsigned short>(halves)});
}
#else
PLAIT_HD float to_float(E4m3 x) {
  // Exponent and fraction in their places and the difference of the biases; subnormals are counted
  // in units of 2^-9, for a multiplication of float subnormals is slow on the host.
  const unsigned magnitude = x.bits & 0x7fu;
  const unsigned subnormal = __builtin_bit_cast(unsigned, static_cast<float>(magnitude) * 0x1p-9f);
  const unsigned bits = magnitude == 0x7f ? 0x7fffffffu
                        : magnitude < 8 ? subnormal
                                        : (magnitude << 20) + (120u << 23);
  return __builtin_bit_cast(float, bits | (x.bits & 0x80u) << 24);
}
#endif
PLAIT_HD float to_float(E5m2 x) {
  return to_float(Float16{static_cast<unsigned short>(x.bits << 8)});
}

template <class T>
PLAIT_HD T from_float(float x);
template <>
PLAIT_HD float from_float<float>(float x) {
  return x;
}
template <>
PLAIT_HD Bfloat16 from_float<Bfloat16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800  // before it there is no such instruction
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return {y};
#else
  const unsigned u = __builtin_bit_cast(unsigned, x);
  const unsigned rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<unsigned short>(is_nan ? 0x7fffu : rounded)};
#endif
}
template <>
PLAIT_HD Float16 from_float<Float16>(float x) {
#if defined(__CUDA_ARCH__)
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return {y};
#else
  const unsigned u = __builtin_bit_cast(unsigned, x), magnitude = u & 0x7fffffffu;
  // Below 2^-14 one unit is 2^-24, which is what adding 0.5 rounds to.
  const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
  const unsigned subnormal = __builtin_bit_cast(unsigned, shifted) - 0x3f000000u;
  const unsigned normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const unsigned half = magnitude > 0x7f800000u ? 0x7e00u     // NaN
                        : magnitude >= 0x477ff000u ? 0x7c00u  // rounds to infinity
                        : magnitude < 0x38800000u ? subnormal
                                                  : normal;
  return {static_cast<unsigned short>((u >> 16 & 0x8000u) | half)};
#endif
}

// Of a format with kFraction fraction bits and this bias, whose largest finite value is `largest`.
template <int kFraction, int kBias>
PLAIT_HD unsigned char to_8_bits(float x, unsigned largest_float, unsigned largest) {
  const unsigned u = __builtin_bit_cast(unsigned, x), magnitude = u & 0x7fffffffu;
  constexpr int kShift = 23 - kFraction;
  constexpr unsigned kSmallestNormal = (128u - kBias) << 23;
  // Below it one unit is 2^(1 - kBias - kFraction), which is what adding 2^23 of them rounds to.
  constexpr unsigned kUnits = (127u + 1 - kBias - kFraction + 23) << 23;
  const float shifted = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, kUnits);
  const unsigned subnormal = __builtin_bit_cast(unsigned, shifted) - kUnits;
  const unsigned half = (1u << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1u);
  const unsigned normal = (magnitude - ((127u - kBias) << 23) + half) >> kShift;
  const unsigned rounded = magnitude > 0x7f800000u       ? 0x7fu  // NaN
                           : magnitude >= largest_float  ? largest
                           : magnitude < kSmallestNormal ? subnormal
                                                         : normal;
  return static_cast<unsigned char>((u >> 24 & 0x80u) | rounded);
}
template <>
PLAIT_HD E4m3 from_float<E4m3>(float x) {
  return {to_8_bits<3, 7>(x, 0x43e00000u, 0x7eu)};  // 448
}
template <>
PLAIT_HD E5m2 from_float<E5m2>(float x) {
  return {to_8_bits<2, 15>(x, 0x47600000u, 0x7bu)};  // 57344
}

// Two neighbours of 16 bits in one word, the first in the lower half.
struct Two {
  float low, high;
};
template <class T>
PLAIT_HD Two to_floats(unsigned packed) {
  return {to_float(T{static_cast<unsigned short>(packed)}),
          to_float(T{static_cast<unsigned short>(packed >> 16)})};
}
template <>
PLAIT_HD Two to_floats<Bfloat16>(unsigned packed) {  // an instruction each
  return {__builtin_bit_cast(float, packed << 16), __builtin_bit_cast(float, packed & 0xffff0000u)};
}
template <class T>
PLAIT_HD unsigned from_floats(float low, float high) {
  return from_float<T>(low).bits | static_cast<unsigned>(from_float<T>(high).bits) << 16;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
PLAIT_HD unsigned from_floats<Bfloat16>(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
PLAIT_HD unsigned from_floats<Float16>(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
#endif

template <Dtype kDtype>
struct StorageOf;
template <>
struct StorageOf<Dtype::kFloat32> {
  using type = float;
};
template <>
struct StorageOf<Dtype::kBfloat16> {
  using type = Bfloat16;
};
template <>
struct StorageOf<Dtype::kFloat16> {
  using type = Float16;
};
template <>
struct StorageOf<Dtype::kE4m3> {
  using type = E4m3;
};
template <>
struct StorageOf<Dtype::kE5m2> {
  using type = E5m2;
};
template <Dtype kDtype>
using Storage = typename StorageOf<kDtype>::type;

PLAIT_HD constexpr bool is_fp8(Dtype dtype) {
  return dtype == Dtype::kE4m3 || dtype == Dtype::kE5m2;
}
PLAIT_HD constexpr int bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : is_fp8(dtype) ? 1 : 2;
}

}  // namespace plait
