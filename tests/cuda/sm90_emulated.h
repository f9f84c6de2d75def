// kernels/sm90 executed on the host, one CTA at a time, against float64 with NaN wherever no list
// has a key. The instructions stand in tests/cuda/emulated/ptx; what is proven is where things lie,
// who waits for whom and what is computed, not what the hardware makes of it.
#pragma once
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include "cuda/emulated_case.h"
#include "cuda/row_units.h"
#include "cuda/sm90_tiles.h"
#include "cuda/tensor_maps.h"
#include "sm90/attention.cuh"

namespace plait::test {

inline PlanTarget target_of(const KernelConfig& config, const Shape& shape, int num_ctas) {
  PlanTarget target;
  target.num_ctas = num_ctas;
  target.tile_kv = config.tile_kv;
  target.kv_align = cuda::kv_align(config, shape.affine ? 1 : shape.page_size);
  target.chunk_keys = config.chunk_keys;
  target.group_size = shape.group_size;
  target.num_kv_heads = shape.num_kv_heads;
  target.num_shapes = config.num_shapes;
  for (int i = 0; i < config.num_shapes; ++i) {
    target.shapes[i] = {config.shapes[i].tile_q, config.shapes[i].key_split, 0.1f, 0.1f};
  }
  target.merge_us = 0.1f;
  target.max_partial_rows = 100000;
  target.queue_percent = 30;  // a queue where the batch is long enough
  target.min_queued_keys = 64;
  target.min_keys_for_queue = 192;
  return target;
}

// As in emulated_case.h, with the sm90 kernel of `kConfig`, in both orders of threads. Inputs, P
// and the result are rounded to 16 bits.
template <KernelConfig kConfig, class V = Standard, class T, class Kv, class Meaning = PlainMeaning>
int run_sm90(const Case<T, Kv>& c, int num_ctas, const typename V::Params& variant = {},
             const Meaning& meaning = {}, double lse_tolerance = 2e-5,
             EmulatedOutput* output = nullptr) {
  const int page_size = c.shape.affine ? 0 : c.shape.page_size;
  ptx::MappedTensor tensors[2];
  Sm90Call<V> call{};
  call.maps.box_rows = kConfig.loader == Loader::kAffine
                           ? kConfig.tile_kv
                           : cuda::box_rows_of(page_size, kConfig.tile_kv);
  const auto kernel = [&](const VariantCall<V>& given) {
    const Params& p = given.params;
    if (threadIdx.x == 0) {
      call.params = p;
      call.variant = given.variant;
      const auto map = [&](int i, TensorMap& to, const void* data, int dim,
                           const KvStrides& stride) {
        tensors[i] = {static_cast<const unsigned char*>(data),
                      cuda::kv_map_shape(dim, p.num_kv_heads, p.num_kv_blocks, page_size, stride,
                                         call.maps.box_rows, bytes_of(kConfig.dtype_kv))};
        const ptx::MappedTensor* address = &tensors[i];
        std::memcpy(&to, &address, sizeof address);
      };
      call.maps.block_size = divisor_of(p.block_size);
      const auto units = [&](const char* name, const KvStrides& stride) {
        return cuda::row_units(name, stride, p.num_kv_blocks, p.block_size,
                               bytes_of(kConfig.dtype_kv));
      };
      if (kConfig.loader == Loader::kGather) call.maps.k_units = units("k", p.k_stride);
      if (kConfig.loader == Loader::kGather) call.maps.v_units = units("v", p.v_stride);
      map(0, call.maps.k, p.k, kConfig.head_dim_qk, p.k_stride);
      map(1, call.maps.v, p.v, kConfig.head_dim_vo, p.v_stride);
    }
    __syncthreads();
    sm90::attention<kConfig, V>(call);
  };
  const double tolerance = kConfig.dtype_q == Dtype::kFloat16 ? 1.0 / 1024 : 1.0 / 128;
  int merged = 0;
  for (const bool early : {false, true}) {
    SCOPED_TRACE(early ? "last thread first" : "first thread first");
    emulate::mode.last_first = emulate::mode.early_copies = early;
    merged = run_emulated<V>(c, variant, meaning, target_of(kConfig, c.shape, num_ctas),
                             sm90::num_threads(kConfig), kernel, tolerance, lse_tolerance, output);
  }
  emulate::mode.last_first = emulate::mode.early_copies = false;
  return merged;
}

constexpr KernelConfig with_loader(KernelConfig config, Loader loader) {
  config.loader = loader;
  return config;
}
constexpr KernelConfig config_of(int dim_qk, int dim_vo, int tile_kv, int stages, int consumers,
                                 Dtype dtype = Dtype::kBfloat16) {
  KernelConfig config{.dtype_q = dtype,
                      .dtype_kv = dtype,
                      .dtype_out = dtype,
                      .head_dim_qk = dim_qk,
                      .head_dim_vo = dim_vo,
                      .loader = Loader::kAffine,
                      .tile_kv = tile_kv,
                      .num_stages = stages,
                      .num_q_stages = 2,
                      .num_consumer_warpgroups = consumers,
                      .producer_registers = 24,
                      .consumer_registers = 128,
                      .ctas_per_sm = 1,
                      .num_shapes = 1,
                      .shapes = {{Mma::kWgmma, 64 * consumers, 1}}};
  return config;
}
constexpr KernelConfig kSmall = config_of(128, 128, 64, 3, 1);
// One warpgroup that has only this many rows of Q.
constexpr KernelConfig with_rows(KernelConfig config, int tile_q, int q_stages) {
  config.shapes[0].tile_q = tile_q;
  config.num_q_stages = q_stages;
  return config;
}
constexpr KernelConfig with_split(KernelConfig config) {
  config.num_shapes = 2;
  config.shapes[1] = {Mma::kWgmma, 64, config.num_stages % 3 == 0 ? 3 : 2};
  return config;
}
constexpr KernelConfig kBoth = with_split(config_of(128, 128, 128, 2, 2));

inline Shape shape_of(const KernelConfig& config, int page_size) {  // 0: affine
  Shape shape;
  shape.head_dim_qk = config.head_dim_qk;
  shape.head_dim_vo = config.head_dim_vo;
  shape.affine = page_size == 0;
  shape.page_size = page_size;
  return shape;
}

}  // namespace plait::test
