// wgmma: D[64 x N] += A[64 x 16] * B[16 x N], asynchronous, by one warpgroup. D and A from
// registers lie as mma fragments do: thread t of a warp holds, in rows t / 4 and t / 4 + 8 of the
// warp's 16, columns 8 j + 2 (t % 4) + {0, 1}. Operands in shared memory are given by descriptor
// (sm90/layout.h). PTX manual: "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once
#include "host_device/base.h"

namespace plait::ptx {

// Before the first wgmma after ordinary code wrote accumulators or A registers.
PLAIT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PLAIT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
PLAIT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across a wait.
template <int kCount>
PLAIT_DEVICE void wgmma_fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// N is a multiple of 16 up to 256, types are bfloat16 and float16.
//   ss: A and B from shared memory, both K-major
//   rs: A from registers, B from shared memory, N-major (rows are k)
template <Dtype kDtype, int kN>
struct Wgmma;

// clang-format off
// What an instruction of N columns names: its N / 2 accumulators, %0 ..., as text and as operands.
#define PLAIT_WGMMA_D(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),      \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PLAIT_WGMMA_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLAIT_WGMMA_TEXT_32 PLAIT_WGMMA_TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLAIT_WGMMA_TEXT_48 PLAIT_WGMMA_TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PLAIT_WGMMA_TEXT_64 PLAIT_WGMMA_TEXT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PLAIT_WGMMA_TEXT_80 PLAIT_WGMMA_TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PLAIT_WGMMA_TEXT_96 PLAIT_WGMMA_TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PLAIT_WGMMA_TEXT_112 PLAIT_WGMMA_TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PLAIT_WGMMA_TEXT_128 PLAIT_WGMMA_TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PLAIT_WGMMA_TEXT_144 PLAIT_WGMMA_TEXT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PLAIT_WGMMA_TEXT_160 PLAIT_WGMMA_TEXT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PLAIT_WGMMA_TEXT_176 PLAIT_WGMMA_TEXT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PLAIT_WGMMA_TEXT_192 PLAIT_WGMMA_TEXT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PLAIT_WGMMA_TEXT_208 PLAIT_WGMMA_TEXT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define PLAIT_WGMMA_TEXT_224 PLAIT_WGMMA_TEXT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define PLAIT_WGMMA_TEXT_240 PLAIT_WGMMA_TEXT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PLAIT_WGMMA_TEXT_256 PLAIT_WGMMA_TEXT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define PLAIT_WGMMA_D_16 PLAIT_WGMMA_D(0)
#define PLAIT_WGMMA_D_32 PLAIT_WGMMA_D_16, PLAIT_WGMMA_D(8)
#define PLAIT_WGMMA_D_48 PLAIT_WGMMA_D_32, PLAIT_WGMMA_D(16)
#define PLAIT_WGMMA_D_64 PLAIT_WGMMA_D_48, PLAIT_WGMMA_D(24)
#define PLAIT_WGMMA_D_80 PLAIT_WGMMA_D_64, PLAIT_WGMMA_D(32)
#define PLAIT_WGMMA_D_96 PLAIT_WGMMA_D_80, PLAIT_WGMMA_D(40)
#define PLAIT_WGMMA_D_112 PLAIT_WGMMA_D_96, PLAIT_WGMMA_D(48)
#define PLAIT_WGMMA_D_128 PLAIT_WGMMA_D_112, PLAIT_WGMMA_D(56)
#define PLAIT_WGMMA_D_144 PLAIT_WGMMA_D_128, PLAIT_WGMMA_D(64)
#define PLAIT_WGMMA_D_160 PLAIT_WGMMA_D_144, PLAIT_WGMMA_D(72)
#define PLAIT_WGMMA_D_176 PLAIT_WGMMA_D_160, PLAIT_WGMMA_D(80)
#define PLAIT_WGMMA_D_192 PLAIT_WGMMA_D_176, PLAIT_WGMMA_D(88)
#define PLAIT_WGMMA_D_208 PLAIT_WGMMA_D_192, PLAIT_WGMMA_D(96)
#define PLAIT_WGMMA_D_224 PLAIT_WGMMA_D_208, PLAIT_WGMMA_D(104)
#define PLAIT_WGMMA_D_240 PLAIT_WGMMA_D_224, PLAIT_WGMMA_D(112)
#define PLAIT_WGMMA_D_256 PLAIT_WGMMA_D_240, PLAIT_WGMMA_D(120)

// i0 ... i5: the numbers of the operands behind the accumulators.
#define PLAIT_WGMMA_SS(type, n, i0, i1, i2)                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                     \
               " {" PLAIT_WGMMA_TEXT_##n "}, %" #i0 ", %" #i1 ", p, 1, 1, 0, 0;\n}\n"              \
               : PLAIT_WGMMA_D_##n                                                                 \
               : "l"(a), "l"(b), "r"(accumulate))
