// A Plan and its block tables as the bytes that go to the device: PlanView at a fixed address (the
// head, which captured graphs know), and the arrays it points at (the body).
#pragma once
#include <cstddef>

#include "formats/view.h"
#include "plait/plan.h"

namespace plait::cuda {

inline constexpr std::size_t kUnitBytes = 16;  // what kernels/upload.cuh copies

// The head: PlanView, then a CtaStart for each CTA of the grid, a line each.
constexpr std::size_t cta_starts_at() {
  constexpr std::size_t kLineBytes = sizeof(CtaStart);
  return (sizeof(PlanView) + kLineBytes - 1) / kLineBytes * kLineBytes;
}
constexpr std::size_t head_bytes(int grid) {
  static_assert(sizeof(CtaStart) % kUnitBytes == 0);
  return cta_starts_at() + grid * sizeof(CtaStart);
}
// CtaStart of CTA `cta`, which may be beyond those of the plan. view: the plan's.
CtaStart cta_start(const Plan& plan, const PlanView& view, int cta);
// Bytes of the body; a multiple of kUnitBytes.
std::size_t body_bytes(const Plan& plan, const FormatView& view);
// Where kernels/pack_mask.cuh finds its arrays in the body; null without a mask on the device.
struct MaskArrays {
  const TokenMask* tokens = nullptr;
  const i64* token_source = nullptr;
};
// Writes head and body, one after the other, for a grid of `grid` CTAs and a body that will lie at
// `device_body`.
// `packed_mask`: where the words of a mask on the device will be.
MaskArrays write_image(const Plan& plan, const FormatView& view, const unsigned* packed_mask,
                       int grid, char* device_body, char* image);

// Bytes that a body within `bounds` hardly ever exceeds: reserved ahead; beyond it memory grows.
std::size_t usual_body_bytes(const AttentionConfig& config, const PlanTarget& target);

}  // namespace plait::cuda
