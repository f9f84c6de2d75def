#include "cuda/plan_image.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "host_device/config.h"
#include "plait/error.h"

namespace plait::cuda {
namespace {

constexpr std::size_t padded(std::size_t bytes) {
  return (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
}

// One array of the body after the other, in one order for both measuring and writing.
class Body {
 public:
  Body(char* device, char* image) : device_(device), image_(image) {}
  // Null for an empty array: that is what PlanView's optional ones want.
  template <class T>
  const T* put(const std::vector<T>& array) {
    if (array.empty()) return nullptr;
    const std::size_t bytes = array.size() * sizeof(T), at = bytes_;
    bytes_ += padded(bytes);
    if (image_ == nullptr) return nullptr;
    std::memcpy(image_ + at, array.data(), bytes);
    return reinterpret_cast<const T*>(device_ + at);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  char *device_, *image_;
  std::size_t bytes_ = 0;
};

PlanView put_all(const Plan& plan, const FormatView& view, const unsigned* packed_mask, Body& body,
                 MaskArrays& mask_arrays) {
  PlanView out{};
  out.num_tokens = plan.num_tokens;
  out.queue_begin = plan.cta_item_indptr[plan.num_ctas];
  out.queue_end = static_cast<int>(plan.items.size());
  out.lists_per_head = plan.lists_per_head;
  out.row_blocks = body.put(plan.row_blocks);
  out.items = body.put(plan.items);
  out.token_request = body.put(plan.token_request);
  out.token_position = body.put(plan.token_position);
  out.row_map = body.put(plan.row_map);
  out.merge_indptr = body.put(plan.merge_indptr);
  out.merge_sources = body.put(plan.merge_sources);
  const MaskView& mask = view.mask;
  out.token_mask = body.put(mask.tokens);
  out.mask_words = mask.source == nullptr ? body.put(mask.words) : packed_mask;
  if (mask.source != nullptr) mask_arrays = {out.token_mask, body.put(mask.token_source)};
  for (std::size_t level = 0; level < view.tables.size(); ++level) {
    const LevelTable& table = view.tables[level];
    if (table.affine) continue;  // BlockTable{}: no blocks
    if (table.on_device) {
      out.tables[level] = table.device_table;
    } else {
      out.tables[level].indices = body.put(table.indices);
    }
  }
  return out;
}

}  // namespace

std::size_t body_bytes(const Plan& plan, const FormatView& view) {
  Body body(nullptr, nullptr);
  MaskArrays mask;
  put_all(plan, view, nullptr, body, mask);
  return body.bytes();
}

CtaStart cta_start(const Plan& plan, const PlanView& view, int cta) {
  CtaStart start{};
  if (cta >= plan.num_ctas) return start;
  start.item_begin = plan.cta_item_indptr[cta];
  start.item_end = plan.cta_item_indptr[cta + 1];
  if (start.item_begin == start.item_end) return start;
  start.item = plan.items[start.item_begin];
  start.block = plan.row_blocks[start.item.row_block];
  start.table = view.tables[start.block.level];
  return start;
}

MaskArrays write_image(const Plan& plan, const FormatView& view, const unsigned* packed_mask,
                       int grid, char* device_body, char* image) {
  check(view.tables.size() <= static_cast<std::size_t>(kMaxLevels), "plan: ", view.tables.size(),
        " levels, ", kMaxLevels, " are taken");
  Body body(device_body, image + head_bytes(grid));
  MaskArrays mask;
  const PlanView head = put_all(plan, view, packed_mask, body, mask);
  std::memcpy(image, &head, sizeof head);
  for (int cta = 0; cta < grid; ++cta) {
    const CtaStart start = cta_start(plan, head, cta);
    std::memcpy(image + cta_starts_at() + cta * sizeof start, &start, sizeof start);
  }
  return mask;
}

std::size_t usual_body_bytes(const AttentionConfig& config, const PlanTarget& target) {
  const Bounds& b = config.bounds;
  const std::size_t levels = std::max(config.kv.num_levels, 1);
  const std::size_t blocks = levels * (b.requests + 1);
  const std::size_t rows = static_cast<std::size_t>(b.query_tokens) * target.group_size;
  const std::size_t tile_rows = std::max(target.shapes[target.num_shapes - 1].tile_q, 1);
  // Items are whole tiles of a few heads, and pieces of split ones.
  const std::size_t items = levels * (rows / tile_rows + b.requests) + 8 * target.num_ctas;
  std::size_t bytes = blocks * sizeof(RowBlock) + items * sizeof(WorkItem);
  bytes += b.query_tokens * sizeof(int) * (3 + levels);
  const std::size_t lists = static_cast<std::size_t>(b.query_tokens) * config.num_kv_heads *
                            lists_per_head(target.shapes[0].tile_q, target.group_size);
  bytes += (lists + target.max_partial_rows) * sizeof(int);
  // Host page tables: what the bounds promise if they say it; else some, because requests times
  // the longest of them is far more than any batch has.
  constexpr long long kUnpromisedPages = 1 << 20;
  const long long pages = max_host_pages(config.kv, b);
  bytes += 4 * (b.total_pages > 0 ? pages : std::min(pages, kUnpromisedPages));
  return padded(bytes) + 4096;
}

}  // namespace plait::cuda
