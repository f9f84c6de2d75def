// Workspace: memory for partial states, on any device, own or a caller's; and how executors divide
// it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <new>

#include "cuda/memory.h"
#include "executor.h"
#include "host_device/convert.h"
#include "plait/attention.h"
#include "plait/error.h"

namespace plait {
namespace {

constexpr long long kAlignment = 256;

void* allocate(const Device& device, long long bytes) {
  if (device.type != kCpu) return device_alloc(device, bytes);
  void* data =
      ::operator new (static_cast<std::size_t>(bytes), std::align_val_t{kAlignment}, std::nothrow);
  if (data == nullptr) fail("Workspace: no memory for ", bytes, " bytes on cpu");
  return data;
}

void release(const Device& device, void* data) {
  if (device.type != kCpu) {
    device_free(device, data);
  } else {
    ::operator delete (data, std::align_val_t{kAlignment});
  }
}

long long align(long long bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

struct Workspace::Impl {
  Device device;
  void* data = nullptr;
  long long bytes = 0;
  bool owned = false;
  std::atomic<bool> in_use{false};
};

Workspace::Workspace(const Device& device, long long bytes) : impl_(new Impl) {
  check(bytes >= 0, "Workspace: bytes is ", bytes, ", but must not be negative");
  impl_->data = allocate(device, bytes);
  impl_->device = device;
  impl_->bytes = bytes;
  impl_->owned = true;
}

Workspace::Workspace(const TensorView& buffer) : impl_(new Impl) {
  check(buffer.defined(), "Workspace: buffer is no tensor");
  long long elements = 1;
  for (int i = 0; i < buffer.ndim; ++i) elements *= buffer.shape[i];
  long long expected = 1;  // stride of a contiguous tensor, from the last dimension
  for (int i = buffer.ndim - 1; i >= 0; --i) {
    check(buffer.shape[i] <= 1 || elements == 0 || buffer.stride(i) == expected,
          "Workspace: buffer is ", describe(buffer), " with stride ", buffer.stride(i),
          " of dimension ", i, ", but must be contiguous");
    expected *= buffer.shape[i];
  }
  check(buffer.data != nullptr || elements == 0, "Workspace: buffer is ", describe(buffer),
        " but its pointer is null");
  check(reinterpret_cast<std::uintptr_t>(buffer.bytes()) % kAlignment == 0,
        "Workspace: buffer starts at an address that is ",
        reinterpret_cast<std::uintptr_t>(buffer.bytes()) % kAlignment,
        " bytes beyond a multiple of ", kAlignment, ", but must start at one");
  impl_->device = buffer.device();
  impl_->data = buffer.bytes();
  impl_->bytes = elements * buffer.dtype_bits * buffer.dtype_lanes / 8;
}

Workspace::~Workspace() {
  if (impl_->owned) release(impl_->device, impl_->data);
}

void* Workspace::data() const { return impl_->data; }
long long Workspace::bytes() const { return impl_->bytes; }
Device Workspace::device() const { return impl_->device; }
std::atomic<bool>& Workspace::in_use() const { return impl_->in_use; }
bool Workspace::owns_memory() const { return impl_->owned; }

int max_partial_rows(const AttentionConfig& config, int num_ctas, int tile_q) {
  // Flat formats: two partial tiles a CTA, however long the batch. Composed: a partial row for each
  // row and level beside them.
  const long long all_rows =
      static_cast<long long>(config.bounds.query_tokens) * config.num_qo_heads;
  long long rows = 2LL * num_ctas * tile_q, states = config.kv.num_levels;
  if (config.chunk_keys > 0) {
    // A row for each chunk of what is split; what needs more is split less, or not at all.
    rows *= 2;
    states += config.bounds.keys / config.chunk_keys;
  }
  if (config.kv.num_levels > 1) {
    // As many as all chunks of all rows, but no memory for bounds that are hardly met at once:
    // plan() refuses what needs more.
    constexpr long long kMostChunkRows = 1 << 20;
    long long of_levels = all_rows * states;
    if (config.chunk_keys > 0) {
      of_levels = std::min(of_levels, std::max(all_rows * config.kv.num_levels, kMostChunkRows));
    }
    rows += of_levels;
  }
  check(rows <= std::numeric_limits<int>::max(), "attention: bounds.query_tokens ",
        config.bounds.query_tokens, " x num_qo_heads ", config.num_qo_heads, " x ",
        config.kv.num_levels, " levels need ", rows, " partial rows; fewer than 2^31 are taken");
  return static_cast<int>(rows);
}

long long kv_bytes(const AttentionConfig& config) {
  return static_cast<long long>(config.num_kv_heads) * (config.head_dim_qk + config.head_dim_vo) *
         bytes_of(config.dtype_kv());
}

WorkspaceLayout workspace_layout(int max_partial_rows, int head_dim_vo, long long folds) {
  const long long rows = max_partial_rows;
  WorkspaceLayout layout;
  layout.partial_lse = align(rows * head_dim_vo * static_cast<long long>(sizeof(float)));
  layout.folds = layout.partial_lse + align(rows * static_cast<long long>(sizeof(float)));
  layout.bytes = layout.folds + align(folds * static_cast<long long>(sizeof(float)));
  return layout;
}

}  // namespace plait
