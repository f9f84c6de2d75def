// NVRTC without a GPU: where it is looked for, errors as a user sees them, resources, the cache,
// and every shipped configuration without spills. Skipped, with the reason, where there is no
// NVRTC; with PLAIT_TEST_STRICT=1 they fail.
#include "jit/nvrtc.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include "cuda/kernel_choice.h"
#include "cuda/sm90_tiles.h"
#include "cuda/tile_choice.h"
#include "jit/jit.h"
#include "jit/support.h"
#include "required.h"

namespace plait::jit {
namespace {

using testing::bias_variant;
using testing::count_lines;
using testing::error_of;
using testing::ScopedEnvironment;
using testing::start_child;
using testing::wait_for;
using testing::write_text;

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// ---- The search, which needs no NVRTC. ----

TEST(NvrtcSearch, OwnVariableAloneIsTried) {
  const TemporaryDir dir;
  write_text(dir.path() + "/libnvrtc.so.13", "no library");
  for (const std::string& value :
       {dir.path(), dir.path() + "/libnvrtc.so.13", dir.path() + "/none", ":" + dir.path()}) {
    const ScopedEnvironment env({{"PLAIT_NVRTC", value}});
    const NvrtcInfo info = find_nvrtc({"/usr/local/cuda/lib64"}, 0).info;
    EXPECT_FALSE(info.found);
    ASSERT_EQ(info.looked_in.size(), 1u) << joined(info.looked_in);
    expect_contains(info.looked_in[0], "PLAIT_NVRTC=\"" + value + "\": ");
  }
}

// C34 (b): odd values of the toolkit's variable are quoted.
TEST(NvrtcSearch, QuotesTheToolkitVariable) {
  const TemporaryDir dir;
  std::filesystem::create_directory(dir.path() + "/lib64");
  for (const std::string& value : {":" + dir.path(), dir.path() + "/missing", dir.path()}) {
    // A driver of CUDA 11 takes none, so that the search goes through every place.
    const ScopedEnvironment env({{"PLAIT_NVRTC", ""}, {"CUDA_HOME", value}});
    const NvrtcInfo info = find_nvrtc({}, 11).info;
    expect_contains(joined(info.looked_in), "CUDA_HOME=\"" + value + "\": " + value + "/lib64");
  }
}

TEST(NvrtcSearch, ErrorNamesPlacesAndRemedy) {
  const pid_t child = start_child([] {  // the search's result lasts for a process
    const ScopedEnvironment env({{"PLAIT_NVRTC", "/nonexistent/libnvrtc.so.13"}});
    const KernelSource source = assemble_utility("upload", std::nullopt, "UploadCall", 128);
    const std::string error = error_of([&] { compile_cubin(source, "90a"); });
    expect_contains(error, "PLAIT_NVRTC=\"/nonexistent/libnvrtc.so.13\"");
    expect_contains(error, "pip install nvidia-cuda-nvrtc");
    EXPECT_LE(count_lines(error), 15);
    EXPECT_FALSE(nvrtc_info().found);
    return ::testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(wait_for(child), 0);
}

// ---- With NVRTC. ----

// `make test` installs NVRTC's wheel into .venv, of which a C++ program knows nothing.
void search_virtual_environment() {
  const std::string root = std::filesystem::path(__FILE__).parent_path().string() + "/../..";
  std::error_code none;
  for (const auto& python : std::filesystem::directory_iterator(root + "/.venv/lib", none)) {
    add_nvrtc_search_dirs({python.path().string() + "/site-packages"});
  }
}

class Nvrtc : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { search_virtual_environment(); }
  void SetUp() override {
    if (nvrtc_info().found) return;
    const std::string why = "no NVRTC:\n" + joined(nvrtc_info().looked_in);
    if (test::required("PLAIT_TEST_STRICT")) FAIL() << why;
    GTEST_SKIP() << why;
  }
  // A small kernel, fresh for each test: what one has compiled stays in the process's memory.
  static KernelSource fresh() {
    KernelSource source = assemble_utility("upload", std::nullopt, "UploadCall", 128);
    source.text +=
        concat("// ", ::testing::UnitTest::GetInstance()->current_test_info()->name(), "\n");
    return source;
  }
  static KernelSource plain(const Variant& variant) {
    return assemble_attention(cuda::plain_config(Dtype::kBfloat16, 64, 64, Loader::kAffine),
                              variant);
  }
  static std::string error_for(const std::string& second_line) {
    const Variant variant = custom(
        "broken", "Broken",
        "struct Broken {\n" + second_line +
            "\n  PLAIT_HD static float logits_transform(const Params& p, const LogitContext&, "
            "float x) { return x; }\n};\n",
        {});
    return error_of([&] { compile_cubin(plain(variant), "90a"); });
  }
  TemporaryDir cache_;
  ScopedEnvironment env_{{"PLAIT_CACHE_DIR", cache_.path()}, {"PLAIT_JIT_KEEP", ""}};
};

TEST_F(Nvrtc, PrefersTheMajorThatTheDriverTakes) {
  const NvrtcInfo info = find_nvrtc({}, nvrtc_info().major).info;
  EXPECT_FALSE(info.newer_than_driver);
  const NvrtcInfo none_fits = find_nvrtc({}, 11).info;  // still found: it compiles without a GPU
  EXPECT_TRUE(none_fits.found && none_fits.newer_than_driver);
}

TEST_F(Nvrtc, CompilesOnceForAllProcesses) {
  const auto compile = [] {
    const Cubin cubin = compile_cubin(fresh(), "90a");
    if (cubin.bytes.substr(0, 4) !=
            "\x7f"
            "ELF" ||
        cubin.resources.registers < 8)
      return 2;
    return cubin.from_cache ? 1 : 0;
  };
  EXPECT_EQ(wait_for(start_child(compile)), 0);
  EXPECT_EQ(wait_for(start_child(compile)), 1);  // with the resources that it was stored with
  EXPECT_EQ(compile(), 1);
  EXPECT_EQ(compile_cubin_uncached(fresh(), "90a").from_cache, false);
  // Another architecture is another artefact.
  EXPECT_FALSE(compile_cubin(fresh(), "80").from_cache);
}

// A header of the user's is in no key.
TEST_F(Nvrtc, AHeaderOfTheUsersIsReadAnew) {
  const TemporaryDir headers;
  KernelSource source = fresh();
  source.text = concat("#include \"", headers.path(), "/own.h\"\n", source.text,
                       "extern \"C\" __global__ void own(int* to) { *to = OWN; }\n");
  std::string before;
  for (const int constant : {1, 2}) {
    write_text(headers.path() + "/own.h", concat("#define OWN ", constant, "\n"));
    const Cubin cubin = compile_cubin(source, "90a");
    EXPECT_FALSE(cubin.from_cache);
    EXPECT_TRUE(cubin.bytes != before);
    before = cubin.bytes;
  }
  EXPECT_TRUE(std::filesystem::is_empty(cache_.path()));
}

// C33 with cubins: broken artefacts are rebuilt, processes race without harm.
TEST_F(Nvrtc, RebuildsBrokenCubinsInARace) {
  const auto compile = [] {
    return compile_cubin(fresh(), "90a").bytes.substr(0, 4) ==
                   "\x7f"
                   "ELF"
               ? 0
               : 1;
  };
  ASSERT_EQ(wait_for(start_child(compile)), 0);
  std::string path;
  for (const auto& e : std::filesystem::directory_iterator(cache_.path())) path = e.path();
  ASSERT_NE(path, "");
  const std::string whole = *read_file(path);
  for (const std::string& broken :
       {whole.substr(0, whole.size() / 2), std::string(), std::string(whole.size(), 'r')}) {
    write_text(path, broken);
    std::vector<pid_t> children;
    for (int i = 0; i < 4; ++i) children.push_back(start_child(compile));
    for (const pid_t child : children) EXPECT_EQ(wait_for(child), 0);
    EXPECT_GE(read_file(path)->size(), whole.size() - 64);  // its line holds the seconds it took
  }
}

TEST_F(Nvrtc, WorksWithoutACacheFolder) {
  const ScopedEnvironment env({{"PLAIT_CACHE_DIR", "/proc/plait"}});
  EXPECT_FALSE(compile_cubin(fresh(), "86").from_cache);
  EXPECT_TRUE(compile_cubin(fresh(), "86").from_cache);  // of this process
}

// C34 (c)
TEST_F(Nvrtc, ShowsTheUsersOwnLine) {
  const std::string error = error_for("  int x = ;");
  expect_contains(error, "variant 'broken', sm_90a: broken.cuh(2): error: ");
  EXPECT_LE(count_lines(error), 15) << error;
  const size_t at = error.find("full log and source: ");
  ASSERT_NE(at, std::string::npos) << error;
  expect_contains(read_file(error.substr(at + 21)).value_or(""), "int x = ;");
  expect_contains(error_for("  static float f(const Params& p) { return p.slope; }"),
                  "broken.cuh(2)");
}

TEST_F(Nvrtc, NamesAMissingHeader) {
  for (const char* include : {"#include \"not_there.h\"", "#include <not_there.h>"}) {
    const std::string error = error_for(include);
    expect_contains(error, "broken.cuh(2): ");
    expect_contains(error, "the header 'not_there.h' was not found");
    EXPECT_LE(count_lines(error), 15);
  }
}

TEST_F(Nvrtc, UserCodeOnTheGpu) {
  EXPECT_EQ(error_of([] { compile_cubin(plain(bias_variant(1)), "90a"); }), "");
  // PTX, helpers without annotations, parameters by name, two parts and a mask.
  const Variant variant =
      soft_cap(3) | custom("ptx", "Ptx", R"(inline int twice(int x) { return 2 * x; }
struct Ptx {
  PLAIT_HD static bool logits_mask(const Params& p, const LogitContext& c) {
    int lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return twice(c.k_pos) + lane < p.ends[c.request];
  }
};)",
                           {{"ends", VariantParam::kTensor, 0}});
  EXPECT_EQ(error_of([&] { compile_cubin(plain(variant), "90a"); }), "");
}

// Naps are in kernels only where they are asked for, and those are cached apart.
TEST_F(Nvrtc, NapsOnlyWhereAsked) {
  const auto compiled = [] {
    const KernelConfig config = cuda::sm90_config(Dtype::kBfloat16, 64, 64, Loader::kAffine, 16);
    return compile_cubin(assemble_attention(config, full()), "90a").bytes;
  };
  const std::string without = compiled();
  {
    const ScopedEnvironment env({{"PLAIT_JIT_NAPS", "3"}});
    EXPECT_GT(compiled().size(), without.size());
  }
  {
    const ScopedEnvironment env({{"PLAIT_JIT_NAPS", "3; x"}});
    EXPECT_EQ(error_of(compiled), "PLAIT_JIT_NAPS is \"3; x\"; taken is a number below 10^9");
  }
  EXPECT_EQ(compiled(), without);
}

// A kernel made to spill reports it: else the zero of the next test may be blindness.
TEST_F(Nvrtc, SeesSpills) {
  KernelSource source;
  source.name = source.variant_name = "spilling";
  source.entry = "spilling";
  source.text = R"(
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float r[64];
  for (int i = 0; i < 64; ++i) r[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = r[63 - i] * r[i];
})";
  const KernelResources resources = compile_cubin_uncached(source, "90a").resources;
  EXPECT_GT(resources.spill_bytes, 0);
  EXPECT_GT(resources.stack_bytes, 0);
  EXPECT_EQ(resources.registers, 32);
}

// Built-in variants that are compiled on demand, alone and together, on sm_90a.
struct OnDemand {
  const char* name;
  Variant variant;
  bool transforms_rows;
};
class NvrtcVariant : public Nvrtc, public ::testing::WithParamInterface<OnDemand> {};

TEST_P(NvrtcVariant, CompilesWithoutSpills) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "says nothing about host code; the plain build compiles them";
#endif
  std::vector<KernelConfig> configs{cuda::plain_config(Dtype::kFloat16, 128, 128, Loader::kGather),
                                    cuda::plain_config(Dtype::kBfloat16, 40, 40, Loader::kAffine)};
  for (const int max_rows : {64, 128}) {
    for (const Loader loader : {Loader::kAffine, Loader::kPaged, Loader::kGather}) {
      const KernelConfig sm90 = cuda::sm90_config(Dtype::kBfloat16, 128, 128, loader, max_rows);
      configs.push_back(GetParam().transforms_rows ? cuda::with_row_transforms(sm90) : sm90);
    }
  }
  for (const KernelConfig& config : configs) {
    const KernelSource source = assemble_attention(config, GetParam().variant);
    const Cubin cubin = compile_cubin_uncached(source, "90a");
    EXPECT_EQ(cubin.resources.spill_bytes, 0) << source.name;
  }
}
INSTANTIATE_TEST_SUITE_P(
    BuiltIns, NvrtcVariant,
    ::testing::Values(OnDemand{"alibi", alibi(), false},
                      OnDemand{"custom_mask", custom_mask(), false}, OnDemand{"rope", rope(), true},
                      OnDemand{"partial_rope", rope({.interleave = true, .rotary_dim = 32}), true},
                      OnDemand{"norms_and_rope", rms_norm_q() | rms_norm_k() | rope(), true},
                      OnDemand{"bias_and_cap", alibi() | soft_cap(30), false}),
    [](const auto& info) { return info.param.name; });