#define PLAIT_WGMMA_RS(type, n, i0, i1, i2, i3, i4, i5)                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                     \
               " {" PLAIT_WGMMA_TEXT_##n "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4      \
               ", p, 1, 1, 1;\n}\n"                                                                \
               : PLAIT_WGMMA_D_##n                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define PLAIT_WGMMA(n, i0, i1, i2, i3, i4, i5)                                                     \
  template <Dtype kDtype>                                                                          \
  struct Wgmma<kDtype, n> {                                                                        \
    static PLAIT_DEVICE void ss(float (&d)[n / 2], i64 a, i64 b, int accumulate) {                 \
      if constexpr (kDtype == Dtype::kBfloat16) PLAIT_WGMMA_SS("bf16", n, i0, i1, i2);             \
      if constexpr (kDtype == Dtype::kFloat16) PLAIT_WGMMA_SS("f16", n, i0, i1, i2);               \
    }                                                                                              \
    static PLAIT_DEVICE void rs(float (&d)[n / 2], const unsigned* a, i64 b, int accumulate) {     \
      if constexpr (kDtype == Dtype::kBfloat16) {                                                  \
        PLAIT_WGMMA_RS("bf16", n, i0, i1, i2, i3, i4, i5);                                         \
      }                                                                                            \
      if constexpr (kDtype == Dtype::kFloat16) PLAIT_WGMMA_RS("f16", n, i0, i1, i2, i3, i4, i5);   \
    }                                                                                              \
  }
PLAIT_WGMMA(16, 8, 9, 10, 11, 12, 13);
PLAIT_WGMMA(32, 16, 17, 18, 19, 20, 21);
PLAIT_WGMMA(48, 24, 25, 26, 27, 28, 29);
PLAIT_WGMMA(64, 32, 33, 34, 35, 36, 37);
PLAIT_WGMMA(80, 40, 41, 42, 43, 44, 45);
PLAIT_WGMMA(96, 48, 49, 50, 51, 52, 53);
PLAIT_WGMMA(112, 56, 57, 58, 59, 60, 61);
PLAIT_WGMMA(128, 64, 65, 66, 67, 68, 69);
PLAIT_WGMMA(144, 72, 73, 74, 75, 76, 77);
PLAIT_WGMMA(160, 80, 81, 82, 83, 84, 85);
PLAIT_WGMMA(176, 88, 89, 90, 91, 92, 93);
PLAIT_WGMMA(192, 96, 97, 98, 99, 100, 101);
PLAIT_WGMMA(208, 104, 105, 106, 107, 108, 109);
PLAIT_WGMMA(224, 112, 113, 114, 115, 116, 117);
PLAIT_WGMMA(240, 120, 121, 122, 123, 124, 125);
PLAIT_WGMMA(256, 128, 129, 130, 131, 132, 133);
// clang-format on

}  // namespace plait::ptx
