// The one interface between the public API (attention.cc) and what executes a Plan: the CPU backend
// (cpu/) and the CUDA backend (cuda/). attention.cc checks arguments and fills Params; an executor
// owns kernels, the plan in its memory, and launches.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "formats/view.h"
#include "host_device/config.h"
#include "host_device/device_lengths.h"
#include "plait/attention.h"

namespace plait {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual const PlanTarget& target() const = 0;
  virtual std::string kernel_name() const = 0;
  virtual long long workspace_bytes() const = 0;
  // Puts `plan` and the host tables of `view` where run() reads them; on a GPU behind an address
  // that stays the same for the life of the executor. If it throws, the plan before stays.
  virtual void upload(const Plan& plan, const FormatView& view, Stream stream) = 0;
  // Plans on the device, by one kernel on `stream`, which may capture: the plan of these lengths as
  // they are when it runs. Behind the same address. Refused by executors without a device. Returns
  // whether the stream captures.
  virtual bool plan_on_device(const DeviceLengths& lengths, Stream stream) = 0;
  // Launches the uploaded plan. `params` has everything but plan, starts, partial_out, partial_lse
  // and the counters, which the executor fills in. `variant_slots`: the variant's parameters, 8
  // bytes each, in the order of Variant::parts and their params.
  virtual void run(const Params& params, std::span<const unsigned long long> variant_slots,
                   Workspace& workspace, Stream stream) = 0;
};

// Partial rows that a plan may have with tiles of at most `tile_q` rows. Throws ArgumentError if
// int does not hold them.
int max_partial_rows(const AttentionConfig& config, int num_ctas, int tile_q);

// Bytes of a key and its value, over all heads.
long long kv_bytes(const AttentionConfig& config);

// How an Attention's workspace is divided: [partial_out][partial_lse][folds], each 256-byte
// aligned. folds: floats of all CTAs (fold_floats() of config.h). The same for every executor.
// Arrival counters have memory of their own: whoever shares a workspace may divide it otherwise,
// and leave partial rows where counters have to be zero.
struct WorkspaceLayout {
  long long partial_lse, folds, bytes;  // byte offsets from the start, and the total
};
WorkspaceLayout workspace_layout(int max_partial_rows, int head_dim_vo, long long folds = 0);

std::unique_ptr<Executor> make_cpu_executor(const AttentionConfig& config);
std::unique_ptr<Executor> make_cuda_executor(const AttentionConfig& config);
// workspace_bytes() of the executors that these would make; compiles nothing.
long long cpu_workspace_bytes(const AttentionConfig& config);
long long cuda_workspace_bytes(const AttentionConfig& config);

// The operations beside attention, by device of the tensors; arguments are already checked.
// merge: v [rows, n, heads, dim] by strides; see merge_states.
struct MergeParams {
  const void* v;
  const float* lse;
  void* out;
  float* out_lse;
  long long v_stride_row, v_stride_state, v_stride_head;
  long long lse_stride_row, lse_stride_state, lse_stride_head;
  RowStrides out_stride, out_lse_stride;
  int num_rows, num_states, num_heads, head_dim;
  float log2_per_lse = kLog2e, lse_per_log2 = kLn2;
  Dtype dtype;
};
struct AppendParams {
  const void *k_new, *v_new;
  void *k_cache, *v_cache;
  RowStrides k_new_stride, v_new_stride;
  KvStrides k_stride, v_stride;  // affine: block 0
  int num_tokens, num_kv_heads, head_dim_qk, head_dim_vo, block_size;
  Dtype dtype_new, dtype_cache;    // equal, or the cache's is fp8 and the other not
  float k_scale = 1, v_scale = 1;  // stored = value / scale, where they differ
  bool affine;
  const void* slots;   // null: by batch index and position. -1: token is skipped
  bool slots_on_host;  // else everything is on the tensors' device. Host index arrays
                       //   always come as int64 slots, checked against the cache
  int slots_bytes;
  long long slots_stride;
  const void *batch_indices, *positions;
  int batch_indices_bytes, positions_bytes;
  long long batch_indices_stride, positions_stride;
  BlockTable table;  // of request i: starts at entry stride_list * (list_begin ?
                     //   list_begin[i] : i); affine: list_begin (stride_list 1)
                     //   holds each request's first row
};
void cpu_merge_states(const MergeParams& params);
void cpu_append_kv(const AppendParams& params);
void cuda_merge_states(const MergeParams& params, const Device& device, Stream stream);
void cuda_append_kv(const AppendParams& params, const Device& device, Stream stream);

}  // namespace plait
