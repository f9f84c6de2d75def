// The CUDA backend: chooses and loads a kernel for an Attention, brings plans to the device and
// launches. plan() uploads by a small kernel (kernels/upload.cuh) from a ring of pinned memory, so
// that nothing waits; run() only fills the kernel's argument.
#include "executor.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/cost_model.h"
#include "cuda/device.h"
#include "cuda/device_plan.h"
#include "cuda/kernel_choice.h"
#include "cuda/memory.h"
#include "cuda/plan_image.h"
#include "cuda/row_units.h"
#include "cuda/sm90_tiles.h"
#include "cuda/tensor_maps.h"
#include "host_device/convert.h"
#include "host_device/utility_calls.h"
#include "plait/error.h"
#include "sm90/params.h"
#include "variant_args.h"

namespace plait {
namespace {

using cuda::CurrentDevice;
using cuda::DeviceBuffer;
using cuda::driver;
using cuda::GpuDevice;

PlanTarget make_target(const AttentionConfig& config, const KernelConfig& kernel,
                       const cuda::GpuInfo& gpu) {
  const std::string kind = cuda::kernel_kind(kernel);
  const KernelCost* tuned = nullptr;
  if (config.tuned_costs) {
    check(config.tuned_costs->arch == gpu.arch, "attention: cost_model is of sm_",
          config.tuned_costs->arch, ", but ", to_string(config.device), " is sm_", gpu.arch,
          "; `plait tune` measures one there");
    const auto found = config.tuned_costs->kernels.find(kind);
    if (found != config.tuned_costs->kernels.end()) tuned = &found->second;
  }
  const KernelCost cost = cuda::cost_of(kernel, tuned);
  PlanTarget target;
  target.cost_model = concat(tuned != nullptr ? config.tuned_costs->name : "shipped", ", ", kind);
  target.num_ctas = gpu.num_multiprocessors * kernel.ctas_per_sm;
  if (config.max_ctas > 0) target.num_ctas = std::min(target.num_ctas, config.max_ctas);
  target.tile_kv = kernel.tile_kv;
  target.kv_align =
      cuda::kv_align(kernel, config.kv.kind == KvFormat::kRagged ? 1 : config.kv.page_size);
  target.chunk_keys = kernel.chunk_keys;
  target.group_size = config.num_qo_heads / config.num_kv_heads;
  target.num_kv_heads = config.num_kv_heads;
  target.num_shapes = kernel.num_shapes;
  for (int i = 0; i < kernel.num_shapes; ++i) {
    target.shapes[i] = {kernel.shapes[i].tile_q, kernel.shapes[i].key_split, cost.fixed_us[i],
                        cost.us_per_key[i]};
  }
  target.merge_us = cost.merge_us;
  target.min_split_keys = cost.min_split_keys;
  target.cache_keys = cuda::cache_keys(kernel);
  if (kernel.ctas_per_sm == 2) target.num_sms = gpu.num_multiprocessors;
  target.queue_percent = cuda::kQueuePercent;
  target.min_queued_keys = cuda::kMinQueuedKeys;
  target.min_keys_for_queue = cuda::kMinKeysForQueue;
  target.kv_bytes = kv_bytes(config);
  target.max_partial_rows = max_partial_rows(config, target.num_ctas, kernel.shapes[0].tile_q);
  return target;
}

WorkspaceLayout layout_of(const AttentionConfig& config, const PlanTarget& target,
                          const KernelConfig& kernel) {
  return workspace_layout(target.max_partial_rows, config.head_dim_vo,
                          static_cast<long long>(target.num_ctas) * fold_floats(kernel));
}

// The sm80 and sm90 kernels move rows in units of 16 bytes.
void check_aligned(const char* kernel, const char* name, const void* address,
                   std::initializer_list<i64> strides, Dtype dtype) {
  const int unit = 16 / bytes_of(dtype);
  check(reinterpret_cast<std::uintptr_t>(address) % 16 == 0, "run: ", name, " starts at ", address,
        "; kernel ", kernel, " wants it 16-byte aligned (kernel=\"plain\" takes any alignment)");
  for (const i64 stride : strides) {
    check(stride % unit == 0, "run: ", name, " has a stride of ", stride, " elements; kernel ",
          kernel, " wants multiples of ", unit,
          ", that is 16 bytes (kernel=\"plain\" takes "
          "any stride)");
  }
}

class CudaExecutor : public Executor {
 public:
  explicit CudaExecutor(const AttentionConfig& config)
      : config_(config),
        device_(GpuDevice::get(config.device.id)),
        kernel_config_(cuda::choose_kernel(config, device_.info().arch)),
        target_(make_target(config, kernel_config_, device_.info())) {
    const CurrentDevice current(device_);
    kernel_ = device_.kernel(jit::assemble_attention(kernel_config_, config.variant));
    upload_ = device_.utility("upload", "UploadCall");
    // Loaded here rather than at their first use: that may be inside a graph capture.
    device_.utility("append_kv", "AppendKvCall");
    device_.utility("merge_states", "MergeStatesCall", config.dtype);
    if (config.variant.custom_mask()) pack_mask_ = device_.utility("pack_mask", "PackMaskCall");
    make_variant_tables();
    head_ = DeviceBuffer(device_, head_bytes());
    write_empty_plan();
    counters_ = DeviceBuffer(
        device_, sizeof(unsigned) *
                     (kTicketCounters +
                      static_cast<std::size_t>(config.bounds.query_tokens) * config.num_kv_heads *
                          lists_per_head(target_.shapes[0].tile_q, target_.group_size)));
    const std::size_t body_bytes = cuda::usual_body_bytes(config, target_);
    bodies_.emplace_back(device_, body_bytes);
    // Plans of a model a few steps ahead of the device, before memory must be pinned in plan().
    constexpr std::size_t kPlansAhead = 4, kMaxReserved = 16 << 20;
    staging_.reserve(std::min(kPlansAhead * (head_bytes() + body_bytes), kMaxReserved));
  }

