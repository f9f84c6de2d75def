// merge_states and append_kv on a GPU: the kernels' arguments from checked parameters.
#include <algorithm>
#include <cstring>

#include "cuda/device.h"
#include "executor.h"
#include "host_device/convert.h"
#include "host_device/utility_calls.h"
#include "plait/error.h"

namespace plait {
namespace {

using cuda::CurrentDevice;
using cuda::GpuDevice;

constexpr int kWarpsOfCta = jit::kUtilityThreads / 32;

// Warps to CTAs; the kernels loop, so that no batch meets a limit of the grid.
unsigned grid_of(long long num_warps, const GpuDevice& device) {
  const long long most = 32LL * device.info().num_multiprocessors;
  return static_cast<unsigned>(std::clamp((num_warps + kWarpsOfCta - 1) / kWarpsOfCta, 1LL, most));
}

bool multiple_of_16(std::initializer_list<long long> values) {
  return std::all_of(values.begin(), values.end(), [](long long v) { return v % 16 == 0; });
}

RowStrides in_bytes(const RowStrides& s, int bytes) { return {s.token * bytes, s.head * bytes}; }
KvStrides in_bytes(const KvStrides& s, int bytes) {
  return {s.block * bytes, s.token * bytes, s.head * bytes};
}

// Bytes that a lane may copy at a time: 16 if every row starts and ends on a multiple of 16.
int copy_unit(const void* from, const void* to, const RowStrides& a, const KvStrides& b,
              int row_bytes, int element_bytes) {
  const auto address = [](const void* p) {
    return static_cast<long long>(reinterpret_cast<std::uintptr_t>(p));
  };
  const bool wide = multiple_of_16(
      {address(from), address(to), a.token, a.head, b.block, b.token, b.head, row_bytes});
  return wide ? 16 : element_bytes;
}

}  // namespace

void cuda_merge_states(const MergeParams& p, const Device& device, Stream stream) {
  GpuDevice& gpu = GpuDevice::get(device.id);
  const CurrentDevice current(gpu);
  const long long num_warps = static_cast<long long>(p.num_rows) * p.num_heads;
  if (num_warps == 0) return;
  MergeStatesCall call{};
  call.v = p.v;
  call.lse = p.lse;
  call.out = p.out;
  call.out_lse = p.out_lse;
  call.v_stride_row = p.v_stride_row;
  call.v_stride_state = p.v_stride_state;
  call.v_stride_head = p.v_stride_head;
  call.lse_stride_row = p.lse_stride_row;
  call.lse_stride_state = p.lse_stride_state;
  call.lse_stride_head = p.lse_stride_head;
  call.out_stride = p.out_stride;
  call.out_lse_stride = p.out_lse_stride;
  call.num_rows = p.num_rows;
  call.num_states = p.num_states;
  call.num_heads = p.num_heads;
  call.head_dim = p.head_dim;
  call.log2_per_lse = p.log2_per_lse;
  call.lse_per_log2 = p.lse_per_log2;
  gpu.utility("merge_states", "MergeStatesCall", p.dtype)
      ->launch(grid_of(num_warps, gpu), stream, &call);
}

void cuda_append_kv(const AppendParams& p, const Device& device, Stream stream) {
  GpuDevice& gpu = GpuDevice::get(device.id);
  const CurrentDevice current(gpu);
  const long long num_warps = 2LL * p.num_tokens * p.num_kv_heads;
  if (num_warps == 0) return;
  const int new_bytes = bytes_of(p.dtype_new), element_bytes = bytes_of(p.dtype_cache);
  AppendKvCall call{};
  call.k_new = static_cast<const char*>(p.k_new);
  call.v_new = static_cast<const char*>(p.v_new);
  call.k_cache = static_cast<char*>(p.k_cache);
  call.v_cache = static_cast<char*>(p.v_cache);
  call.k_new_stride = in_bytes(p.k_new_stride, new_bytes);
  call.v_new_stride = in_bytes(p.v_new_stride, new_bytes);
  call.k_stride = in_bytes(p.k_stride, element_bytes);
  call.v_stride = in_bytes(p.v_stride, element_bytes);
  call.k_row_bytes = p.head_dim_qk * element_bytes;
  call.v_row_bytes = p.head_dim_vo * element_bytes;
  call.num_tokens = p.num_tokens;
  call.num_kv_heads = p.num_kv_heads;
  call.block_size = p.block_size;
  call.k_unit = copy_unit(p.k_new, p.k_cache, call.k_new_stride, call.k_stride, call.k_row_bytes,
                          element_bytes);
  call.v_unit = copy_unit(p.v_new, p.v_cache, call.v_new_stride, call.v_stride, call.v_row_bytes,
                          element_bytes);
  call.dtype_new = p.dtype_new;
  call.dtype_cache = p.dtype_cache;
  call.k_scale = p.k_scale;
  call.v_scale = p.v_scale;
  call.affine = p.affine;
  call.slots = p.slots;
  call.slots_bytes = p.slots_bytes;
  call.slots_stride = p.slots_stride;
  call.batch_indices = p.batch_indices;
  call.batch_indices_bytes = p.batch_indices_bytes;
  call.batch_indices_stride = p.batch_indices_stride;
  call.positions = p.positions;
  call.positions_bytes = p.positions_bytes;
  call.positions_stride = p.positions_stride;
  call.table = p.table;

  const auto kernel = gpu.utility("append_kv", "AppendKvCall");
  if (p.slots == nullptr || !p.slots_on_host) {
    kernel->launch(grid_of(num_warps, gpu), stream, &call);
    return;
  }
  // The kernel reads the slots in pinned memory, 8 bytes a token.
  cuda::refuse_capture(stream, "append_kv with index arrays on the host",
                       "give them on the device to capture it");
  const cuda::OutsideCaptures outside;
  const std::size_t bytes = static_cast<std::size_t>(p.num_tokens) * p.slots_bytes;
  cuda::StagingRing::Buffer* slots = gpu.staging().acquire(bytes);
  try {
    const char* from = static_cast<const char*>(p.slots);
    for (int i = 0; i < p.num_tokens; ++i) {
      std::memcpy(static_cast<char*>(slots->data) + i * static_cast<std::size_t>(p.slots_bytes),
                  from + i * p.slots_stride * p.slots_bytes, p.slots_bytes);
    }
    call.slots = slots->data;
    call.slots_stride = 1;
    kernel->launch(grid_of(num_warps, gpu), stream, &call);
  } catch (...) {
    gpu.staging().release_unused(slots);
    throw;
  }
  gpu.staging().release(slots, stream);
}

}  // namespace plait
