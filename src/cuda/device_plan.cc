#include "cuda/device_plan.h"

#include <algorithm>

#include "cuda/plan_image.h"
#include "plait/error.h"
#include "scheduler/scheduler.h"

namespace plait::cuda {
namespace {

// Fills in the call's arrays, one behind the other in `memory`; returns their bytes.
std::size_t divide(const AttentionConfig& config, const PlanTarget& target, char* memory,
                   PlanLengthsCall& call) {
  std::size_t bytes = 0;
  const auto put = [&](auto*& array, std::size_t size) {
    constexpr std::size_t kAlignment = 256;
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + bytes);
    bytes += (size * sizeof *array + kAlignment - 1) / kAlignment * kAlignment;
  };
  const Bounds& bounds = config.bounds;
  const int tile_q = target.shapes[0].tile_q, group_size = target.group_size;
  const std::size_t tokens = bounds.query_tokens;
  const std::size_t requests = bounds.requests;
  // A request's last tile may be small: one more each than if all tokens were of one.
  const std::size_t tiles =
      num_row_tiles(bounds.query_tokens, tile_q, group_size) + (group_size > tile_q ? 0 : requests);
  const std::size_t lists = tokens * config.num_kv_heads * lists_per_head(tile_q, group_size);
  const std::size_t tokens_of_tile = std::max(rows_per_tile(tile_q, group_size) / group_size, 1);
  const std::size_t ctas = target.num_ctas;
  call.max_tiles = static_cast<int>(tiles);
  put(call.row_blocks, requests);
  // A CTA has at most two parts of heads, and whole ones of the tiles in its run, of which it
  // shares the last with the next.
  put(call.items, tiles + 3 * ctas);
  put(call.token_request, tokens);
  put(call.token_position, tokens);
  put(call.merge_indptr, lists + 1);
  // As many again as parts: what a list of wrong lengths may write beyond its end.
  put(call.merge_sources, 2 * ctas * (tokens_of_tile + 1));
  put(call.tile_end_ps, tiles);
  put(call.block_tile_end, requests);
  return bytes;
}

}  // namespace

std::size_t device_plan_bytes(const AttentionConfig& config, const PlanTarget& target) {
  PlanLengthsCall call{};
  return divide(config, target, nullptr, call);
}

PlanLengthsCall plan_lengths_call(const AttentionConfig& config, const PlanTarget& target,
                                  const DeviceLengths& lengths, char* memory, char* head,
                                  unsigned* counters, int num_tickets) {
  check(target.num_ctas <= kMaxPlannedCtas, "plan: qo_indptr is on the device, where plans are ",
        "made for at most ", kMaxPlannedCtas, " CTAs; this kernel has ", target.num_ctas,
        "; give max_ctas, or pass the lengths (qo_indptr too) on the host");
  scheduler::check_window(config.variant.visible);
  const scheduler::CostModel model = scheduler::cost_model(target);
  PlanLengthsCall call{};
  call.lengths = lengths;
  call.visible = config.variant.visible;
  call.rules = model.rules;
  // Where each chunk of a part is a partial row of its own, heads stay whole: cuts change no bit in
  // invariant mode, and memory for all chunks of the longest lengths would be too much.
  if (target.chunk_keys > 0) call.rules.min_piece = 1 << 30;
  std::copy(std::begin(model.shapes), std::end(model.shapes), call.shapes);
  std::copy(std::begin(model.tile_q), std::end(model.tile_q), call.tile_q);
  call.num_shapes = model.num_shapes;
  call.group_size = model.group_size;
  call.num_ctas = model.num_ctas;
  call.num_sms = model.num_sms;
  call.head = reinterpret_cast<PlanView*>(head);
  call.starts = reinterpret_cast<CtaStart*>(head + cta_starts_at());
  call.counters = counters;
  call.num_tickets = num_tickets;
  divide(config, target, memory, call);
  return call;
}

}  // namespace plait::cuda
