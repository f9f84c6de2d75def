// Softmax state of one (query token, head): what attention over a set of keys leaves behind, and
// how the states of two disjoint sets become the state of their union, in any order, so that the
// scheduler may cut KV anywhere. Used by the kernels, the merge and the CPU backend.
// Source: FlashInfer (Ye et al., 2025, arXiv:2501.01005), "Attention composition".
#pragma once
#include "host_device/base.h"

namespace plait {

struct SoftmaxState {
  float max_logit = kNegInf;  // largest logit so far, base 2: sm_scale * log2(e) * q.k
  float sum = 0.0f;           // sum of exp2(logit - max_logit); 0 while no key was seen
};

struct OutputScales {
  float a, b;
};

// Merges `b` into `a` and returns the factors for their unnormalised outputs:
//   out = scales.a * out_a + scales.b * out_b.
// An empty state has no effect; two empty states stay empty with both factors 0, never NaN.
// A state with factor 0 must be skipped, not multiplied, where its output may hold NaN.
PLAIT_HD OutputScales merge(SoftmaxState& a, const SoftmaxState& b) {
  const float max_logit = max(a.max_logit, b.max_logit);
  if (max_logit == kNegInf) {  // else exp2(-inf - -inf) is NaN
    a.sum += b.sum;            // 0, or NaN from a NaN logit, which must not look like an empty set
    return {0.0f, 0.0f};
  }
  const OutputScales scales{exp2(a.max_logit - max_logit), exp2(b.max_logit - max_logit)};
  a = {max_logit, scales.a * a.sum + scales.b * b.sum};
  return scales;
}

// A row's reference follows its maximum only when that has outgrown it by more than this (base 2),
// so that outputs are rarely rescaled; weights below 2^that, of `dtype`, are as exact as those
// below 1. An output before the division then is up to 2^that times the sum of |V| over its keys,
// which must be a finite float32.
PLAIT_HD constexpr float rescale_threshold(Dtype dtype) {
  return dtype == Dtype::kFloat16 ? 8.0f : 32.0f;
}

// Natural-log LSE of a state, and the normalised state {lse in base 2, 1} that an LSE stands for.
PLAIT_HD float lse_of(const SoftmaxState& s) {
  return s.sum == 0.0f ? kNegInf : (s.max_logit + log2(s.sum)) * kLn2;  // NaN stays NaN
}
PLAIT_HD SoftmaxState state_of_lse(float lse) {
  return lse == kNegInf ? SoftmaxState{} : SoftmaxState{lse * kLog2e, 1.0f};
}

}  // namespace plait
