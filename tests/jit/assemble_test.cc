// The embedded texts and what is assembled from them: generated variants are compiled by the host
// compiler and called, so that parameters, order and line numbers are seen to be right.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "cuda/kernel_choice.h"
#include "host_device/variant.h"
#include "jit/embedded.h"
#include "jit/jit.h"
#include "jit/support.h"
#include "jit/texts.h"

namespace plait::jit {
namespace {

using testing::ScopedEnvironment;

const std::string kRoot = std::filesystem::path(__FILE__).parent_path().string() + "/../../";

TEST(Embedded, EveryTextIsItsFile) {
  std::set<std::string> names;
  for (int i = 0; i < kNumEmbeddedFiles; ++i) {
    const EmbeddedFile& file = kEmbeddedFiles[i];
    names.insert(file.name);
    const std::string folder =
        std::string(file.name).starts_with("plait/") ? "include/" : "kernels/";
    EXPECT_TRUE(read_file(kRoot + folder + file.name) == file.text)
        << file.name << " differs from what was built in";
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kRoot + "kernels")) {
    if (entry.is_regular_file() && entry.path().extension() != ".md") {
      const std::string name = std::filesystem::relative(entry.path(), kRoot + "kernels").string();
      EXPECT_TRUE(names.count(name)) << name << " is not embedded";
    }
  }
}

TEST(Texts, ExpandsEachIncludeOnceAndKeepsLines) {
  const std::string text = expand_includes(
      "#include \"host_device/variant.h\"\n#include \"host_device/base.h\"\n#include <vector>\nint "
      "x;\n",
      "top");
  EXPECT_EQ(text.find("#include \"host_device"), std::string::npos);
  EXPECT_NE(text.find("#include <vector>"), std::string::npos);
  const size_t first = text.find("inline constexpr float kLog2e");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(text.find("inline constexpr float kLog2e", first + 1), std::string::npos);
  // After the first include comes line 2 of the text itself.
  EXPECT_NE(text.find("#line 2 \"top\"\n\n#include <vector>\nint x;\n"), std::string::npos);
}

TEST(Texts, TellsIncludesOfOtherFiles) {
  const std::string ours = "#include \"host_device/variant.h\"\n";
  for (const std::string& text : {std::string(), ours, ours + "  #\tinclude\"host_device/row.h\"\n",
                                  ours + "// #include <x>\n", std::string("/*\n#include <x>\n*/\n"),
                                  std::string("#define include_x 1\nint include;\n")}) {
    EXPECT_FALSE(includes_other_files(text)) << text;
  }
  for (const char* line :
       {"#include <x>", "#include<x>", "# include <x>", " #\tinclude \"x\"", "#include\"x\"",
        "#include X", "/* why */ #include <x>", "# /* why */ include <x>", "#include <x>  // y",
        "#include \"host_device/variant.h \"", "#if __has_include(<x>)"}) {
    EXPECT_TRUE(includes_other_files(ours + line + "\nint y;\n")) << line;
    EXPECT_TRUE(includes_other_files(line)) << line;
  }
}

// Compiles `variant` with entry points for what a test asks, on the host.
template <class Function>
Function* compile(const Variant& variant, const std::string& entry) {
  const std::string text = variant_source(variant) + R"(
namespace plait {
#define EXPORT extern "C" __attribute__((visibility("default")))
template <class V>
float logit_of(const typename V::Params& p, const LogitContext& c, float x) {
  if constexpr (VariantTraits<V>::kHasLogitsTransform) x = V::logits_transform(p, c, x);
  if constexpr (VariantTraits<V>::kHasLogitsMask) x = V::logits_mask(p, c) ? x : kNegInf;
  return x;
}
EXPORT float logit(const void* p, const LogitContext* c, float x) {
  return logit_of<Variant>(*static_cast<const Variant::Params*>(p), *c, x);
}
EXPORT int traits() {
  using T = VariantTraits<Variant>;
  return T::kUseSoftmax | T::kHasKeyTransform << 1 | T::kHasLogitsTransform << 2 |
         T::kHasLogitsMask << 3 | T::kHasOutputTransform << 4;
}
}
)";
  return reinterpret_cast<Function*>(compile_host(text, entry, variant.name()));
}
using Logit = float(const void*, const LogitContext*, float);
using Traits = int();

