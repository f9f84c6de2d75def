// Variants: visibility of combinations, what is refused and with which words.
#include "plait/variant.h"

#include <gtest/gtest.h>

#include "host_device/visibility.h"
#include "jit/jit.h"
#include "jit/support.h"
#include "variants/functors.h"

namespace plait {
namespace {

using testing::error_of;

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

Variant with_text(const std::string& text, std::vector<VariantParam> params = {}) {
  return custom("mine", "Mine", text, std::move(params));
}
const char* kTransform =
    "struct Mine { PLAIT_HD static float logits_transform(const Params&, const LogitContext&, "
    "float "
    "x) { return x; } };";
const char* kMask =
    "struct Mask { PLAIT_HD static bool logits_mask(const Params&, const LogitContext& c) { return "
    "c.k_pos != 3; } };";

TEST(Variant, Names) {
  EXPECT_EQ(full().name(), "full");
  EXPECT_EQ((causal() | soft_cap(30)).name(), "causal|soft_cap");
  EXPECT_EQ((full() | sliding_window(4)).name(), "sliding_window");
}

// A combination shows exactly the keys that both sides show, or is refused.
TEST(Variant, CombinedVisibilityIsTheIntersection) {
  std::vector<Variant> all = {full(), causal()};
  for (const int window : {0, 1, 3, 7}) {
    for (const int sinks : {0, 1, 4}) all.push_back(sliding_window(window, sinks));
  }
  int num_refused = 0;
  for (const Variant& a : all) {
    for (const Variant& b : all) {
      Visibility both;
      try {
        both = (a | b).visible;
      } catch (const ArgumentError& error) {
        expect_contains(error.what(), "sink");
        ++num_refused;
        continue;
      }
      for (int q = 0; q < 20; ++q) {
        for (int k = 0; k < 20; ++k) {
          ASSERT_EQ(visible(both, q, k), visible(a.visible, q, k) && visible(b.visible, q, k))
              << a.name() << " | " << b.name() << " at " << q << ", " << k;
        }
      }
    }
  }
  // Narrow window with more sinks than the wide one: 6 pairs of windows, 3 of sinks, both orders.
  EXPECT_EQ(num_refused, 36);
}

TEST(Variant, RefusesNonsense) {
  expect_contains(error_of([] { sliding_window(-2); }), "window_left is -2");
  expect_contains(error_of([] { sliding_window(2, -1); }), "sink_tokens is -1");
  for (const float cap : {0.0f, -1.0f, 1e-40f, kInf, __builtin_nanf("")}) {
    expect_contains(error_of([&] { soft_cap(cap); }), "must be finite and > 0");
  }
  expect_contains(error_of([] { soft_cap(3) | soft_cap(4); }), "stands twice");
  const Variant sigmoid = custom("mask", "Mask", kMask, {}, false);
  expect_contains(error_of([&] { with_text(kTransform) | sigmoid; }), "'mine' | 'mask': mine uses");
  EXPECT_NO_THROW(causal() | sigmoid);
  EXPECT_FALSE((soft_cap(3) | sigmoid).use_softmax());  // built-ins go with either
  EXPECT_FALSE((sigmoid | custom_mask()).use_softmax());
  EXPECT_TRUE((soft_cap(3) | alibi()).use_softmax());
  EXPECT_TRUE((causal() | custom_mask()).custom_mask());
  EXPECT_FALSE((causal() | alibi()).custom_mask());
  expect_contains(error_of([] { rope() | rope({.theta = 5}); }), "'rope' stands twice");
  expect_contains(error_of([] { rope({.theta = 0}); }), "theta is 0");
  expect_contains(error_of([] { rope({.scale = kInf}); }), "scale is inf");
  expect_contains(error_of([] { rope({.rotary_dim = 12}); }), "rotary_dim is 12");
  expect_contains(error_of([] { rope({.low_freq_factor = 4}); }), "low_freq_factor is 4 and high");
  expect_contains(error_of([] { rope({.old_context_len = -1}); }), "old_context_len is -1");
  expect_contains(error_of([] { rms_norm_k(0); }), "rms_norm_k: eps is 0");
  const Variant mask = custom("mask", "Mask", kMask, {{"cap", VariantParam::kFloat, 0}});
  expect_contains(error_of([&] { soft_cap(3) | mask; }), "both have a parameter 'cap'");
}

TEST(Variant, TwoMasksCombine) {
  std::string text = kMask;
  const Variant a = custom("mask", "Mask", text, {});
  const Variant b = custom("other_mask", "Mask", text, {});
  EXPECT_EQ((a | b).parts.size(), 2u);
}

TEST(Variant, ChecksCustomSources) {
  expect_contains(error_of([] { with_text("struct Mine {};"); }),
                  "variant 'mine': the source defines none of the functors query_transform");
  expect_contains(error_of([] { with_text("struct Yours {};"); }), "does not define struct Mine");
  expect_contains(
      error_of([] { with_text("struct Mine {\n static float logit_transform(float x); };"); }),
      "line 2 of the source has logit_transform(), which is no functor; is logits_transform "
      "meant?");
  expect_contains(
      error_of([] { with_text(std::string("struct Mine;\nstruct Params {};") + kTransform); }),
      "line 2 of the source defines struct Params");
  expect_contains(error_of([] {
                    with_text(kTransform, {{"2x", VariantParam::kFloat, 0}});
                  }),
                  "parameter 0 is named '2x'");
  expect_contains(error_of([] {
                    with_text(kTransform, {{"class", VariantParam::kFloat, 0}});
                  }),
                  "named 'class'");
  expect_contains(
      error_of([] {
        with_text(kTransform, {{"a", VariantParam::kFloat, 0}, {"a", VariantParam::kInt, 0}});
      }),
      "parameters 0 and 1 are both named 'a'");
  expect_contains(error_of([] { custom("a b", "Mine", kTransform, {}); }), "variant 'a b'");
  expect_contains(error_of([] { custom("mine", "struct", kTransform, {}); }),
                  "struct_name 'struct'");
  // A functor in a comment or a string is none.
  expect_contains(error_of([] { with_text("struct Mine { /* logits_mask( */ };"); }), "none of");
  expect_contains(error_of([] { with_text("struct Mine { };  // logits_mask("); }), "none of");
}

TEST(Variant, FunctorsOfParts) {
  EXPECT_EQ(jit::functors_of(soft_cap(3).parts[0]), std::vector<std::string>{"logits_transform"});
  EXPECT_TRUE(jit::functors_of(custom_mask().parts[0]).empty());
  EXPECT_EQ(jit::functors_of(rope().parts[0]),
            (std::vector<std::string>{"query_transform", "key_transform"}));
  EXPECT_EQ(functors_in("void key_transform (int); bool logits_mask(int); // query_transform("),
            (std::vector<std::string>{"key_transform", "logits_mask"}));
}

TEST(Functors, FindsPtxUnlessGuarded) {
  EXPECT_EQ(line_of_ptx("int f();\nvoid g() { asm(\"x\"); }"), 2);
  EXPECT_EQ(line_of_ptx("// asm(\nint asm_count; const char* s = \"asm\";"), 0);
  EXPECT_EQ(line_of_ptx("#if defined(__CUDA_ARCH__)\nasm(\"x\");\n#endif"), 0);
}

}  // namespace
}  // namespace plait
