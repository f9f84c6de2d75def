// What every file shared by kernels, CPU backend and tests needs: the qualifier of functions that
// run on both sides, and the few math functions under one name. No standard headers: NVRTC has
// none, and the host compiler reads these files at run time.
#pragma once
#include "plait/plan_data.h"

#if defined(__CUDACC__)
#define PLAIT_HD __host__ __device__ __forceinline__
#define PLAIT_HD_CALLED __host__ __device__ __noinline__
#define PLAIT_DEVICE __device__ __forceinline__
#else
#define PLAIT_HD_CALLED inline
#define PLAIT_HD inline __attribute__((always_inline))
#endif

namespace plait {

// std::conditional
template <bool kCondition, class A, class B>
struct SelectType {
  using type = A;
};
template <class A, class B>
struct SelectType<false, A, B> {
  using type = B;
};
template <bool kCondition, class A, class B>
using Select = typename SelectType<kCondition, A, B>::type;

inline constexpr float kInf = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kNegInf = __builtin_bit_cast(float, 0xff800000u);
inline constexpr int kMaxInt = 0x7fffffff, kMinInt = -kMaxInt - 1;
inline constexpr float kLog2e = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

PLAIT_HD int min(int a, int b) { return a < b ? a : b; }
PLAIT_HD int max(int a, int b) { return a > b ? a : b; }
PLAIT_HD float max(float a, float b) { return a > b ? a : b; }
PLAIT_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }
PLAIT_HD int round_up(int a, int b) { return ceil_div(a, b) * b; }

PLAIT_HD float exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // Inline arithmetic instead of a call, so that loops over a functor vectorise; within 2
  // roundings. 2^n is made from the bits of x + 1.5 * 2^23, whose low bits hold n = round(x).
  const float shifted = x + 12582912.0f;
  const float f = x - (shifted - 12582912.0f);
  float y = 1.5345853e-4f;
  y = y * f + 1.3399931e-3f;
  y = y * f + 9.6184891e-3f;
  y = y * f + 5.5503286e-2f;
  y = y * f + 2.4022646e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  const unsigned exponent = __builtin_bit_cast(unsigned, shifted) << 23;  // n, in its place
  const float half_power = __builtin_bit_cast(float, exponent + (126u << 23));
  return x < -125.0f   ? 0.0f
         : x >= 128.0f ? kInf
                       : (y + y) * half_power;  // no denormals, like the GPU
#endif
}

PLAIT_HD float log2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_log2f(x);
#endif
}

// a * b + c; on a GPU by one instruction, whatever the compiler would make of the products in c.
PLAIT_HD float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

PLAIT_HD float exp(float x) { return exp2(x * kLog2e); }

// 1 / x to one unit in the last place; 0 beyond the largest float.
PLAIT_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

PLAIT_HD float reciprocal_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / __builtin_sqrtf(x);
#endif
}

// tanh to a few float32 roundings, relative to the result. (tanh.approx is off by 2^-11: times a
// soft cap of 50 that is 2 % of a weight.)
PLAIT_HD float tanh(float x) {
#if defined(__CUDA_ARCH__)
  const float y = 1.0f - 2.0f * reciprocal(1.0f + exp2(2.0f * kLog2e * x));
  // Near 0 that cancels. Taylor: the next term is below 6e-8 of x.
  const float x2 = x * x;
  const float series = x + x * x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315)));
  return x2 < 0.04f ? series : y;
#else
  return __builtin_tanhf(x);
#endif
}

}  // namespace plait
