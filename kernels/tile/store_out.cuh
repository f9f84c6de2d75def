// How a final row leaves a kernel: output_transform, conversion, stores.
// Shared by the epilogues, the merge and the padding rows of every kernel.
#pragma once
#include "host_device/config.h"
#include "host_device/convert.h"
#include "host_device/scales.h"
#include "host_device/variant.h"
#include "tile/rows.cuh"

namespace plait {

PLAIT_DEVICE i64 out_offset(const RowStrides& stride, int token, int head) {
  return token * stride.token + head * stride.head;
}

// Rows of the plain kernel's outputs may begin anywhere, those of the others at 16 bytes.
template <KernelConfig kConfig>
inline constexpr bool kAlignedRows = kConfig.shapes[0].mma != Mma::kScalar;

// Four consecutive elements at `address`: one store where it is aligned for that.
template <bool kAligned, class T>
PLAIT_DEVICE void store4(T* address, const float (&x)[4]) {
  struct alignas(4 * sizeof(T)) Four {
    T x[4];
  };
  const Four four{
      {from_float<T>(x[0]), from_float<T>(x[1]), from_float<T>(x[2]), from_float<T>(x[3])}};
  if (kAligned || reinterpret_cast<unsigned long long>(address) % sizeof(Four) == 0) {
    *reinterpret_cast<Four*>(address) = four;
  } else {
    for (int i = 0; i < 4; ++i) address[i] = four.x[i];
  }
}

// Elements dim ... dim + 3 of the final row (token, qo_head), normalised but not scaled. `empty`:
// the row saw no key, so that it is 0 whatever the variant does to outputs.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE void store_out4(const Params& params, const typename V::Params& variant,
                             const PlanView& plan, int token, int qo_head, int dim, bool empty,
                             const float (&x)[4]) {
  if (!has_row(params, token)) return;
  const float scale = output_scale<V, kConfig.dtype_kv>(params);
  float y[4] = {x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale};
  if constexpr (VariantTraits<V>::kHasOutputTransform) {
    const int request = plan.token_request[token], q_pos = plan.token_position[token];
    for (int i = 0; i < 4; ++i) {
      if (!empty) {
        y[i] = V::output_transform(variant, OutputContext{request, q_pos, qo_head, dim + i}, y[i]);
      }
    }
  }
  using Out = Storage<kConfig.dtype_out>;
  store4<kAlignedRows<kConfig>>(
      static_cast<Out*>(params.out) + out_offset(params.out_stride, token, qo_head) + dim, y);
}

// Natural logarithm. Without softmax there is no LSE, and none is written.
template <class V>
PLAIT_DEVICE void store_lse(const Params& params, int token, int qo_head, float lse) {
  if constexpr (VariantTraits<V>::kUseSoftmax) {
    if (params.lse != nullptr && has_row(params, token))
      params.lse[out_offset(params.lse_stride, token, qo_head)] = lse;
  }
}

// Rows of q, out and lse beyond the plan's tokens are padding: (0, -inf). Called by `num_threads`
// threads of every CTA (multiples of 32), a warp a row, spread over the grid.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE void store_padding_rows(const Params& params, const PlanView& plan, int thread,
                                     int num_threads) {
  const int num_warps = num_threads / 32, lane = thread % 32;
  using Out = Storage<kConfig.dtype_out>;
  const bool has_lse = VariantTraits<V>::kUseSoftmax && params.lse != nullptr && lane == 0;
#pragma unroll 1  // rarely run, and compiled into every kernel
  for (unsigned token = plan.num_tokens + blockIdx.x * num_warps + thread / 32;
       token < static_cast<unsigned>(params.num_rows); token += gridDim.x * num_warps) {
    Out* out = static_cast<Out*>(params.out) + token * params.out_stride.token + 4 * lane;
    i64 lse = token * params.lse_stride.token;
#pragma unroll 1
    for (int heads = params.num_qo_heads; heads > 0; --heads) {
      const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int dim = 0; dim < kConfig.head_dim_vo; dim += 128) {
        if (dim + 4 * lane < kConfig.head_dim_vo) {
          store4<kAlignedRows<kConfig>>(out + dim, zeros);
        }
      }
      if (has_lse) params.lse[lse] = kNegInf;
      out += params.out_stride.head;
      lse += params.lse_stride.head;
    }
  }
}

}  // namespace plait
