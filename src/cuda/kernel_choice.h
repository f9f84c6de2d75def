// Which kernel serves what: the one place where KernelConfig values come from. The CUDA executor
// asks for the config of an Attention; jit/shipped.cc lists the same for `plait compile`.
#pragma once
#include <optional>
#include <string>

#include "host_device/config.h"
#include "plait/attention.h"

namespace plait::cuda {

// kernels/plain.cuh: any dtype and head dim.
KernelConfig plain_config(Dtype dtype, int head_dim_qk, int head_dim_vo, Loader loader);

// Whether kernels/sm80/attention.cuh takes it; its configurations are those of tile_choice.h.
bool sm80_takes(Dtype dtype);

// Whether kernels/sm90/attention.cuh takes it; sm90_config requires it.
bool sm90_takes(Dtype dtype);
// max_rows: packed rows of the largest row block. Up to 64 take a small kernel, two CTAs a
// multiprocessor.
KernelConfig sm90_config(Dtype dtype, int head_dim_qk, int head_dim_vo, Loader loader,
                         long long max_rows, std::optional<Dtype> dtype_kv = {});
// The same with 64 KiB of K and V under way in each of two CTAs of a multiprocessor, or two tiles,
// which saturates memory where consumers do nothing but the softmax. With more, multiprocessors
// that read faster run further ahead of the others. One H200, 96 and 64 KiB, microseconds: 1 x
// 131072 138.2, 133.3; 8 x 8192 72.5, 70.5; 34 x 4096 147.4, 140.4; 64 x 4096 253.1, 252.3; but
// RoPE 64 x 4096 285, 472, and a custom mask 134, 166.
KernelConfig with_even_reads(KernelConfig sm90);
// The same with the ring that fp8 K and V land in: as many stages as fit, or 0 where too few do.
KernelConfig with_landing_ring(KernelConfig sm90);
// The same with more registers for the producer, which row transforms run in.
KernelConfig with_row_transforms(KernelConfig sm90);

// The same with a third consumer warpgroup, where head dims and shared memory allow: 192 rows a
// tile. has_functors: of the variant.
KernelConfig with_third_warpgroup(KernelConfig sm90, bool has_functors);

// The kernel of an Attention on a GPU of architecture `arch`. Throws ArgumentError where
// config.kernel asks for one that cannot run it.
KernelConfig choose_kernel(const AttentionConfig& config, const std::string& arch);

}  // namespace plait::cuda
