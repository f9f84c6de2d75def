// Costs that somebody measured in place of those shipped: which kernel takes which, and how they
// are scaled to its shapes.
#include "cuda/cost_model.h"

#include <gtest/gtest.h>

#include "cuda/kernel_choice.h"
#include "cuda/tile_choice.h"
#include "plait/attention.h"

namespace plait::cuda {
namespace {

const KernelCost kTuned{{5, 2}, {0.02f, 0.01f}, 3, 0};

KernelConfig sm80_of(long long rows, int head_dim, Dtype dtype_kv = Dtype::kBfloat16) {
  return choose_tiles({.arch = "80",
                       .dtype = Dtype::kBfloat16,
                       .head_dim_qk = head_dim,
                       .head_dim_vo = head_dim,
                       .loader = Loader::kAffine,
                       .average_rows = rows,
                       .most_rows = rows,
                       .dtype_kv = dtype_kv,
                       .transforms_kv = false});
}

TEST(CostModel, KindsAreThoseOfTheBounds) {
  const auto sm90 = [](long long rows) {
    return sm90_config(Dtype::kBfloat16, 128, 128, Loader::kPaged, rows);
  };
  EXPECT_STREQ(kernel_kind(sm90(4)), "sm90 decode");
  EXPECT_STREQ(kernel_kind(sm90(4096)), "sm90 mixed");
  EXPECT_STREQ(kernel_kind(with_third_warpgroup(sm90(4096), false)), "sm90 wide");
  EXPECT_STREQ(kernel_kind(sm80_of(4, 128)), "sm80");
  EXPECT_STREQ(kernel_kind(plain_config(Dtype::kFloat32, 64, 64, Loader::kAffine)), "plain");
}

TEST(CostModel, TunedCostsOfSm90AreScaledAsThoseShipped) {
  for (const int head_dim : {64, 128, 192}) {
    for (const long long rows : {4LL, 4096LL}) {
      const KernelConfig config =
          sm90_config(Dtype::kBfloat16, head_dim, head_dim, Loader::kPaged, rows);
      const KernelCost& same = config.ctas_per_sm > 1 ? kSm90DecodeCost : kSm90MixedCost;
      const KernelCost shipped = cost_of(config), again = cost_of(config, &same);
      for (int i = 0; i < config.num_shapes; ++i) {
        EXPECT_EQ(shipped.fixed_us[i], again.fixed_us[i]);
        EXPECT_EQ(shipped.us_per_key[i], again.us_per_key[i]);
      }
      EXPECT_EQ(shipped.merge_us, again.merge_us);
      const KernelCost tuned = cost_of(config, &kTuned);
      EXPECT_FLOAT_EQ(tuned.us_per_key[0], 0.02f * head_dim / 128);
      EXPECT_EQ(tuned.fixed_us[0], 5);
      EXPECT_EQ(tuned.merge_us, 3);
      EXPECT_EQ(tuned.min_split_keys, shipped.min_split_keys);
    }
  }
}

TEST(CostModel, TunedCostsOfSm80AreOfRowsAndBytes) {
  for (const int head_dim : {64, 128}) {
    for (const long long rows : {4LL, 64LL, 4096LL}) {
      const KernelConfig config = sm80_of(rows, head_dim);
      const KernelCost tuned = cost_of(config, &kTuned);
      for (int i = 0; i < config.num_shapes; ++i) {
        const int tile_q = config.shapes[i].tile_q;
        const float one = tile_q > 32 ? 0.02f * tile_q / 128 : 0.01f;
        EXPECT_FLOAT_EQ(tuned.us_per_key[i], one * head_dim / 128 * config.ctas_per_sm);
        EXPECT_EQ(tuned.fixed_us[i], tile_q > 32 ? 5 : 2);
      }
      EXPECT_EQ(tuned.merge_us, 3);
      EXPECT_EQ(tuned.min_split_keys, cost_of(config).min_split_keys);
    }
  }
  const KernelConfig fp8 = sm80_of(4, 128, Dtype::kE4m3);
  EXPECT_FLOAT_EQ(cost_of(fp8, &kTuned).us_per_key[0], 0.005f * fp8.ctas_per_sm);
}

}  // namespace
}  // namespace plait::cuda