// Tiles of the sm90 template by name, larger than the one that is chosen.
TEST_F(Nvrtc, LargeSm90TilesCompileWithoutSpills) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "says nothing about host code; the plain build compiles them";
#endif
  const auto expect_no_spills = [](const KernelConfig& config, const Variant& variant) {
    const KernelSource source = assemble_attention(config, variant);
    EXPECT_EQ(compile_cubin_uncached(source, "90a").resources.spill_bytes, 0) << source.name;
  };
  const KernelConfig sm90 = cuda::sm90_config(Dtype::kBfloat16, 128, 128, Loader::kPaged, 128);
  for (const char* tile : {"128x144x2", "128x176x2", "192x80x2", "192x80x3"}) {
    expect_no_spills(cuda::with_tile(sm90, cuda::parse_sm90_tile(tile)), full());
  }
  expect_no_spills(cuda::with_third_warpgroup(cuda::with_row_transforms(sm90), true), rope());
}

// All tiles of the sm80 template, beyond those that are chosen.
TEST_F(Nvrtc, EverySm80TileCompilesWithoutSpills) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "says nothing about host code; the plain build compiles them";
#endif
  for (const int tile_q : {1, 16, 32, 64, 128}) {
    for (const int tile_kv : {32, 64, 128}) {
      const KernelConfig config =
          cuda::forced_tile({"90a", Dtype::kFloat16, 128, 128, Loader::kGather, 1, 1},
                            concat(tile_q, "x", tile_kv, "x1"));
      const KernelSource source = assemble_attention(config, full());
      EXPECT_EQ(compile_cubin_uncached(source, "90a").resources.spill_bytes, 0) << source.name;
    }
  }
}

class NvrtcShipped : public Nvrtc, public ::testing::WithParamInterface<std::string> {};

TEST_P(NvrtcShipped, CompilesWithoutSpills) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "says nothing about host code; the plain build compiles them";
#endif
  for (const CompiledKernel& row : compile_shipped(GetParam())) {
    EXPECT_EQ(row.error, "") << row.kernel;
    EXPECT_EQ(row.spill_bytes, 0) << row.kernel << " sm_" << row.arch;
    EXPECT_GT(row.registers, 0) << row.kernel;
  }
}
INSTANTIATE_TEST_SUITE_P(Architectures, NvrtcShipped, ::testing::ValuesIn(shipped_architectures()),
                         [](const auto& info) { return "sm_" + info.param; });

}  // namespace
}  // namespace plait::jit
