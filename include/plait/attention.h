// Attention: one variant, shape and KV format, compiled for one device, planned once a step and run
// once a layer. Plus the operations engines need beside it: merge_states and append_kv.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plait/kernel_cost.h"
#include "plait/kv_format.h"
#include "plait/plan.h"
#include "plait/tensor.h"
#include "plait/variant.h"

namespace plait {

using Stream = void*;  // CUstream; null: the default stream. Unused on the CPU

// Capacities: grid, workspace and kernels follow from them alone, never from a batch.
struct Bounds {
  int requests = 0;
  int query_tokens = 0;   // a step
  int keys = 0;           // a request
  long long total_pages = 0;  // host page tables of one step;
                              //   0: requests * (ceil(keys / page_size) + num_levels - 1)
  int max_q_len = 0;      // a request; 0: query_tokens. 1: decode only
  int longest_q() const { return max_q_len > 0 ? max_q_len : query_tokens; }
  bool operator==(const Bounds&) const = default;
};

// Keys of a chunk in invariant mode. Shorter ones balance few long requests better, and each costs
// a fold and a load of Q: docs/invariant.md has the figures of 512, 1024 and 2048.
inline constexpr int kInvariantChunk = 2048;

struct AttentionConfig {
  int num_qo_heads = 0, num_kv_heads = 0;
  int head_dim_qk = 0, head_dim_vo = 0;   // multiples of 8 up to 256
  Dtype dtype = Dtype::kBfloat16;         // of q and out: float32, bfloat16 or float16
  std::optional<Dtype> kv_dtype;          // of K and V: as dtype (not given), or float8_e4m3fn or
                                          //   float8_e5m2, whose values are numbers times a scale
  KvFormat kv;
  Variant variant;
  Bounds bounds;
  Device device;
  float sm_scale = 0;                     // 0: 1 / sqrt(head_dim_qk)
  Scheduler scheduler = Scheduler::kAuto;
  std::string kernel = "auto";            // cuda: "plain", the slow, obvious kernel; "sm90a";
                                          //   "sm80"; a tile of them: "sm80 128x64x2", "sm90
                                          //   128x144x2" (query rows x keys x stages).
                                          //   cpu: "cpu", the same as "auto"; of built-in variants
                                          //   also "cpu x86-64-v4", "cpu x86-64-v3" and "cpu
                                          //   baseline", where the machine has these instructions
  int max_ctas = 0;                       // 0: the whole device
  int chunk_keys = 0;                     // invariant mode, in chunks of so many keys: 512, 1024
                                          //   or 2048 (kInvariantChunk). A row's bits then depend
                                          //   on its own query and keys alone (docs/invariant.md).
                                          //   0: off
  std::optional<TunedCosts> tuned_costs;  // cuda: in place of those shipped
  Dtype dtype_kv() const { return kv_dtype.value_or(dtype); }
};

// Memory for partial states, shared by the plans of a model; one run in flight at a time.
class Workspace {
 public:
  Workspace(const Device& device, long long bytes);       // allocates
  explicit Workspace(const TensorView& buffer);  // borrows: contiguous, any dtype, 256-byte
                                                 // aligned; throws ArgumentError
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const;
  long long bytes() const;
  Device device() const;

 private:
  friend class Attention;
  std::atomic<bool>& in_use() const;  // during run()
  bool owns_memory() const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct RunArgs {
  TensorView q;           // [rows, num_qo_heads, head_dim_qk]; rows >= planned tokens: the rest is
                          //   padding and comes out (0, -inf)
  TensorView k, v;        // ragged [kv rows, num_kv_heads, dim]; paged 4-D by the layout. For one
                          //   5-D tensor [pages, 2, ...] give it as k and leave v undefined
  TensorView out;         // [rows, num_qo_heads, head_dim_vo]; it and lse share no byte with
                          //   another tensor of the call
  TensorView lse;         // [rows, num_qo_heads] float32, natural log; undefined: not written
  float sm_scale = 0;     // 0: the configuration's. Finite and > 0
  float k_scale = 1, v_scale = 1;  // of fp8 K and V: value = stored number * scale. Finite and > 0
  std::vector<VariantArg> variant_args;
};

// Not to be used by two threads at once: plan() and run() refuse that. Different ones may. On the
// device calls follow each other as their streams do: whoever gives the calls of one Attention, or
// runs that share a Workspace, to several streams makes these wait for each other.
class Attention {
 public:
  // Compiles and loads the kernels. `workspace` may be shared; null: one of its own. Throws
  // ArgumentError if it is smaller than workspace_bytes().
  explicit Attention(const AttentionConfig& config, std::shared_ptr<Workspace> workspace = nullptr);
  ~Attention();
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  const AttentionConfig& config() const;
  std::shared_ptr<Workspace> workspace() const;
  const PlanTarget& target() const;
  std::string kernel_name() const;        // what runs: "cpu", "plain ...", "sm80 ..."