  ~CudaExecutor() override {
    if (driver().CtxPushCurrent(device_.context()) != cuda::kSuccess) return;  // the process ends
    staging_.clear();
    cuda::Context popped = nullptr;
    driver().CtxPopCurrent(&popped);
  }

  const PlanTarget& target() const override { return target_; }
  std::string kernel_name() const override { return kernel_->name(); }
  long long workspace_bytes() const override { return layout().bytes; }

  void upload(const Plan& plan, const FormatView& view, cuda::Stream stream) override {
    const CurrentDevice current(device_);
    cuda::refuse_capture(stream, "plan",
                         "plan first; a captured run() serves every later plan within the bounds");
    const cuda::OutsideCaptures outside;
    check(plan.num_ctas <= target_.num_ctas && plan.num_partial_rows <= target_.max_partial_rows,
          "plan: made for ", plan.num_ctas, " CTAs and ", plan.num_partial_rows,
          " partial rows; this Attention has ", target_.num_ctas, " and ",
          target_.max_partial_rows);
    const std::size_t body_bytes = cuda::body_bytes(plan, view);
    if (body_bytes > bodies_.back().bytes()) {
      // Runs under way may read the old body: it lives on. Doubling bounds what that costs.
      bodies_.emplace_back(device_, std::max(body_bytes, 2 * bodies_.back().bytes()));
    }
    unsigned* const packed_mask =
        view.mask.source != nullptr ? packed_mask_for(view.mask) : nullptr;
    const std::size_t bytes = head_bytes() + body_bytes;
    cuda::StagingRing::Buffer* image = staging_.acquire(bytes);
    try {
      const cuda::MaskArrays mask = cuda::write_image(plan, view, packed_mask, target_.num_ctas,
                                                      static_cast<char*>(bodies_.back().data()),
                                                      static_cast<char*>(image->data));
      UploadCall call{};
      call.from = image->data;
      call.head = head_.data();
      call.body = bodies_.back().data();
      call.head_units = static_cast<int>(head_bytes() / cuda::kUnitBytes);
      call.body_units = static_cast<int>(body_bytes / cuda::kUnitBytes);
      call.counters = static_cast<unsigned*>(counters_.data());
      call.num_counters = kTicketCounters;
      if (plan.num_partial_rows > 0) {
        call.num_counters += static_cast<i64>(plan.merge_indptr.size()) - 1;
      }
      // Four units a thread: kInFlight of the kernel.
      constexpr std::size_t kBytesOfCta = jit::kUtilityThreads * 4 * cuda::kUnitBytes;
      const std::size_t work = std::max(bytes, static_cast<std::size_t>(call.num_counters) * 4);
      upload_->launch(std::clamp<unsigned>((work + kBytesOfCta - 1) / kBytesOfCta, 1, 64), stream,
                      &call);
      if (packed_mask != nullptr) {
        const PackMaskCall pack{view.mask.source, mask.tokens,     mask.token_source,
                                packed_mask,      plan.num_tokens, view.mask.source_is_bools};
        constexpr int kTokensOfCta = jit::kUtilityThreads / 32;
        const unsigned ctas = (plan.num_tokens + kTokensOfCta - 1) / kTokensOfCta;
        pack_mask_->launch(std::clamp<unsigned>(ctas, 1, 1024), stream, &pack);
      }
    } catch (...) {
      staging_.release_unused(image);
      throw;
    }
    staging_.release(image, stream);
  }

