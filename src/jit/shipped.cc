// Everything that plait ships for an architecture, in one list: what `plait compile` compiles and
// the spill test holds to 0 bytes. At most 80 an architecture.
#include <algorithm>
#include <utility>

#include "cuda/kernel_choice.h"
#include "cuda/tile_choice.h"
#include "host_device/plan_lengths_call.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "plait/error.h"

namespace plait::jit {

std::vector<KernelSource> shipped_kernels(const std::string& arch) {
  const std::vector<std::string> known = shipped_architectures();
  if (std::find(known.begin(), known.end(), arch) == known.end()) {
    std::string all;
    for (const std::string& name : known) all += (all.empty() ? "" : ", ") + name;
    check(false, "arch is '", arch, "', but plait ships ", all);
  }
  const Variant variants[] = {full(), soft_cap(30.0f)};
  std::vector<KernelSource> kernels;
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    kernels.push_back(assemble_utility("merge_states", dtype, "MergeStatesCall", kUtilityThreads));
    const bool plain = arch == "75" || !cuda::sm80_takes(dtype);
    for (const int head_dim : {64, 128}) {
      for (const Loader loader : {Loader::kAffine, Loader::kGather}) {
        if (plain) {
          for (const Variant& variant : variants) {
            const KernelConfig config = cuda::plain_config(dtype, head_dim, head_dim, loader);
            kernels.push_back(assemble_attention(config, variant));
          }
          continue;
        }
        // Decode of groups of 2 to 16 heads; prefill beside it.
        for (const int rows : {16, 128}) {
          const KernelConfig config =
              cuda::choose_tiles({arch, dtype, head_dim, head_dim, loader, rows, rows});
          kernels.push_back(assemble_attention(config, full()));
          if (dtype == Dtype::kBfloat16 && loader == Loader::kGather) {
            kernels.push_back(assemble_attention(config, soft_cap(30.0f)));
            if (arch == "90a" && rows > 16) continue;  // such fp8 is the sm90 template's
            kernels.push_back(
                assemble_attention(cuda::choose_tiles({arch, dtype, head_dim, head_dim, loader,
                                                       rows, rows, Dtype::kE4m3}),
                                   full()));
          }
        }
      }
    }
  }
  kernels.push_back(assemble_utility("append_kv", std::nullopt, "AppendKvCall", kUtilityThreads));
  kernels.push_back(
      assemble_utility("plan_lengths", std::nullopt, "PlanLengthsCall", kPlanLengthsThreads));
  kernels.push_back(assemble_utility("pack_mask", std::nullopt, "PackMaskCall", kUtilityThreads));
  kernels.push_back(assemble_utility("upload", std::nullopt, "UploadCall", kUtilityThreads));
  if (arch != "90a") return kernels;
  // Rows of decode, and what prefill of many rows gets.
  const auto add_sm90 = [&](Dtype dtype, int head_dim_qk, int head_dim_vo, Loader loader,
                            int max_rows, const Variant& variant) {
    KernelConfig config = cuda::sm90_config(dtype, head_dim_qk, head_dim_vo, loader, max_rows);
    if (variant.parts.empty()) config = cuda::with_even_reads(config);
    if (max_rows > 128) config = cuda::with_third_warpgroup(config, !variant.parts.empty());
    kernels.push_back(assemble_attention(config, variant));
  };
  for (const Loader loader : {Loader::kAffine, Loader::kPaged, Loader::kGather}) {
    for (const int max_rows : {16, 4096}) {
      add_sm90(Dtype::kBfloat16, 128, 128, loader, max_rows, full());
      add_sm90(Dtype::kFloat16, 128, 128, loader, max_rows, full());
      add_sm90(Dtype::kBfloat16, 128, 128, loader, max_rows, soft_cap(30.0f));
      for (const auto& [head_dim_qk, head_dim_vo] : {std::pair{64, 64}, {192, 128}, {256, 256}}) {
        add_sm90(Dtype::kBfloat16, head_dim_qk, head_dim_vo, loader, max_rows, full());
      }
    }
    for (const int max_rows : {16, 128}) {
      kernels.push_back(assemble_attention(
          cuda::sm90_config(Dtype::kBfloat16, 128, 128, loader, max_rows, Dtype::kE4m3), full()));
    }
  }
  AttentionConfig invariant;
  invariant.num_qo_heads = 32;
  invariant.num_kv_heads = 8;
  invariant.head_dim_qk = invariant.head_dim_vo = 128;
  invariant.kv = paged_kv(16);
  invariant.bounds = {.requests = 4, .query_tokens = 4 * 4096, .keys = 4096, .max_q_len = 4096};
  invariant.device = {kCuda, 0};
  invariant.chunk_keys = kInvariantChunk;
  kernels.push_back(assemble_attention(cuda::choose_kernel(invariant, arch), full()));
  return kernels;
}

}  // namespace plait::jit

namespace plait {

std::vector<std::string> shipped_architectures() {
  return {"75", "80", "86", "89", "90a", "100", "120"};
}

std::vector<CompiledKernel> compile_shipped(const std::string& arch) {
  std::vector<CompiledKernel> rows;
  const std::vector<jit::KernelSource> kernels = jit::shipped_kernels(arch);
  jit::nvrtc();  // not found: one error, not one a row
  for (const jit::KernelSource& source : kernels) {
    CompiledKernel row;
    row.kernel = source.name;
    row.arch = arch;
    try {
      const jit::Cubin cubin = jit::compile_cubin_uncached(source, arch);
      row.seconds = cubin.seconds;
      row.registers = cubin.resources.registers;
      row.spill_bytes = cubin.resources.spill_bytes;
      row.smem_bytes = source.smem_bytes + cubin.resources.smem_bytes;
    } catch (const Error& error) {
      row.error = error.what();
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace plait
