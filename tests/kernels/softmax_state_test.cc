// host_device/softmax_state.h: merging is what softmax over the union would have given, the empty
// state is the identity, and nothing becomes NaN.
#include "host_device/softmax_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace plait {
namespace {

struct WithOutput {
  SoftmaxState state;
  double out = 0;  // unnormalised
};

WithOutput of_keys(const std::vector<std::pair<float, float>>& keys, size_t begin, size_t end) {
  WithOutput s;
  for (size_t i = begin; i < end; ++i) {
    const SoftmaxState one{keys[i].first, 1.0f};
    const OutputScales scales = merge(s.state, one);
    s.out = scales.a * s.out + scales.b * keys[i].second;
  }
  return s;
}

TEST(SoftmaxState, AnyCutGivesTheSoftmaxOfTheUnion) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float scale : {1.0f, 30.0f, 1e4f}) {
    std::vector<std::pair<float, float>> keys(40);
    for (auto& [logit, value] : keys) logit = scale * normal(random), value = normal(random);
    double top = -INFINITY, sum = 0, out = 0;
    for (const auto& [logit, value] : keys) top = std::max<double>(top, logit);
    for (const auto& [logit, value] : keys) {
      sum += std::exp2(logit - top);
      out += std::exp2(logit - top) * value;
    }
    for (size_t cut = 0; cut <= keys.size(); ++cut) {
      WithOutput a = of_keys(keys, 0, cut), b = of_keys(keys, cut, keys.size());
      if (cut % 2 == 0) std::swap(a, b);  // in any order
      const OutputScales scales = merge(a.state, b.state);
      const double joined = scales.a * a.out + scales.b * b.out;
      EXPECT_NEAR(joined / a.state.sum, out / sum, 1e-5);
      const double lse = (top + std::log2(sum)) * std::log(2.0);
      EXPECT_NEAR(lse_of(a.state), lse, 1e-5 + 1e-6 * std::fabs(lse));
    }
  }
}

TEST(SoftmaxState, TheEmptyStateIsTheIdentity) {
  const SoftmaxState states[] = {{0.0f, 1.0f}, {-23170.2f, 3.5f}, {1e30f, 1.0f}, {-1e30f, 2.0f}};
  for (const SoftmaxState& s : states) {
    SoftmaxState a = s;
    const OutputScales kept = merge(a, SoftmaxState{});
    EXPECT_EQ(kept.a, 1.0f);
    EXPECT_EQ(kept.b, 0.0f);
    EXPECT_EQ(a.max_logit, s.max_logit);
    EXPECT_EQ(a.sum, s.sum);
    SoftmaxState b;
    const OutputScales taken = merge(b, s);
    EXPECT_EQ(taken.a, 0.0f);
    EXPECT_EQ(taken.b, 1.0f);
    EXPECT_EQ(b.max_logit, s.max_logit);
    EXPECT_EQ(b.sum, s.sum);
  }
}

TEST(SoftmaxState, TwoEmptyStatesStayEmpty) {
  SoftmaxState a;
  const OutputScales scales = merge(a, SoftmaxState{});
  EXPECT_EQ(scales.a, 0.0f);
  EXPECT_EQ(scales.b, 0.0f);
  EXPECT_EQ(a.max_logit, kNegInf);
  EXPECT_EQ(a.sum, 0.0f);
  EXPECT_EQ(lse_of(a), kNegInf);
}

TEST(SoftmaxState, LseThereAndBack) {
  EXPECT_EQ(state_of_lse(kNegInf).sum, 0.0f);
  EXPECT_EQ(state_of_lse(kNegInf).max_logit, kNegInf);
  for (float lse : {-300.0f, -1.0f, 0.0f, 0.5f, 8.317766f, 1e4f}) {
    EXPECT_NEAR(lse_of(state_of_lse(lse)), lse, 2e-7f * std::fabs(lse) + 1e-30f);
  }
  SoftmaxState a = state_of_lse(2.0f);
  merge(a, state_of_lse(2.0f));
  EXPECT_NEAR(lse_of(a), 2.0f + std::log(2.0f), 1e-6f);
}

}  // namespace
}  // namespace plait
