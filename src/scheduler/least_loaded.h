// Deals work to CTAs: each piece to the least loaded, ties by index.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "plait/plan_data.h"

namespace plait::scheduler {

// CTAs share a word with their load while items are dealt.
inline constexpr int kCtaBits = 16, kMaxCtas = (1 << kCtaBits) - 1;

// As long as there are empty CTAs it is the next of them; then a tree of minima over load and index
// in one word: a step is a handful of dependent minima without a branch, a third of the time of a
// heap.
class LeastLoaded {
 public:
  LeastLoaded(std::vector<std::uint64_t>& tree, int num_ctas)
      : tree_(tree), num_ctas_(num_ctas), leaves_(std::bit_ceil(static_cast<unsigned>(num_ctas))) {
    tree_.assign(2 * leaves_, ~std::uint64_t{0});
  }
  // CTAs that have something already; loads are below 2^(64 - kCtaBits), now and later.
  LeastLoaded(std::vector<std::uint64_t>& tree, const std::vector<i64>& load)
      : LeastLoaded(tree, static_cast<int>(load.size())) {
    for (; num_used_ < num_ctas_; ++num_used_) {
      tree_[leaves_ + num_used_] = static_cast<std::uint64_t>(load[num_used_]) << kCtaBits |
                                   static_cast<std::uint64_t>(num_used_);
    }
    take_smaller_everywhere();
  }

  // Once every CTA has something.
  int next() const { return static_cast<int>(tree_[1] & kMaxCtas); }

  int give(std::uint64_t cost) {  // returns the CTA
    if (num_used_ < num_ctas_) {
      tree_[leaves_ + num_used_] = cost << kCtaBits | static_cast<std::uint64_t>(num_used_);
      if (num_used_ + 1 == num_ctas_) take_smaller_everywhere();
      return num_used_++;
    }
    const int cta = next();
    size_t i = leaves_ + cta;
    tree_[i] += cost << kCtaBits;
    for (i /= 2; i >= 1; i /= 2) take_smaller(i);
    return cta;
  }

 private:
  void take_smaller(size_t i) { tree_[i] = std::min(tree_[2 * i], tree_[2 * i + 1]); }
  void take_smaller_everywhere() {
    for (size_t i = leaves_ - 1; i >= 1; --i) take_smaller(i);
  }

  std::vector<std::uint64_t>& tree_;
  const int num_ctas_;
  const size_t leaves_;
  int num_used_ = 0;
};

}  // namespace plait::scheduler