  // Once a step. Does not wait for the device. Of lengths on the host: refused while `stream`
  // captures. Of lengths on the device (Batch): one kernel on `stream`, which a graph may capture,
  // and which plans the lengths that it finds when it runs, as Scheduler::kPrefixSum would on the
  // host; the first such call loads that kernel and allocates its memory.
  void plan(const Batch& batch, Stream stream = nullptr);
  // What plan() is given on the device is read there: by the planner or by each run, in a graph
  // whenever it is replayed.
  bool planned_on_device() const;    // of the last call of plan(): replays are not known here
  bool planned_in_capture() const;   // likewise: on the device, by a CUDA graph
  const Plan& current_plan() const;  // throws ArgumentError if it is the device's
  // Once a layer, any number of times a plan. Only launches; can be captured in a CUDA graph, which
  // then serves every later plan within the bounds. A replay knows the tensors of the capture: of a
  // plan with more query tokens than that q has rows it computes those that exist, and the plan's
  // pages (ragged: rows) must lie in that cache, which nothing checks.
  void run(const RunArgs& args, Stream stream = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Bytes an Attention of this configuration needs of its Workspace. Compiles nothing; of a GPU it
// opens the driver, whose number of multiprocessors counts.
long long workspace_bytes(const AttentionConfig& config);

// Joins the attention states of disjoint key sets. v: [rows, n, num_heads, dim], lse: float32
// [rows, n, num_heads]; out [rows, num_heads, dim], out_lse [rows, num_heads]. n >= 1. A state with
// lse -inf is the identity: its v is never read into the result. Outputs share no byte with inputs.
// lse_base2: lse and out_lse are base-2 logarithms.
void merge_states(const TensorView& v, const TensorView& lse, const TensorView& out,
                  const TensorView& out_lse, Stream stream = nullptr, bool lse_base2 = false);
// The same of two states, [rows, num_heads, dim] each, v_a and v_b with equal strides, and lse_a
// and lse_b; `out` may be either v, and out_lse its lse (in place).
void merge_state(const TensorView& v_a, const TensorView& lse_a, const TensorView& v_b,
                 const TensorView& lse_b, const TensorView& out, const TensorView& out_lse,
                 Stream stream = nullptr, bool lse_base2 = false);

// Writes new tokens' K and V into a paged or ragged cache (shapes as in RunArgs). Index arrays are
// all on the host, where each entry is checked against tables and cache before anything is written,
// or all on the device, unchecked. Of two tokens in one slot either may stay.
// k_new, v_new: [tokens, num_kv_heads, dim]; they, k_cache and v_cache share no byte where one is
// written. Their dtype is the cache's, or, of an fp8 cache, also float32, bfloat16 or float16: then
// stored number = value / scale, rounded to nearest even; what is beyond the largest finite number
// becomes it, NaN stays NaN. The scales are those that run() is given.
struct AppendArgs {
  KvFormat kv;
  TensorView k_new, v_new;
  TensorView k_cache, v_cache;      // or one 5-D tensor as k_cache
  // Either the slot of each token, -1: token is skipped (host or device, int32 or int64)
  TensorView slot_mapping;          // [tokens]; slot = page * page_size + offset (ragged: row)
  // or batch index and position, through a table (host or device):
  TensorView batch_indices;         // [tokens]; -1: skipped
  TensorView positions;             // [tokens]
  KvTables tables;                  // page table of the batch; ragged: kv_begin or kv_indptr
  std::optional<Dtype> kv_dtype;    // of the cache, where its tensors only say uint8
  float k_scale = 1, v_scale = 1;   // finite and > 0; not 1 only where values become fp8
};
void append_kv(const AppendArgs& args, Stream stream = nullptr);

}  // namespace plait