union Slot {
  float number;
  int integer;
  const float* tensor;
  unsigned long long bits = 0;
};

class Assemble : public ::testing::Test {
 protected:
  TemporaryDir cache_;
  ScopedEnvironment env_{{"PLAIT_CACHE_DIR", cache_.path()}};
};

TEST_F(Assemble, StandardHasNoFunctors) {
  EXPECT_EQ(compile<Traits>(causal(), "traits")(), 1);
  LogitContext c{};
  Slot none;
  EXPECT_EQ(compile<Logit>(causal(), "logit")(&none, &c, 2.5f), 2.5f);
}

TEST_F(Assemble, SoftCapTakesItsParameterFromASlot) {
  Slot slot{.number = 2.0f};
  LogitContext c{};
  EXPECT_NEAR(compile<Logit>(soft_cap(9), "logit")(&slot, &c, 3.0f), 2 * std::tanh(1.5), 1e-6);
  EXPECT_EQ(compile<Traits>(soft_cap(9), "traits")(), 1 | 4);
}

const char* kAlibi = R"(// slopes by head
#include <cmath>
struct Alibi {
  static float slope(const Params& p, int head) { return p.slopes[head]; }
  PLAIT_HD static float logits_transform(const Params& p, const LogitContext& c, float x) {
    return p.scale * x + slope(p, c.qo_head) * std::fabs(float(c.k_pos - c.q_pos)) + p.shift;
  }
};
)";
Variant alibi(bool use_softmax = true) {
  return custom("alibi", "Alibi", kAlibi,
                {{"scale", VariantParam::kFloat, 1},
                 {"slopes", VariantParam::kTensor, 0},
                 {"shift", VariantParam::kInt, 0}},
                use_softmax);
}
const char* kEven = R"(struct Even {
  PLAIT_HD static bool logits_mask(const Params&, const LogitContext& c) {
    return c.k_pos % 2 == 0;
  }
};)";
const char* kBelow = R"(struct Below {
  PLAIT_HD static bool logits_mask(const Params& p, const LogitContext& c) {
    return c.k_pos < p.end;
  }
};)";

TEST_F(Assemble, UserParametersArriveByName) {
  const float slopes[2] = {10, 100};
  const Slot slots[3] = {{.number = 2}, {.tensor = slopes}, {.integer = 7}};
  LogitContext c{};
  c.q_pos = 5;
  c.k_pos = 2;
  c.qo_head = 1;
  EXPECT_EQ(compile<Logit>(alibi(), "logit")(slots, &c, 1.5f), 2 * 1.5f + 100 * 3 + 7);
  EXPECT_EQ(compile<Traits>(alibi(false), "traits")(), 4);
}

// Three parts, one of them without parameters in the middle: it must take no slot.
TEST_F(Assemble, PartsKeepTheirSlotsWhenCombined) {
  const Variant variant = soft_cap(1) | custom("even", "Even", kEven, {}) |
                          custom("below", "Below", kBelow, {{"end", VariantParam::kInt, 0}});
  const Slot slots[2] = {{.number = 4}, {.integer = 5}};
  Logit* logit = compile<Logit>(variant, "logit");
  EXPECT_EQ(compile<Traits>(variant, "traits")(), 1 | 4 | 8);
  for (int k = 0; k < 8; ++k) {
    LogitContext c{};
    c.k_pos = k;
    const bool seen = k % 2 == 0 && k < 5;
    const float x = logit(slots, &c, 3.0f);
    if (seen) {
      EXPECT_NEAR(x, 4 * std::tanh(0.75), 1e-6);
    } else {
      EXPECT_EQ(x, kNegInf);
    }
  }
}