  bool plan_on_device(const DeviceLengths& lengths, cuda::Stream stream) override {
    const CurrentDevice current(device_);
    // Made at its first use, since many never do, and never again: a captured graph plans into it.
    if (device_plan_.data() == nullptr) {
      const cuda::OutsideCaptures outside;
      plan_lengths_ = device_.utility("plan_lengths", "PlanLengthsCall", {}, kPlanLengthsThreads);
      device_plan_ = DeviceBuffer(device_, cuda::device_plan_bytes(config_, target_));
    }
    const PlanLengthsCall call =
        cuda::plan_lengths_call(config_, target_, lengths, static_cast<char*>(device_plan_.data()),
                                static_cast<char*>(head_.data()),
                                static_cast<unsigned*>(counters_.data()), kTicketCounters);
    plan_lengths_->launch(1, stream, &call);
    return cuda::captures(stream);
  }

  void run(const Params& given, std::span<const unsigned long long> variant_slots,
           Workspace& workspace, cuda::Stream stream) override {
    const CurrentDevice current(device_);
    Params params = given;
    params.plan = static_cast<const PlanView*>(head_.data());
    params.starts = reinterpret_cast<const CtaStart*>(static_cast<const char*>(head_.data()) +
                                                      cuda::cta_starts_at());
    char* const memory = static_cast<char*>(workspace.data());
    params.partial_out = reinterpret_cast<float*>(memory);
    params.partial_lse = reinterpret_cast<float*>(memory + layout().partial_lse);
    params.folds = reinterpret_cast<float*>(memory + layout().folds);
    params.tickets = static_cast<unsigned*>(counters_.data());
    params.arrived = params.tickets + kTicketCounters;

    // [tensor maps][Params][slots]: Sm90Call or VariantCall of any variant.
    alignas(128) char argument[kMaxArgumentBytes];
    std::size_t bytes = 0;
    const auto append = [&](const void* data, std::size_t size) {
      check(bytes + size <= sizeof argument, "run: variant '", config_.variant.name(), "' has ",
            variant_slots.size(), " parameters, more than a kernel takes");
      std::memcpy(argument + bytes, data, size);
      bytes += size;
    };
    if (kernel_kind_ != Template::kPlain) check_aligned_rows(params);
    if (kernel_kind_ == Template::kSm90) {
      const Sm90Maps maps = sm90_maps(params);
      append(&maps, sizeof maps);
    }
    append(&params, sizeof params);
    char* const slots = argument + bytes;
    append(variant_slots.data(), variant_slots.size_bytes());
    for (const auto& [slot, address] : variant_tables_) {
      std::memcpy(slots + slot * sizeof address, &address, sizeof address);
    }
    kernel_->launch(static_cast<unsigned>(target_.num_ctas), stream, argument);
  }

 private:
  static constexpr int kTicketCounters = 4;               // one, and padding to 16 bytes
  static constexpr std::size_t kMaxArgumentBytes = 4096;  // of a kernel, before CUDA 12.1

  std::size_t head_bytes() const { return cuda::head_bytes(target_.num_ctas); }
  WorkspaceLayout layout() const { return layout_of(config_, target_, kernel_config_); }

  void make_variant_tables() {
    const std::vector<VariantTable> tables =
        plait::variant_tables(config_.variant, config_.head_dim_qk);
    for (const VariantTable& table : tables) {
      const std::size_t bytes = table.values.size() * sizeof table.values[0];
      table_memory_.emplace_back(device_, bytes);
      void* const data = table_memory_.back().data();
      const cuda::OutsideCaptures outside;
      cuda::check_cuda(
          driver().MemcpyHtoD(reinterpret_cast<cuda::DevicePtr>(data), table.values.data(), bytes),
          "copying a variant's table");
      variant_tables_.emplace_back(table.slot, data);
    }
  }

  // A run may come before the first replay of a plan that has only been captured.
  void write_empty_plan() {
    const std::vector<char> zeros(head_bytes());
    const cuda::OutsideCaptures outside;
    cuda::check_cuda(driver().MemcpyHtoD(reinterpret_cast<cuda::DevicePtr>(head_.data()),
                                         zeros.data(), zeros.size()),
                     "writing an empty plan");
  }

  // Memory for the words of a mask that lies on the device.
  unsigned* packed_mask_for(const MaskView& mask) {
    const std::size_t bytes = sizeof(unsigned) * mask.num_words;
    if (packed_masks_.empty() || bytes > packed_masks_.back().bytes()) {
      // As with bodies: runs under way may read the old one.
      const std::size_t before = packed_masks_.empty() ? 4096 : packed_masks_.back().bytes();
      packed_masks_.emplace_back(device_, std::max(bytes, 2 * before));
    }
    return static_cast<unsigned*>(packed_masks_.back().data());
  }

