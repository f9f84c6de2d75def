// Invariant mode, bit by bit, of a kernel executed on the host: the rows of one batch in one launch
// and token by token, on few CTAs and many, whole and split, in tiles of other kernels.
#pragma once
#include "cuda/emulated_case.h"

namespace plait::test {

inline constexpr int kTestChunk = 128;  // keys: short, since emulation is slow

constexpr KernelConfig with_chunks(KernelConfig config) {
  config.chunk_keys = kTestChunk;
  return config;
}

// A window, and what a window with sink tokens hides in the middle.
inline const Visibility kInvariantVisibilities[] = {{1, 150, 0}, {1, 40, 10}};

// run(case, num_ctas, output): by one of the kernels that agree.
template <class T, class... Runs>
void expect_invariant(Shape shape, Runs... runs) {
  for (const Visibility& visible : kInvariantVisibilities) {
    SCOPED_TRACE(visible.window_left);
    shape.affine = true;
    auto affine = make_case<T>(shape, visible, {5, 1}, {300, 130}, 0, 7);
    EmulatedOutput whole;
    bool has_whole = false;
    int most_merged = 0;
    const auto expect_same = [&](const auto& c, auto& run, int num_ctas, const char* what) {
      EmulatedOutput output;
      run(c, num_ctas, &output);
      most_merged = std::max(most_merged, output.num_merged);
      if (!has_whole) whole = output;
      has_whole = true;
      EXPECT_TRUE(output == whole) << what << " on " << num_ctas << " CTAs has other bits";
    };
    const auto expect_all = [&](auto& run) {
      expect_same(affine, run, 1, "the batch");
      expect_same(affine, run, 7, "the batch");
      expect_same(token_by_token(affine), run, 3, "one token at a time");
    };
    (expect_all(runs), ...);
    EXPECT_GT(most_merged, 0) << "nothing was split";
  }
}

}  // namespace plait::test
