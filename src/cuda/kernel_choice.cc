#include "cuda/kernel_choice.h"

namespace plait::cuda {

KernelConfig plain_config(Dtype dtype, int head_dim_qk, int head_dim_vo, Loader loader) {
  return {.dtype_q = dtype,
          .dtype_kv = dtype,
          .dtype_out = dtype,
          .head_dim_qk = head_dim_qk,
          .head_dim_vo = head_dim_vo,
          .loader = loader,
          .tile_kv = 64,
          .num_stages = 0,
          .num_consumer_warpgroups = 0,
          .producer_registers = 0,
          .consumer_registers = 0,
          .ctas_per_sm = 2,
          .num_shapes = 1,
          .shapes = {{Mma::kScalar, 16, 1}}};
}

bool sm90_takes(Dtype dtype, int head_dim_qk, int head_dim_vo) {
  return (dtype == Dtype::kBfloat16 || dtype == Dtype::kFloat16) && head_dim_qk == 128 &&
         head_dim_vo == 128;
}

KernelConfig sm90_config(Dtype dtype, Loader loader, bool decode_only) {
  KernelConfig config{.dtype_q = dtype,
                      .dtype_kv = dtype,
                      .dtype_out = dtype,
                      .head_dim_qk = 128,
                      .head_dim_vo = 128,
                      .loader = loader,
                      .tile_kv = 128,
                      .num_stages = 2,
                      .num_consumer_warpgroups = 2,
                      // The producer reads items, positions and block tables: 24 would spill.
                      .producer_registers = 56,
                      .consumer_registers = 224,
                      .ctas_per_sm = 1,
                      .num_shapes = 2,
                      .shapes = {{Mma::kWgmma, 128, 1}, {Mma::kWgmma, 64, 2}}};
  if (decode_only) {
    config.tile_kv = 64;
    config.num_stages = 3;
    config.num_consumer_warpgroups = 1;
    config.consumer_registers = 200;
    config.ctas_per_sm = 2;
    config.num_shapes = 1;
    config.shapes[1] = {};
    config.shapes[0] = {Mma::kWgmma, 64, 1};
  }
  return config;
}

}  // namespace plait::cuda
