// The CPU executor: upload() copies the plan and lists the tasks, run() works them off on all
// threads: first the items, then the merge of split rows, then the padding rows.
#include "executor.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cpu/cost_model.h"
#include "cpu/kernel.h"
#include "cpu/thread_pool.h"
#include "host_device/convert.h"
#include "plait/error.h"

namespace plait {
namespace cpu {
namespace {

// Kv heads of an item, or of a token to merge, for one thread.
struct Task {
  int index;
  int kv_head, num_heads;
};

struct FreeAligned {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float[], FreeAligned>;

class CpuExecutor : public Executor {
 public:
  CpuExecutor(const AttentionConfig& config, const std::string& instruction_set)
      : config_(config),
        pool_(&thread_pool()),
        target_(plan_target(config, pool_->num_threads())),
        layout_(workspace_layout(target_.max_partial_rows, config.head_dim_vo)),
        kernel_(find_kernel(config, instruction_set)) {}

  const PlanTarget& target() const override { return target_; }
  std::string kernel_name() const override { return kernel_.name; }
  long long workspace_bytes() const override { return layout_.bytes; }

  void upload(const Plan& plan, const FormatView& view, Stream) override {
    plan_ = plan;
    tables_.resize(view.tables.size());
    view_ = {};
    for (std::size_t i = 0; i < view.tables.size(); ++i) {
      const LevelTable& table = view.tables[i];
      if (table.on_device) {
        view_.tables[i] = table.device_table;
      } else if (!table.affine) {
        tables_[i] = table.indices;
        if (tables_[i].empty()) tables_[i].push_back(0);  // null would mean affine
        view_.tables[i].indices = tables_[i].data();
      }
    }
    view_.num_ctas = plan_.num_ctas;
    view_.num_tokens = plan_.num_tokens;
    view_.row_blocks = plan_.row_blocks.data();
    view_.items = plan_.items.data();
    view_.cta_item_indptr = plan_.cta_item_indptr.data();
    view_.token_request = plan_.token_request.data();
    view_.token_position = plan_.token_position.data();
    view_.row_map = plan_.row_map.empty() ? nullptr : plan_.row_map.data();
    view_.token_merge_indptr =
        plan_.token_merge_indptr.empty() ? nullptr : plan_.token_merge_indptr.data();
    view_.merge_sources = plan_.merge_sources.data();
    list_tasks();
  }

  void run(const Params& given, std::span<const unsigned long long> variant_slots,
           Workspace& workspace, Stream) override {
    Params params = given;
    params.plan = &view_;
    char* base = static_cast<char*>(workspace.data());
    params.partial_out = reinterpret_cast<float*>(base);
    params.partial_lse = reinterpret_cast<float*>(base + layout_.partial_lse);
    params.arrived = nullptr;
    // A variant without parameters has no slots, yet kernels bind a reference to them.
    static constexpr unsigned long long kNoSlots = 0;
    const unsigned long long* slots = variant_slots.empty() ? &kNoSlots : variant_slots.data();
    run_tasks(Phase::kAttend, items_, params, slots);
    run_tasks(Phase::kMerge, merges_, params, slots);
    clear_padding(params);
  }

 private:
  // An item of few rows does its heads side by side (neighbours in memory), one of many rows head
  // by head: finer tasks balance better, and cost nothing there.
  void list_tasks() {
    items_.clear();
    work_us_ = 0;
    for (int i = 0; i < static_cast<int>(plan_.items.size()); ++i) {
      const WorkItem& item = plan_.items[i];
      const ShapeModel& shape = target_.shapes[item.shape];
      work_us_ +=
          static_cast<float>(item.num_heads) *
          (shape.fixed_us + shape.us_per_key * static_cast<float>(item.kv_end - item.kv_begin));
      const int step = item.num_rows <= kFewRows ? kHeadsPerPass : 1;
      for (int h = 0; h < item.num_heads; h += step) {
        items_.push_back({i, item.kv_head_begin + h, std::min(step, item.num_heads - h)});
      }
    }
    merges_.clear();
    for (int token = 0; token + 1 < static_cast<int>(plan_.token_merge_indptr.size()); ++token) {
      if (plan_.token_merge_indptr[token] == plan_.token_merge_indptr[token + 1]) continue;
      for (int h = 0; h < config_.num_kv_heads; ++h) merges_.push_back({token, h, 1});
    }
  }

  void run_tasks(Phase phase, const std::vector<Task>& tasks, const Params& params,
                 const void* variant) {
    pool_->run(static_cast<int>(tasks.size()), max_threads(), [&](int i, int thread) {
      const Task& task = tasks[i];
      kernel_.function({&params, variant, config_.head_dim_qk, config_.head_dim_vo,
                        scratch_of(thread), phase, task.index, task.kv_head, task.num_heads});
    });
  }

  int max_threads() const { return work_us_ < kInlineUs ? 1 : config_.max_ctas; }

  // Made by its thread at its first task: memory near the core, and none for threads never used.
  float* scratch_of(int thread) {
    AlignedFloats& scratch = scratch_[thread];
    if (scratch == nullptr) {
      scratch.reset(new (
          std::align_val_t{64}) float[scratch_floats(config_.head_dim_qk, config_.head_dim_vo)]);
    }
    return scratch.get();
  }

  void clear_padding(const Params& params) {
    const int num_padding = params.num_rows - plan_.num_tokens;
    if (num_padding <= 0) return;
    const int bytes = bytes_of(config_.dtype);
    const bool has_lse = params.lse != nullptr && config_.variant.use_softmax();
    const long long row_bytes =
        static_cast<long long>(config_.num_qo_heads) * config_.head_dim_vo * bytes;
    const bool large = num_padding * row_bytes > (1 << 18);
    pool_->run(num_padding, large ? config_.max_ctas : 1, [&](int i, int) {
      const i64 row = plan_.num_tokens + i;
      for (int h = 0; h < config_.num_qo_heads; ++h) {
        std::memset(static_cast<char*>(params.out) +
                        (row * params.out_stride.token + h * params.out_stride.head) * bytes,
                    0, static_cast<std::size_t>(config_.head_dim_vo) * bytes);
        if (has_lse) {
          params.lse[row * params.lse_stride.token + h * params.lse_stride.head] = kNegInf;
        }
      }
    });
  }

  AttentionConfig config_;
  ThreadPool* pool_;
  PlanTarget target_;
  WorkspaceLayout layout_;
  Kernel kernel_;
  std::vector<AlignedFloats> scratch_{static_cast<std::size_t>(pool_->num_threads())};

  Plan plan_;
  std::vector<std::vector<int>> tables_;  // by level
  PlanView view_{};
  std::vector<Task> items_, merges_;
  float work_us_ = 0;  // modelled
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Executor> make_cpu_executor(const AttentionConfig& config) {
  check(config.dtype == Dtype::kFloat32 || config.dtype == Dtype::kBfloat16 ||
            config.dtype == Dtype::kFloat16,
        "Attention: dtype is ", to_string(config.dtype),
        ", but the CPU takes float32, bfloat16 and float16");
  return std::make_unique<cpu::CpuExecutor>(config, cpu::instruction_set_of(config));
}

long long cpu_workspace_bytes(const AttentionConfig& config) {
  const PlanTarget target = cpu::plan_target(config, cpu::thread_pool().num_threads());
  return workspace_layout(target.max_partial_rows, config.head_dim_vo).bytes;
}

}  // namespace plait
