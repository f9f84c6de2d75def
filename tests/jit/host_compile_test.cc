// Custom variants by the host compiler: errors as a user sees them, and processes that share a
// cache folder (C33, C34).
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "jit/jit.h"
#include "jit/support.h"

namespace plait::jit {
namespace {

using testing::bias_variant;
using testing::count_lines;
using testing::error_of;
using testing::ScopedEnvironment;
using testing::start_child;
using testing::wait_for;
using testing::write_script;
using testing::write_text;

// The logit of 1 under `variant` whose one parameter is 0.5.
float logit_of_one(const Variant& variant) {
  const std::string text = variant_source(variant) +
                           "extern \"C\" __attribute__((visibility(\"default\")))\n"
                           "float entry(const void* p) {\n"
                           "  return plait::Variant::logits_transform(\n"
                           "    *static_cast<const plait::Variant::Params*>(p), {}, 1.0f);\n"
                           "}\n";
  alignas(8) float parameter[2] = {0.5f, 0};
  return reinterpret_cast<float (*)(const void*)>(compile_host(text, "entry", variant.name()))(
      parameter);
}

Variant broken_variant(const std::string& second_line) {
  return custom(
      "broken", "Broken",
      "struct Broken {\n" + second_line +
          "\n  PLAIT_HD static float logits_transform(const Params&, const LogitContext&, "
          "float x) { return x; }\n};\n",
      {});
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

class HostCompile : public ::testing::Test {
 protected:
  int num_artefacts() const {
    int n = 0;
    for (const auto& e : std::filesystem::directory_iterator(cache_.path())) {
      n += e.path().extension() == ".so";
    }
    return n;
  }
  std::string artefact() const {
    for (const auto& e : std::filesystem::directory_iterator(cache_.path())) {
      if (e.path().extension() == ".so") return e.path().string();
    }
    return "";
  }
  TemporaryDir cache_;
  ScopedEnvironment env_{{"PLAIT_CACHE_DIR", cache_.path()}, {"PLAIT_JIT_KEEP", ""}};
};

TEST_F(HostCompile, CompilesOnceAndStoresTheArtefact) {
  EXPECT_EQ(logit_of_one(bias_variant(3)), 4.5f);
  EXPECT_EQ(num_artefacts(), 1);
  EXPECT_EQ(logit_of_one(bias_variant(3)), 4.5f);
  EXPECT_EQ(num_artefacts(), 1);
  EXPECT_EQ(logit_of_one(bias_variant(4)), 5.5f);
  EXPECT_EQ(num_artefacts(), 2);
}

// A second process takes the artefact without any compiler to build one.
TEST_F(HostCompile, AnotherProcessNeedsNoCompile) {
  const std::string real = host_compiler_info().command;
  const std::string script = write_script(
      cache_.path() + "/cxx", "case \"$*\" in *--version*) " + real + " --version;; *) echo x >> " +
                                  cache_.path() + "/runs; exec " + real + " \"$@\";; esac\n");
  const ScopedEnvironment env({{"PLAIT_CXX", script}});
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(wait_for(start_child([] { return logit_of_one(bias_variant(3)) == 4.5f ? 0 : 1; })),
              0);
  }
  EXPECT_EQ(read_file(cache_.path() + "/runs"), "x\n");
}

// No key holds what a header of the user's says: an edit must not meet the artefact before it.
TEST_F(HostCompile, AHeaderOfTheUsersIsReadAnew) {
  const TemporaryDir headers;
  const std::string header = headers.path() + "/bias.h";
  for (const char* include : {"#include \"", "# include\""}) {
    for (const int constant : {1, 2}) {
      write_text(header, concat("#define CONSTANT ", constant, "\n"));
      const Variant variant = custom(
          "bias", "Bias",
          concat(
              include, header,
              "\"\nstruct Bias {\n  PLAIT_HD static float logits_transform(const Params& p, const "
              "LogitContext&, float x) { return x + p.bias + CONSTANT; }\n};\n"),
          {{"bias", VariantParam::kFloat, 0}});
      EXPECT_EQ(logit_of_one(variant), 1.5f + constant);
    }
  }
  EXPECT_EQ(num_artefacts(), 0);
}

TEST_F(HostCompile, WorksWithoutACacheFolder) {
  const ScopedEnvironment env(
      {{"PLAIT_CACHE_DIR", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", "/proc/none"}});
  EXPECT_EQ(logit_of_one(bias_variant(5)), 6.5f);
  EXPECT_EQ(num_artefacts(), 0);
}

// C33: an artefact that is cut, empty or random is found out and rebuilt by the next process.
TEST_F(HostCompile, RebuildsABrokenArtefact) {
  const auto run = [] { return logit_of_one(bias_variant(6)) == 7.5f ? 0 : 1; };
  ASSERT_EQ(wait_for(start_child(run)), 0);
  const std::string path = artefact(), whole = *read_file(path);
  for (const std::string& broken :
       {whole.substr(0, whole.size() / 2), std::string(), std::string(whole.size(), '\x5b')}) {
    write_text(path, broken);
    EXPECT_EQ(wait_for(start_child(run)), 0);
    EXPECT_EQ(read_file(path)->size(), whole.size());
  }
}

// C33: 8 processes, one empty folder, the same fresh variant, 10 rounds.
TEST_F(HostCompile, ProcessesShareAFolder) {
  for (int round = 0; round < 10; ++round) {
    const int constant = 100 + round;
    std::vector<pid_t> children;
    for (int i = 0; i < 8; ++i) {
      children.push_back(start_child(
          [&] { return logit_of_one(bias_variant(constant)) == 1.5f + constant ? 0 : 1; }));
    }
    if (round == 5) std::filesystem::remove_all(cache_.path());  // while they run
    for (const pid_t child : children) EXPECT_EQ(wait_for(child), 0) << "round " << round;
  }
  for (const auto& entry : std::filesystem::directory_iterator(cache_.path())) {
    EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
  }
}

// C33: a process killed in the middle of its build blocks nobody and leaves nothing that is taken
// for an artefact.
TEST_F(HostCompile, AKilledBuilderBlocksNobody) {
  const std::string real = host_compiler_info().command;
  const std::string started = cache_.path() + "/started";
  const std::string script = write_script(
      cache_.path() + "/cxx", "case \"$*\" in *--version*) " + real + " --version;; *) if [ -e " +
                                  started + " ]; then exec " + real + " \"$@\"; fi; echo > " +
                                  started + "; sleep 600;; esac\n");
  const ScopedEnvironment env({{"PLAIT_CXX", script}});
  const auto run = [] { return logit_of_one(bias_variant(7)) == 8.5f ? 0 : 1; };
  const pid_t victim = start_child([&] {
    setpgid(0, 0);
    return run();
  });
  setpgid(victim, victim);
  while (!is_readable(started)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  kill(-victim, SIGKILL);  // with its compiler
  EXPECT_EQ(wait_for(victim), -SIGKILL);
  EXPECT_EQ(num_artefacts(), 0);
  const auto before = std::chrono::steady_clock::now();
  EXPECT_EQ(wait_for(start_child(run)), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(20));
  EXPECT_EQ(num_artefacts(), 1);
}

// C34 (a), (b): what was looked for, where, and what to set.
TEST_F(HostCompile, SaysWhatItLookedFor) {
  {
    const ScopedEnvironment env({{"PLAIT_CXX", "/nonexistent/c++"}});
    const std::string error = error_of([] { logit_of_one(bias_variant(8)); });
    expect_contains(error, "PLAIT_CXX=\"/nonexistent/c++\": /nonexistent/c++: No such file");
    expect_contains(error, "variant 'bias'");
    EXPECT_LE(count_lines(error), 15);
  }
  const ScopedEnvironment env({{"PLAIT_CXX", ""}, {"CXX", ":/folder"}, {"PATH", "/nonexistent"}});
  const std::string error = error_of([] { logit_of_one(bias_variant(8)); });
  for (const char* part :
       {":/folder: No such file", "c++: No", "g++: No", "clang++: No", "set PLAIT_CXX"}) {
    expect_contains(error, part);
  }
}

// C34 (c)
TEST_F(HostCompile, ShowsTheUsersOwnLine) {
  const std::string error = error_of([] { logit_of_one(broken_variant("  int x = ;")); });
  expect_contains(error, "variant 'broken', CPU: broken.cuh(2): error: ");
  EXPECT_LE(count_lines(error), 15) << error;
  const size_t at = error.find("full log and source: ");
  ASSERT_NE(at, std::string::npos) << error;
  const auto log = read_file(error.substr(at + 21));
  ASSERT_TRUE(log) << error;
  expect_contains(*log, "int x = ;");
}

TEST_F(HostCompile, NamesAMissingHeader) {
  const std::string error =
      error_of([] { logit_of_one(broken_variant("#include \"not_there.h\"")); });
  expect_contains(error, "broken.cuh(2): fatal error: ");
  expect_contains(error, "the header 'not_there.h' was not found");
  EXPECT_LE(count_lines(error), 15);
}

TEST_F(HostCompile, TellsAKilledCompilerFromAnError) {
  const std::string direct = write_script(
      cache_.path() + "/direct", "case \"$*\" in *--version*) echo 1;; *) kill -9 $$;; esac\n");
  const std::string below = write_script(
      cache_.path() + "/below",
      "case \"$*\" in *--version*) echo 1;; *) echo 'g++: fatal error: Killed signal terminated "
      "program cc1plus' >&2; exit 1;; esac\n");
  for (const std::string& script : {direct, below}) {
    const ScopedEnvironment env({{"PLAIT_CXX", script}});
    const std::string error = error_of([] { logit_of_one(bias_variant(9)); });
    expect_contains(error, "was killed by");
    expect_contains(error, "memory");
  }
  // A failure is not remembered: the next call compiles.
  EXPECT_EQ(logit_of_one(bias_variant(9)), 10.5f);
}

TEST_F(HostCompile, RefusesPtxByName) {
  const std::string error =
      error_of([] { logit_of_one(broken_variant("  static void f() { asm(\"mov\"); }")); });
  expect_contains(error, "variant 'broken', CPU: broken.cuh(2): asm is PTX text");
  EXPECT_EQ(
      logit_of_one(broken_variant("#if defined(__CUDA_ARCH__)\n  static void f() { asm(\"mov\"); "
                                  "}\n#endif")),
      1.0f);
}

TEST_F(HostCompile, KeepsSourcesOnRequest) {
  const TemporaryDir keep;
  const ScopedEnvironment env({{"PLAIT_JIT_KEEP", keep.path() + "/kept"}});
  logit_of_one(bias_variant(11));
  int num_sources = 0;
  for (const auto& e : std::filesystem::directory_iterator(keep.path() + "/kept")) {
    num_sources += e.path().extension() == ".cc";
  }
  EXPECT_EQ(num_sources, 1);
  const std::string error = error_of([] { logit_of_one(broken_variant("  int x = ;")); });
  expect_contains(error, keep.path() + "/kept/");
}

}  // namespace
}  // namespace plait::jit
