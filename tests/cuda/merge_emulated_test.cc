// Who merges which heads (Claims of tile/merge.cuh), executed on the host by one warp, with
// counters as other CTAs may leave them. Whole merges run in the tests of the kernels.
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tile/merge.cuh"

namespace plait::test {
namespace {

// A CTA that has arrived at every head, head i being list 2 i + 1.
struct Helper {
  std::vector<unsigned> counters;
  std::vector<int> scratch;
  Claims claims;
  bool lingers;

  // parts: of every head, negative where this CTA has arrived last.
  Helper(const std::vector<int>& parts, const std::vector<unsigned>& arrived, bool lingers,
         int start = 0)
      : counters(2 * parts.size() + 1, 77), scratch(merge_scratch(static_cast<int>(parts.size()))) {
    const int num_heads = static_cast<int>(parts.size());
    claims = {scratch.data(), scratch.data() + num_heads, num_heads, start};
    this->lingers = lingers;
    for (int i = 0; i < num_heads; ++i) {
      scratch[i] = parts[i];
      counters[2 * i + 1] = arrived[i];
    }
  }
  // What one pass claims; none: the CTA ends.
  std::vector<int> take() {
    emulate::launch(1, 32, {0}, [&] {
      Claims of_thread = claims;
      of_thread.take(counters.data(), lingers, [](int i) { return 2 * i + 1; });
    });
    const int count = claims.num_claimed();
    return {claims.claimed, claims.claimed + std::max(count, 0)};
  }
  unsigned counter(int head) const { return counters[2 * head + 1]; }
};

TEST(Claims, OneOfManyHeadsForEachOfManyParts) {
  Helper helper(std::vector<int>(16, 17), std::vector<unsigned>(16, 17), true, 5);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(helper.take(), std::vector{(5 + i) % 16});
  EXPECT_TRUE(helper.take().empty());
  for (int i = 0; i < 16; ++i) EXPECT_EQ(helper.counter(i), 0u);
}

TEST(Claims, WhoArrivedLastTakesAllThatOthersLeave) {
  Helper last(std::vector<int>(96, -4), std::vector<unsigned>(96, 4), false, 90);
  for (const int head : {3, 40, 95}) last.counters[2 * head + 1] = 0;  // were claimed meanwhile
  std::vector<int> taken;
  for (;;) {
    const std::vector<int> more = last.take();
    if (more.empty()) break;
    EXPECT_LE(more.size(), 8u);  // of 32 that a warp looks at
    taken.insert(taken.end(), more.begin(), more.end());
  }
  std::sort(taken.begin(), taken.end());
  EXPECT_EQ(taken.size(), 93u);
  EXPECT_EQ(std::unique(taken.begin(), taken.end()), taken.end());
  for (const int head : {3, 40, 95}) {
    EXPECT_FALSE(std::binary_search(taken.begin(), taken.end(), head));
  }
  for (int i = 0; i < 96; ++i) EXPECT_EQ(last.counter(i), 0u);
}

TEST(Claims, NothingThatMissesParts) {
  for (const bool lingers : {false, true}) {
    Helper helper({4, 4, 4}, {3, 0, 1}, lingers);  // head 1: is merged
    EXPECT_TRUE(helper.take().empty());
    EXPECT_EQ(helper.counter(0), 3u);
    EXPECT_EQ(helper.counter(1), 0u);
    EXPECT_EQ(helper.counter(2), 1u);
    // The other parts arrive. Whoever has something else to do leaves them to the last of those.
    helper.counters[1] = 4;
    EXPECT_EQ(helper.take(), lingers ? std::vector{0} : std::vector<int>{});
  }
}

}  // namespace
}  // namespace plait::test
