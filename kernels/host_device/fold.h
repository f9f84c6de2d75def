// Invariant mode: the keys of a row are cut into chunks at fixed absolute positions, the state of
// each chunk is a softmax of its own, and states are folded in the order of the chunks by the one
// function here, wherever that happens: in a CTA that has all of a row's chunks, in the merge, on
// the CPU. So a row's bits do not depend on who computed which chunk. docs/invariant.md states all
// that the contract fixes. Folding with an empty state, on either side, changes no bit: a row may
// have chunks that it sees nothing of.
#pragma once
#include "host_device/base.h"

namespace plait {

// The fold of some chunks: output = out / sum, whose out is kept by whoever folds.
struct FoldedState {
  float max_lse = kNegInf;  // largest LSE of a chunk so far, natural logarithm
  float sum = 0.0f;         // sum of exp(lse - max_lse); 0 while no chunk had a key
};

// a * b + c, rounded once where the machine can. (A kernel is compiled without contractions in
// invariant mode; host compilers contract as they like, so nothing here leaves them a choice.)
PLAIT_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return fmaf(a, b, c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// What outputs are multiplied with when a chunk is folded in: 0 where one of the two does not
// count, the other's then is 1.
struct FoldFactors {
  float before, chunk;
};

// Folds in the LSE of the next chunk, whose output is normalised.
PLAIT_HD FoldFactors fold(FoldedState& state, float lse) {
  const float max_lse = max(state.max_lse, lse);
  if (max_lse == kNegInf) return {1.0f, 0.0f};  // both are empty
  const float before = exp2((state.max_lse - max_lse) * kLog2e);
  const float chunk = exp2((lse - max_lse) * kLog2e);
  state = {max_lse, fused(before, state.sum, chunk)};
  return {before, chunk};
}
// An element of the output: exact where one of the two does not count, but for the sign of zero.
PLAIT_HD float fold(const FoldFactors& factors, float before, float chunk) {
  return fused(factors.chunk, chunk, factors.before * before);
}
// The element in the end; there is no -0, of which it would not be known how it came about.
PLAIT_HD float folded(float x, float scale) { return fused(x, scale, 0.0f); }

// What the output is multiplied with at the end, and the LSE: those of a single chunk are its own.
PLAIT_HD float fold_scale(const FoldedState& state) {
  return state.sum == 1.0f ? 1.0f : state.sum == 0.0f ? 0.0f : reciprocal(state.sum);
}
PLAIT_HD float fold_lse(const FoldedState& state) {
  return state.sum == 1.0f   ? state.max_lse
         : state.sum == 0.0f ? kNegInf
                             : fused(log2(state.sum), kLn2, state.max_lse);
}

}  // namespace plait
