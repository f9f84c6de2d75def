// Matrix fragments of a warp: ldmatrix, stmatrix, mma.sync m16n8k16 with float32 accumulators. Lane
// l holds of a 16 x 8 accumulator rows l / 4 and l / 4 + 8, columns 2 (l % 4) + {0, 1}. PTX manual:
// "Warp Level Matrix Instructions" (ldmatrix; stmatrix; "Matrix Fragments for mma.m16n8k16").
#pragma once
#include "host_device/config.h"
#include "ptx/pack.cuh"
#include "ptx/smem.cuh"

namespace plait::ptx {

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 and
// gets elements 2 (l % 4) + {0, 1} of row l / 4 of each.
PLAIT_DEVICE void ldmatrix_x4(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices.
PLAIT_DEVICE void ldmatrix_x4_trans(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// The reverse of ldmatrix_x4. From sm_90 on.
PLAIT_DEVICE void stmatrix_x4(unsigned address, const unsigned (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

// d += a b. d[0], d[1] are of row l / 4, d[2], d[3] of row l / 4 + 8. a: rows x k in quarters (row
// low, k low), (row high, k low), (row low, k high), (row high, k high); b: k low, k high.
template <Dtype kDtype>
PLAIT_DEVICE void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, const unsigned (&a)[4],
                               unsigned b0, unsigned b1) {
  if constexpr (kDtype == Dtype::kBfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(kDtype == Dtype::kFloat16);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace plait::ptx
