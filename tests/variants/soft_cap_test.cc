// Soft cap against tanh in float64, in each of its forms.
#include "host_device/variants/soft_cap.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace plait {
namespace {

TEST(SoftCap, IsTanhInEveryForm) {
  LogitContext exact{}, short_products{}, wgmma{};
  short_products.dtype = wgmma.dtype = Dtype::kBfloat16;
  wgmma.on_wgmma = true;
  for (const float cap : {1.0f, 30.0f, 50.0f}) {
    double worst[3] = {};
    for (int i = -4000; i <= 4000; ++i) {
      const float x = std::ldexp(static_cast<float>(i), i % 13 - 9) * cap * 0.01f;
      const double want = cap * std::tanh(static_cast<double>(x) / cap);
      int form = 0;
      for (const LogitContext& c : {exact, short_products, wgmma}) {
        const double got = SoftCap::logits_transform({cap}, c, x);
        worst[form] = std::max(worst[form], std::abs(got - want) / cap);
        ++form;
      }
    }
    EXPECT_LT(worst[0], 3e-7);
    EXPECT_LT(worst[1], 1e-6);
    EXPECT_LT(worst[2], 4e-6);
  }
  const float inf = std::numeric_limits<float>::infinity();
  for (const LogitContext& c : {exact, short_products, wgmma}) {
    EXPECT_NEAR(SoftCap::logits_transform({30}, c, inf), 30, 1.2e-4);
    EXPECT_NEAR(SoftCap::logits_transform({30}, c, -inf), -30, 1.2e-4);
    EXPECT_TRUE(std::isnan(SoftCap::logits_transform({30}, c, std::nanf(""))));
  }
}

}  // namespace
}  // namespace plait
