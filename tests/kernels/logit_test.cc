// Logits in parts (kernels/host_device/variant.h), and the soft cap without powers.
#include <gtest/gtest.h>

#include <cmath>

#include "host_device/variants/alibi.h"
#include "host_device/variants/soft_cap.h"

namespace plait {
namespace {

TEST(Logit, IsWhatItsPartsSay) {
  const Logit logit(3.0f, 0.5f, 2.0f);
  EXPECT_FLOAT_EQ(logit, 3.5f);
  EXPECT_FLOAT_EQ(logit * 4.0f, 14.0f);
  const Distance distance{-100.0f, 7.0f};
  EXPECT_FLOAT_EQ(logit + 0.25f * distance, 3.5f - 0.25f * 93);
  EXPECT_FLOAT_EQ(1.0f + 0.25f * distance, 1.0f - 0.25f * 93);  // of a float: a float
}

TEST(Logit, AlibiLeavesScaleAndOffsetToAllKeysOfARow) {
  const float slopes[] = {0.5f, 0.125f};
  for (const float own : {0.0f, 1.0f, 9.0f}) {
    LogitContext context{};
    context.qo_head = 1;
    context.distance = {-40.0f, own};
    const Logit logit = Alibi::logits_transform({slopes}, context, Logit(6.0f, 0.25f));
    EXPECT_EQ(logit.scale, 0.25f);
    EXPECT_EQ(logit.offset, -5.0f);
    EXPECT_FLOAT_EQ(logit, 1.5f + 0.125f * (own - 40));
  }
}

TEST(SoftCap, WithoutPowersIsTheSame) {
  for (const float cap : {0.5f, 30.0f, 50.0f}) {
    const SoftCap::Params params{cap};
    LogitContext context{};
    context.dtype = Dtype::kBfloat16;
    for (int i = -1000; i <= 1000; ++i) {
      const float x = cap * static_cast<float>(i) / 1000;
      ASSERT_LE(std::fabs(x), SoftCap::small_logit(params));
      const Logit small = SoftCap::small_logits_transform(params, context, Logit(2 * x, 0.5f));
      const Logit general = SoftCap::logits_transform(params, context, Logit(2 * x, 0.5f));
      EXPECT_EQ(small.scale, general.scale);
      EXPECT_EQ(small.offset, general.offset);
      const double expected = cap * std::tanh(static_cast<double>(x) / cap);
      EXPECT_NEAR(small, expected, std::fabs(expected) * 8e-6 + cap * 3e-7) << x;
      EXPECT_NEAR(general, expected, cap * 6e-7) << x;
    }
  }
}

}  // namespace
}  // namespace plait
