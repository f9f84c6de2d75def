// Which kernel serves what: the one place where KernelConfig values come from. The CUDA executor
// asks for the config of an Attention; jit/shipped.cc lists the same for `plait compile`.
#pragma once
#include "host_device/config.h"

namespace plait::cuda {

// kernels/plain.cuh: any dtype and head dim.
KernelConfig plain_config(Dtype dtype, int head_dim_qk, int head_dim_vo, Loader loader);

// Whether kernels/sm90/attention.cuh takes these; sm90_config requires it.
bool sm90_takes(Dtype dtype, int head_dim_qk, int head_dim_vo);
// decode_only: bounds with max_q_len 1; a small kernel, two CTAs a multiprocessor.
KernelConfig sm90_config(Dtype dtype, Loader loader, bool decode_only);

}  // namespace plait::cuda
