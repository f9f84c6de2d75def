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
#include "variant_args.h"

namespace plait {
namespace cpu {
namespace {

// Kv heads of an item, or of a token to merge, for one thread.
struct Task {
  int index;
  int head, num_heads;
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
        kernel_(find_kernel(config, instruction_set)),
        variant_tables_(variant_tables(config.variant, config.head_dim_qk)) {}

  const PlanTarget& target() const override { return target_; }
  std::string kernel_name() const override { return kernel_.name; }
  long long workspace_bytes() const override { return layout_.bytes; }

  void upload(const Plan& plan, const FormatView& view, Stream) override {
    Uploaded& next = uploaded_[1 - current_];
    next.plan = plan;
    next.tables.resize(view.tables.size());
    next.view = {};
    for (std::size_t i = 0; i < view.tables.size(); ++i) {
      const LevelTable& table = view.tables[i];
      if (table.on_device) {
        next.view.tables[i] = table.device_table;
      } else if (!table.affine) {
        next.tables[i] = table.indices;
        if (next.tables[i].empty()) next.tables[i].push_back(0);  // null would mean affine
        next.view.tables[i].indices = next.tables[i].data();
      }
    }
    const Plan& p = next.plan;
    next.view.num_tokens = p.num_tokens;
    next.view.row_blocks = p.row_blocks.data();
    next.view.items = p.items.data();
    next.view.token_request = p.token_request.data();
    next.view.token_position = p.token_position.data();
    next.view.row_map = p.row_map.empty() ? nullptr : p.row_map.data();
    next.view.lists_per_head = p.lists_per_head;
    next.view.merge_indptr = p.merge_indptr.empty() ? nullptr : p.merge_indptr.data();
    next.view.merge_sources = p.merge_sources.data();
    if (!view.mask.tokens.empty()) {  // a mask on the CPU is a host mask
      next.token_mask = view.mask.tokens;
      next.mask_words = view.mask.words;
      next.view.token_mask = next.token_mask.data();
      next.view.mask_words = next.mask_words.data();
    }
    list_tasks(next);
    current_ = 1 - current_;
  }

  bool plan_on_device(const DeviceLengths&, Stream) override {
    fail("plan: the CPU has no device to plan on");  // its checks let no such array through
  }

  void run(const Params& given, std::span<const unsigned long long> variant_slots,
           Workspace& workspace, Stream) override {
    Params params = given;
    const Uploaded& uploaded = uploaded_[current_];
    params.plan = &uploaded.view;
    char* base = static_cast<char*>(workspace.data());
    params.partial_out = reinterpret_cast<float*>(base);
    params.partial_lse = reinterpret_cast<float*>(base + layout_.partial_lse);
    params.arrived = params.tickets = nullptr;
    std::vector<unsigned long long> slots(variant_slots.begin(), variant_slots.end());
    for (const VariantTable& table : variant_tables_) {
      slots[table.slot] = reinterpret_cast<std::uintptr_t>(table.values.data());
    }
    // A variant without parameters has no slots, yet kernels bind a reference to them.
    if (slots.empty()) slots.push_back(0);
    run_tasks(Phase::kAttend, uploaded.items, uploaded.work_us, params, slots.data());
    run_tasks(Phase::kMerge, uploaded.merges, uploaded.work_us, params, slots.data());
    clear_padding(params, uploaded.plan.num_tokens);
  }

 private:
  // A plan as run() reads it. Two take turns, so that an upload() that runs out of memory leaves
  // the one before.
  struct Uploaded {
    Plan plan;
    std::vector<std::vector<int>> tables;  // by level
    std::vector<TokenMask> token_mask;
    std::vector<unsigned> mask_words;
    PlanView view{};  // into those above
    std::vector<Task> items, merges;
    float work_us = 0;  // modelled
  };

  // An item of few rows does its heads side by side (neighbours in memory), one of many rows head
  // by head: finer tasks balance better, and cost nothing there.
  void list_tasks(Uploaded& to) const {
    const Plan& plan = to.plan;
    to.items.clear();
    to.work_us = 0;
    for (int i = 0; i < static_cast<int>(plan.items.size()); ++i) {
      const WorkItem& item = plan.items[i];
      const ShapeModel& shape = target_.shapes[item.shape];
      to.work_us +=
          static_cast<float>(item.num_heads) *
          (shape.fixed_us + shape.us_per_key * static_cast<float>(item.kv_end - item.kv_begin));
      const int step = item.num_rows <= kFewRows ? kHeadsPerPass : 1;
      for (int h = 0; h < item.num_heads; h += step) {
        to.items.push_back({i, item.kv_head_begin + h, std::min(step, item.num_heads - h)});
      }
    }
    to.merges.clear();
    for (size_t list = 0; list + 1 < plan.merge_indptr.size(); ++list) {
      if (plan.merge_indptr[list] == plan.merge_indptr[list + 1]) continue;
      const int kv_head = static_cast<int>(list / plan.lists_per_head) % config_.num_kv_heads;
      const int begin = static_cast<int>(list) % plan.lists_per_head * target_.shapes[0].tile_q;
      const int end = std::min(begin + target_.shapes[0].tile_q, target_.group_size);
      to.merges.push_back(
          {static_cast<int>(list), kv_head * target_.group_size + begin, end - begin});
    }
  }

  void run_tasks(Phase phase, const std::vector<Task>& tasks, float work_us, const Params& params,
                 const void* variant) {
    const int max_threads = work_us < kInlineUs ? 1 : config_.max_ctas;
    pool_->run(static_cast<int>(tasks.size()), max_threads, [&](int i, int thread) {
      const Task& task = tasks[i];
      kernel_.function({&params, variant, config_.dtype, config_.head_dim_qk, config_.head_dim_vo,
                        scratch_of(thread), phase, task.index, task.head, task.num_heads,
                        config_.chunk_keys});
    });
  }

  // Made by its thread at its first task: memory near the core, and none for threads never used.
  float* scratch_of(int thread) {
    AlignedFloats& scratch = scratch_[thread];
    if (scratch == nullptr) {
      scratch.reset(new (
          std::align_val_t{64}) float[scratch_floats(config_.head_dim_qk, config_.head_dim_vo)]);
    }
    return scratch.get();
  }

  void clear_padding(const Params& params, int num_tokens) {
    const int num_padding = params.num_rows - num_tokens;
    if (num_padding <= 0) return;
    const int bytes = bytes_of(config_.dtype);
    const bool has_lse = params.lse != nullptr && config_.variant.use_softmax();
    const long long row_bytes =
        static_cast<long long>(config_.num_qo_heads) * config_.head_dim_vo * bytes;
    const bool large = num_padding * row_bytes > (1 << 18);
    pool_->run(num_padding, large ? config_.max_ctas : 1, [&](int i, int) {
      const i64 row = num_tokens + i;
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
  const std::vector<VariantTable> variant_tables_;
  std::vector<AlignedFloats> scratch_{static_cast<std::size_t>(pool_->num_threads())};

  Uploaded uploaded_[2];
  int current_ = 0;
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
  cpu::instruction_set_of(config);  // for its check
  const PlanTarget target = cpu::plan_target(config, cpu::thread_pool().num_threads());
  return workspace_layout(target.max_partial_rows, config.head_dim_vo).bytes;
}

}  // namespace plait
