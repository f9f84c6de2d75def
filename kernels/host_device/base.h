// What every file shared by kernels, CPU backend and tests needs: the qualifier of functions that
// run on both sides, and the few math functions under one name. No standard headers: NVRTC has
// none, and the host compiler reads these files at run time.
#pragma once
#include "plait/plan_data.h"

#if defined(__CUDACC__)
#define PLAIT_HD __host__ __device__ __forceinline__
#define PLAIT_DEVICE __device__ __forceinline__
#else
#define PLAIT_HD inline __attribute__((always_inline))
#endif

namespace plait {

inline constexpr float kInf = __builtin_huge_valf();
inline constexpr float kNegInf = -__builtin_huge_valf();
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
  return __builtin_exp2f(x);
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

PLAIT_HD float exp(float x) { return exp2(x * kLog2e); }

// tanh to a few float32 roundings, relative to the result, without overflow. (tanh.approx is off by
// 2^-11: times a soft cap of 50 that is 2 % of a weight.)
PLAIT_HD float tanh(float x) {
#if defined(__CUDA_ARCH__)
  const float x2 = x * x;
  if (x2 < 0.0625f) {  // Taylor: 1 - exp would cancel here; the next term is below 1e-8 of x
    return x + x * x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315 + x2 * (62.0f / 2835))));
  }
  const float e = exp2(-2.0f * kLog2e * (x < 0.0f ? -x : x));
  const float y = __fdividef(1.0f - e, 1.0f + e);
  return x < 0.0f ? -y : y;
#else
  return __builtin_tanhf(x);
#endif
}

}  // namespace plait
