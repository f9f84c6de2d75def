// Parameters of a variant, from names and values to the 8-byte slots of a launch.
#include "variant_args.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "formats/tensors.h"

namespace plait {
namespace {

using test::Floats;

float as_float(unsigned long long slot) {
  const auto bits = static_cast<unsigned>(slot);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

class Slots : public ::testing::Test {
 protected:
  Variant variant;
  Floats slopes = Floats::list({1, 2, 3});
  void SetUp() override {
    variant.parts.push_back({"bias",
                             "Bias",
                             "struct Bias {};",
                             {{"slope", VariantParam::kTensor, 0},
                              {"gain", VariantParam::kFloat, 0.25},
                              {"first", VariantParam::kInt, -3}}});
    variant.parts.push_back({"soft_cap", "SoftCap", "", {{"cap", VariantParam::kFloat, 50}}});
  }
  std::string refused(const std::vector<VariantArg>& args) {
    return test::refusal([&] { VariantSlots(variant).with(args, {}); });
  }
};

TEST_F(Slots, PlannedAndGivenValues) {
  const VariantSlots slots(variant);
  auto values = slots.with({{"slope", 0, slopes.view()}}, {});
  ASSERT_EQ(values.size(), 4u);
  EXPECT_EQ(values[0], reinterpret_cast<uintptr_t>(slopes.data().data()));
  EXPECT_EQ(as_float(values[1]), 0.25f);
  EXPECT_EQ(static_cast<int>(static_cast<unsigned>(values[2])), -3);
  EXPECT_EQ(as_float(values[3]), 50.0f);
  values = slots.with({{"cap", 20, {}}, {"slope", 0, slopes.view()}, {"first", 7, {}}}, {});
  EXPECT_EQ(static_cast<int>(static_cast<unsigned>(values[2])), 7);
  EXPECT_EQ(as_float(values[3]), 20.0f);
  values = slots.with({{"slope", 0, slopes.view()}}, {});  // a run's values are that run's alone
  EXPECT_EQ(as_float(values[3]), 50.0f);
}

TEST_F(Slots, Refusals) {
  const VariantArg slope{"slope", 0, slopes.view()};
  EXPECT_EQ(
      refused({}),
      "run: parameter 'slope' of variant 'bias' is a tensor and has no value; give it to run()");
  EXPECT_EQ(
      refused({slope, {"slopes", 1, {}}}),
      "run: variant 'bias|soft_cap' has no parameter 'slopes'; it has: slope, gain, first, cap");
  EXPECT_EQ(refused({slope, slope}), "run: parameter 'slope' is given twice");
  EXPECT_EQ(refused({{"slope", 2, {}}}),
            "run: parameter 'slope' of variant 'bias' must be a tensor; a number is given");
  EXPECT_EQ(refused({slope, {"gain", 0, slopes.view()}}),
            "run: parameter 'gain' of variant 'bias' must be a number; it is float32[3] on cpu");
  EXPECT_EQ(refused({slope, {"gain", std::numeric_limits<double>::quiet_NaN(), {}}}),
            "run: parameter 'gain' of variant 'bias' is nan; it must be finite");
  EXPECT_EQ(refused({slope, {"gain", 1e300, {}}}),
            "run: parameter 'gain' of variant 'bias' is 1e+300, which is no float32");
  EXPECT_EQ(refused({slope, {"first", 0.5, {}}}),
            "run: parameter 'first' of variant 'bias' is 0.5; it must be an int32");
  EXPECT_EQ(refused({slope, {"cap", 0, {}}}),
            "run: parameter 'cap' of variant 'soft_cap' is 0; it must be > 0 and no denormal");
  Floats strided = Floats::list({1, 2}, 2);
  EXPECT_EQ(refused({{"slope", 0, strided.view()}}),
            "run: parameter 'slope' of variant 'bias' has stride 2 in dimension 0; it must be "
            "contiguous, 1");
  test::HostTensor<double> doubles = test::HostTensor<double>::list({1});
  EXPECT_EQ(refused({{"slope", 0, doubles.view()}}),
            "run: slope is float64[1] on cpu; its dtype must be float32");
}

}  // namespace
}  // namespace plait
