// class Attention: checks what it is given, keeps the plan, and hands both to an executor. Nothing
// is written or launched before every check of a call has passed.
#include "plait/attention.h"

#include <atomic>
#include <cmath>
#include <utility>

#include "attention_config.h"
#include "executor.h"
#include "formats/device_lengths.h"
#include "host_device/convert.h"
#include "plait/error.h"
#include "tensor_checks.h"
#include "variant_args.h"

namespace plait {
namespace {

std::unique_ptr<Executor> make_executor(const AttentionConfig& config) {
  return config.device.type == kCpu ? make_cpu_executor(config) : make_cuda_executor(config);
}

void check_workspace(const Workspace& workspace, const Device& device, long long bytes) {
  check(workspace.device() == device, "attention: the workspace is on ",
        to_string(workspace.device()), ", but the device is ", to_string(device));
  check(workspace.bytes() >= bytes, "attention: the workspace has ", workspace.bytes(),
        " bytes; this configuration needs ", bytes, " (workspace_bytes())");
}

float default_scale(const AttentionConfig& config) {
  return config.sm_scale > 0 ? config.sm_scale
                             : 1.0f / std::sqrt(static_cast<float>(config.head_dim_qk));
}

// Holds an Attention or a Workspace for the length of a call, so that a second thread gets an error
// rather than half of another call's data.
class InUse {
 public:
  InUse(std::atomic<bool>& flag, const char* what) : flag_(flag) {
    check(!flag_.exchange(true, std::memory_order_acquire), what,
          " is in use by another thread; give each thread its own, or take turns");
  }
  ~InUse() { flag_.store(false, std::memory_order_release); }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  std::atomic<bool>& flag_;
};

}  // namespace

// A batch as it was planned. Two take turns, so that a plan() that throws leaves the one before.
struct PlannedBatch {
  FormatView view;
  Plan plan;
  bool on_device = false;  // the plan is the device's alone, and nothing here says what it is
  bool captured = false;   // and made whenever a CUDA graph is replayed
};

struct Attention::Impl {
  explicit Impl(const AttentionConfig& given)
      : config(given),
        slots(given.variant, given.num_qo_heads, given.head_dim_qk),
        sm_scale(default_scale(given)) {
    executor = make_executor(config);
  }

  // Fills what of Params follows from the tensors.
  Params check_run(const RunArgs& args) const;
  void check_blocks(const KvTensors& kv) const;