// Both change the logit: in the order written.
TEST_F(Assemble, TransformsFollowOneAnother) {
  const float slopes[2] = {0, 0.5f};
  const LogitContext c{.request = 0, .q_pos = 9, .k_pos = 3, .qo_head = 1, .kv_head = 0};
  const Slot cap_first[2] = {{.number = 4}, {.tensor = slopes}};
  const Slot alibi_first[2] = {{.tensor = slopes}, {.number = 4}};
  EXPECT_NEAR(compile<Logit>(soft_cap(1) | plait::alibi(), "logit")(cap_first, &c, 3.0f),
              4 * std::tanh(0.75) - 3, 1e-5);
  EXPECT_NEAR(compile<Logit>(plait::alibi() | soft_cap(1), "logit")(alibi_first, &c, 3.0f), 0,
              1e-5);
}

TEST_F(Assemble, RowTransformsAreForwarded) {
  const Variant keys = custom("scale_keys", "ScaleKeys", R"(struct ScaleKeys {
    template <class Row>
    PLAIT_HD static void key_transform(const Params& p, const RowContext& c, Row& row) {
      row.map([&](int i, float x) { return x * p.factor; });
    }
  };)",
                              {{"factor", VariantParam::kFloat, 0}});
  EXPECT_EQ(compile<Traits>(keys, "traits")(), 1 | 2);
  EXPECT_EQ(compile<Traits>(soft_cap(2) | keys, "traits")(), 1 | 2 | 4);
}

TEST_F(Assemble, WrongSignaturesGetOneLine) {
  const Variant wrong = custom("wrong", "Wrong", R"(struct Wrong {
    PLAIT_HD static float logits_transform(const Params&, float x) { return x; }
  };)",
                               {});
  const std::string error = testing::error_of([&] { compile<Traits>(wrong, "traits"); });
  EXPECT_NE(error.find("write it as: PLAIT_HD static float logits_transform(const Params& p, const "
                       "LogitContext& c, float logit)"),
            std::string::npos)
      << error;
  const Variant lost =
      custom("lost", "Lost", "struct Lost {};\nPLAIT_HD bool logits_mask(int);", {});
  EXPECT_NE(
      testing::error_of([&] { compile<Traits>(lost, "traits"); }).find("no functor is a member"),
      std::string::npos);
  const Variant disagrees = custom("disagrees", "Disagrees",
                                   "struct Disagrees { static constexpr bool kUseSoftmax = false;\n"
                                   "PLAIT_HD static bool logits_mask(const Params&, const "
                                   "LogitContext&) { return true; } };",
                                   {});
  EXPECT_NE(
      testing::error_of([&] { compile<Traits>(disagrees, "traits"); }).find("kUseSoftmax differs"),
      std::string::npos);
}

TEST(AssembleKernel, VisibilityIsNoPartOfTheSource) {
  const KernelConfig config = cuda::plain_config(Dtype::kFloat32, 64, 64, Loader::kAffine);
  EXPECT_EQ(assemble_attention(config, causal()).text, assemble_attention(config, full()).text);
  EXPECT_NE(assemble_attention(config, soft_cap(2)).text, assemble_attention(config, full()).text);
  // The parameter's value is not in it either.
  EXPECT_EQ(assemble_attention(config, soft_cap(2)).text,
            assemble_attention(config, soft_cap(3)).text);
}

TEST(AssembleKernel, ShippedListIsSmallAndNamesAreUnique) {
  for (const std::string& arch : shipped_architectures()) {
    std::set<std::string> names, texts;
    const std::vector<KernelSource> kernels = shipped_kernels(arch);
    EXPECT_LE(kernels.size(), 80u);
    for (const KernelSource& kernel : kernels) {
      EXPECT_TRUE(names.insert(kernel.name).second) << kernel.name;
      EXPECT_TRUE(texts.insert(kernel.text).second) << kernel.name;
    }
  }
  EXPECT_NE(
      testing::error_of([] { shipped_kernels("70"); }).find("arch is '70', but plait ships 75, "),
      std::string::npos);
}

}  // namespace
}  // namespace plait::jit