  void check_aligned_rows(const Params& p) const {
    const char* kernel = kernel_kind_ == Template::kSm90 ? "sm90a" : "sm80";
    const bool paged = config_.kv.kind != KvFormat::kRagged;
    // The stride of a dimension with one element is never used, and may be anything.
    const auto check_kv = [&](const char* name, const void* address, const KvStrides& stride) {
      if (p.num_kv_blocks == 0) return;  // any strides, and no address
      const bool one_row = paged ? p.block_size == 1 : p.num_kv_blocks == 1;
      check_aligned(kernel, name, address,
                    {paged && p.num_kv_blocks > 1 ? stride.block : 0, one_row ? 0 : stride.token,
                     p.num_kv_heads > 1 ? stride.head : 0},
                    kernel_config_.dtype_kv);
    };
    const auto check_rows = [&](const char* name, const void* address, const RowStrides& stride) {
      check_aligned(kernel, name, address,
                    {p.num_rows > 1 ? stride.token : 0, p.num_qo_heads > 1 ? stride.head : 0},
                    kernel_config_.dtype_q);
    };
    check_rows("q", p.q, p.q_stride);
    check_rows("out", p.out, p.out_stride);
    check_kv("k", p.k, p.k_stride);
    check_kv("v", p.v, p.v_stride);
  }

  Sm90Maps sm90_maps(const Params& p) {
    const Loader loader = kernel_config_.loader;
    const int page_size = config_.kv.kind == KvFormat::kRagged ? 0 : p.block_size;
    const bool empty = p.num_kv_blocks == 0;  // such a tensor may have any strides, and no address
    Sm90Maps maps{};
    maps.block_size = divisor_of(p.block_size);
    if (loader == Loader::kGather) {
      const int bytes = bytes_of(kernel_config_.dtype_kv);
      maps.k_units = cuda::row_units("k", p.k_stride, p.num_kv_blocks, p.block_size, bytes);
      maps.v_units = cuda::row_units("v", p.v_stride, p.num_kv_blocks, p.block_size, bytes);
      return maps;
    }
    maps.box_rows = loader == Loader::kAffine
                        ? kernel_config_.tile_kv
                        : cuda::box_rows_of(page_size, kernel_config_.tile_kv);
    const auto encode = [&](TensorMap& to, const char* name, const void* address, int head_dim,
                            const KvStrides& stride) {
      // A map of an empty tensor is not used, but must be valid.
      const cuda::TensorMap& map = tensor_maps_.get(
          name, empty ? head_.data() : address, kernel_config_.dtype_kv,
          cuda::kv_map_shape(head_dim, p.num_kv_heads, empty ? 1 : p.num_kv_blocks, page_size,
                             empty ? KvStrides{head_dim, head_dim, head_dim} : stride,
                             maps.box_rows, bytes_of(kernel_config_.dtype_kv)));
      static_assert(sizeof to.opaque == sizeof map.opaque);
      std::memcpy(to.opaque, map.opaque, sizeof to.opaque);
    };
    encode(maps.k, "k", p.k, config_.head_dim_qk, p.k_stride);
    encode(maps.v, "v", p.v, config_.head_dim_vo, p.v_stride);
    return maps;
  }

  const AttentionConfig config_;
  GpuDevice& device_;
  const KernelConfig kernel_config_;
  const Template kernel_kind_ = template_of(kernel_config_);
  const PlanTarget target_;
  std::shared_ptr<const cuda::Kernel> kernel_, upload_, plan_lengths_, pack_mask_;
  DeviceBuffer head_;                       // its address is what captured graphs know
  std::vector<DeviceBuffer> bodies_;        // the last one is in use
  DeviceBuffer device_plan_;                // the body of plans that the device makes
  DeviceBuffer counters_;                   // of tickets, then of arrivals
  std::vector<DeviceBuffer> packed_masks_;  // the last one is in use
  std::vector<DeviceBuffer> table_memory_;
  std::vector<std::pair<std::size_t, const void*>> variant_tables_;  // slot, address
  cuda::StagingRing staging_;
  cuda::TensorMapCache tensor_maps_;
};

}  // namespace

std::unique_ptr<Executor> make_cuda_executor(const AttentionConfig& config) {
  return std::make_unique<CudaExecutor>(config);
}

long long cuda_workspace_bytes(const AttentionConfig& config) {
  const cuda::GpuInfo& gpu = GpuDevice::get(config.device.id).info();
  const KernelConfig kernel = cuda::choose_kernel(config, gpu.arch);
  const PlanTarget target = make_target(config, kernel, gpu);
  return layout_of(config, target, kernel).bytes;
}

}  // namespace plait