  AttentionConfig config;
  VariantSlots slots;
  float sm_scale;
  std::unique_ptr<Executor> executor;
  std::shared_ptr<Workspace> workspace;
  PlannedBatch batches[2];
  int current = -1;  // index into batches; -1: nothing planned
  std::atomic<bool> in_use{false};
};

Attention::Attention(const AttentionConfig& config, std::shared_ptr<Workspace> workspace) {
  check_config(config);
  impl_ = std::make_unique<Impl>(config);
  const long long bytes = impl_->executor->workspace_bytes();
  if (workspace != nullptr) {
    check_workspace(*workspace, config.device, bytes);
    impl_->workspace = std::move(workspace);
  } else {
    impl_->workspace = std::make_shared<Workspace>(config.device, bytes);
  }
}

Attention::~Attention() = default;

const AttentionConfig& Attention::config() const { return impl_->config; }
std::shared_ptr<Workspace> Attention::workspace() const { return impl_->workspace; }
const PlanTarget& Attention::target() const { return impl_->executor->target(); }
std::string Attention::kernel_name() const { return impl_->executor->kernel_name(); }

void Attention::plan(const Batch& batch, Stream stream) {
  const InUse held(impl_->in_use, "plan: the attention");
  const AttentionConfig& config = impl_->config;
  const int next = impl_->current == 0 ? 1 : 0;
  PlannedBatch& planned = impl_->batches[next];
  if (has_device_lengths(batch)) {
    planned.captured = impl_->executor->plan_on_device(take_device_lengths(config, batch), stream);
    planned.on_device = true;
    planned.view.num_query_tokens = 0;  // all that run() asks of it
    planned.view.max_block = -1;
    impl_->current = next;
    return;
  }
  planned.on_device = planned.captured = false;
  make_view(config.kv, config.bounds, batch, config.device, planned.view);
  const bool masked = batch.mask.packed.defined() || batch.mask.bools.defined();
  check(masked || !config.variant.custom_mask(), "plan: variant '", config.variant.name(),
        "' takes a mask every step, and none is given: packed_custom_mask or custom_mask");
  check(!masked || config.variant.custom_mask(), "plan: a mask is given, but variant '",
        config.variant.name(), "' takes none; make the Attention with custom_mask()");
  make_plan(planned.view.view, config.variant.visible, impl_->executor->target(), config.scheduler,
            planned.plan);
  planned.plan.nodes = batch.nodes;
  impl_->executor->upload(planned.plan, planned.view, stream);
  impl_->current = next;
}

bool Attention::planned_on_device() const {
  return impl_->current >= 0 && impl_->batches[impl_->current].on_device;
}

bool Attention::planned_in_capture() const {
  return impl_->current >= 0 && impl_->batches[impl_->current].captured;
}

const Plan& Attention::current_plan() const {
  check(impl_->current >= 0, "current_plan: nothing is planned yet; call plan() first");
  check(!planned_on_device(),
        "current_plan: the lengths lie on the device, and with them the plan, ",
        "of which nothing comes back");
  return impl_->batches[impl_->current].plan;
}

void Attention::Impl::check_blocks(const KvTensors& kv) const {
  const FormatView& view = batches[current].view;
  if (view.max_block < kv.num_blocks) return;
  const bool ragged = config.kv.kind == KvFormat::kRagged;
  check(false, "run: ", view.max_block_place, " is ", view.max_block, ", but ",
        ragged ? "k has " : "the cache has ", kv.num_blocks, ragged ? " rows" : " pages",
        " (k.shape[0])");
}

Params Attention::Impl::check_run(const RunArgs& args) const {
  const FormatView& view = batches[current].view;
  const Device& device = config.device;
  const TensorName q{"run", "q"}, out{"run", "out"}, lse{"run", "lse"};
  check_tensor(q, args.q, 3, config.dtype, device);
  check_shape(q, args.q, {-1, config.num_qo_heads, config.head_dim_qk},
              "rows, num_qo_heads, head_dim_qk");
  check_last_dense(q, args.q);
  const int num_rows = checked_rows(q, args.q.shape[0]);
  if (num_rows < view.num_query_tokens) [[unlikely]] {
    check(false, "run: q has ", num_rows, " rows, but ", view.num_query_tokens,
          " query tokens are planned; more rows are taken (padding), fewer are not");
  }
  const KvTensors kv =
      check_kv("run", "k", "v", config.kv, args.k, args.v, config.dtype_kv(), device,
               config.num_kv_heads, config.head_dim_qk, config.head_dim_vo);
  check_blocks(kv);
  check_tensor(out, args.out, 3, config.dtype, device);
  check_shape(out, args.out, {num_rows, config.num_qo_heads, config.head_dim_vo},
              "rows of q, num_qo_heads, head_dim_vo");
  check_last_dense(out, args.out);
  check_no_overlap(out, args.out);

  Params params{};
  params.q = args.q.bytes();
  params.k = kv.k;
  params.v = kv.v;
  params.out = args.out.bytes();
  params.q_stride = row_strides(args.q);
  params.out_stride = row_strides(args.out);
  params.k_stride = kv.k_stride;
  params.v_stride = kv.v_stride;
  params.num_rows = num_rows;
  params.num_kv_blocks = kv.num_blocks;
  params.block_size = config.kv.page_size;
  params.num_qo_heads = config.num_qo_heads;
  params.num_kv_heads = config.num_kv_heads;
  params.group_size = config.num_qo_heads / config.num_kv_heads;
  params.visible = config.variant.visible;
  if (args.lse.defined() || args.lse.data != nullptr) {
    if (!config.variant.use_softmax()) [[unlikely]] {
      check(false, "run: lse is given, but variant '", config.variant.name(),
            "' has no softmax and so no lse; leave it out");
    }
    check_tensor(lse, args.lse, 2, Dtype::kFloat32, device);
    check_shape(lse, args.lse, {num_rows, config.num_qo_heads}, "rows of q, num_qo_heads");
    check_no_overlap(lse, args.lse);
    params.lse = reinterpret_cast<float*>(args.lse.bytes());
    params.lse_stride = row_strides(args.lse);
  }
  using Named = std::pair<const char*, const TensorView&>;
  for (const auto& [name, input] : {Named{"q", args.q}, Named{"k", args.k}, Named{"v", args.v}}) {
    check_apart(out, args.out, name, input);
    check_apart(lse, args.lse, name, input);
  }
  check_apart(out, args.out, "lse", args.lse);
  if (!workspace->owns_memory()) {
    int64_t bytes = workspace->bytes();
    TensorView memory{.data = workspace->data(),
                      .device_type = device.type,
                      .device_id = device.id,
                      .ndim = 1,
                      .dtype_code = 1,
                      .dtype_bits = 8,
                      .shape = &bytes};
    const TensorName buffer{"run", "the workspace"};
    for (const auto& [name, tensor] : {Named{"q", args.q}, Named{"k", args.k}, Named{"v", args.v},
                                       Named{"out", args.out}, Named{"lse", args.lse}}) {
      check_apart(buffer, memory, name, tensor);
    }
  }
  check(std::isfinite(args.sm_scale) && args.sm_scale >= 0, "run: sm_scale is ", args.sm_scale,
        "; it must be finite and > 0 (0: the configuration's)");
  params.sm_scale = args.sm_scale > 0 ? args.sm_scale : sm_scale;
  check_scale({"run", "k_scale"}, args.k_scale, is_fp8(config.dtype_kv()));
  check_scale({"run", "v_scale"}, args.v_scale, is_fp8(config.dtype_kv()));
  params.k_scale = args.k_scale;
  params.v_scale = args.v_scale;
  return params;
}

void Attention::run(const RunArgs& args, Stream stream) {
  const InUse held(impl_->in_use, "run: the attention");
  check(impl_->current >= 0, "run: nothing is planned yet; call plan() first");
  const Params params = impl_->check_run(args);
  const std::vector<unsigned long long> slots =
      impl_->slots.with(args.variant_args, impl_->config.device);
  for (const VariantArg& arg : args.variant_args) {
    check_apart({"run", "out"}, args.out, arg.name.c_str(), arg.tensor);
    check_apart({"run", "lse"}, args.lse, arg.name.c_str(), arg.tensor);
  }
  if (params.num_rows == 0) return;
  const InUse workspace_held(impl_->workspace->in_use(), "run: the workspace");
  impl_->executor->run(params, slots, *impl_->workspace, stream);
}

long long workspace_bytes(const AttentionConfig& config) {
  check_config(config);
  return config.device.type == kCpu ? cpu_workspace_bytes(config) : cuda_workspace_bytes(config);
}

}  // namespace plait
