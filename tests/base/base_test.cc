// Hashing against published values, files, subprocesses, the environment's table.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>

#include "base/environment.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/subprocess.h"
#include "jit/support.h"
#include "plait/jit.h"

namespace plait {
namespace {

TEST(Hash, SeparatesPieces) {
  EXPECT_NE(Hash128().add("ab").add("c").hex(), Hash128().add("a").add("bc").hex());
  EXPECT_NE(Hash128().add("").hex(), Hash128().hex());
  // FNV-1a/128 offset basis, from the specification (draft-eastlake-fnv).
  EXPECT_EQ(Hash128().hex(), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(hash_of("x"), hash_of("x"));
}

// The same by the definition, multiplying by the prime 2^88 + 2^8 + 0x3b bit by bit.
TEST(Hash, IsFnv1a) {
  unsigned __int128 state =
      (static_cast<unsigned __int128>(0x6c62272e07bb0142ull) << 64) | 0x62b821756295c58dull;
  for (const unsigned char c : std::string("3:abc")) {
    state ^= c;
    unsigned __int128 product = 0;
    for (const int bit : {88, 8, 5, 4, 3, 1, 0}) product += state << bit;
    state = product;
  }
  std::string hex;
  for (int i = 124; i >= 0; i -= 4) hex += "0123456789abcdef"[static_cast<int>(state >> i) & 15];
  EXPECT_EQ(hash_of("abc"), hex);
}

TEST(Files, AppearWholeOrNotAtAll) {
  const TemporaryDir dir;
  const std::string path = dir.path() + "/a/file";
  EXPECT_FALSE(write_file_atomically(path, "x"));  // no such folder
  ASSERT_TRUE(make_writable_dir(dir.path() + "/a"));
  const std::string bytes("with\0zero", 9);
  ASSERT_TRUE(write_file_atomically(path, bytes));
  EXPECT_EQ(read_file(path), bytes);
  EXPECT_EQ(read_file(dir.path() + "/none"), std::nullopt);
  EXPECT_EQ(read_file(dir.path()), std::nullopt);  // a folder
  const auto files = std::filesystem::directory_iterator(dir.path() + "/a");
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);  // no temporary left
}

// A disk that fills up: the old file stays, nothing is left beside it, the reason is given.
TEST(Files, FullDiskKeepsTheOldFile) {
  const TemporaryDir dir;
  const std::string path = dir.path() + "/file";
  ASSERT_TRUE(write_file_atomically(path, "old"));
  const pid_t child = testing::start_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    std::string why;
    const bool written = write_file_atomically(path, std::string(1 << 20, 'x'), &why);
    return !written && why.find("too large") != std::string::npos ? 0 : 1;
  });
  EXPECT_EQ(testing::wait_for(child), 0);
  EXPECT_EQ(read_file(path), "old");
  const auto files = std::filesystem::directory_iterator(dir.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
}

TEST(Files, UnwritableFolderSaysWhy) {
  const TemporaryDir dir;
  testing::write_text(dir.path() + "/file", "");
  std::string why;
  EXPECT_FALSE(make_writable_dir(dir.path() + "/file", &why));
  EXPECT_NE(why.find("/file"), std::string::npos);
  EXPECT_FALSE(make_writable_dir(dir.path() + "/file/below", &why));
  EXPECT_FALSE(make_writable_dir("/proc/plait", &why));
}

TEST(Files, TemporaryDirGoesAway) {
  std::string path;
  {
    const TemporaryDir dir;
    path = dir.path();
    testing::write_text(path + "/x", "x");
    EXPECT_TRUE(is_directory(path));
  }
  EXPECT_FALSE(is_directory(path));
  const testing::ScopedEnvironment env({{"TMPDIR", "/proc/none"}});
  EXPECT_NE(testing::error_of([] { TemporaryDir no; }).find("TMPDIR"), std::string::npos);
}

TEST(Subprocess, PassesTextBothWays) {
  const std::string big(1 << 20, 'x');  // more than any pipe holds, both ways at once
  const ProcessResult cat = run_process({"cat"}, big);
  EXPECT_TRUE(cat.ok());
  EXPECT_EQ(cat.output, big);
  const ProcessResult both = run_process({"sh", "-c", "echo out; echo err >&2; exit 3"});
  EXPECT_EQ(both.output, "out\nerr\n");
  EXPECT_EQ(both.exit_code, 3);
  EXPECT_FALSE(both.ok());
  // A program that reads nothing must not kill us by SIGPIPE.
  EXPECT_TRUE(run_process({"true"}, big).ok());
}

TEST(Subprocess, TellsHowItEnded) {
  EXPECT_EQ(run_process({"sh", "-c", "kill -9 $$"}).signal, SIGKILL);
  const ProcessResult none = run_process({"/nonexistent/program"});
  EXPECT_FALSE(none.started);
  EXPECT_EQ(none.why_not, "No such file or directory");
}

TEST(Environment, EveryVariableIsInTheTable) {
  EXPECT_NE(testing::error_of([] { environment("PLAIT_UNKNOWN"); }).find("PLAIT_UNKNOWN"),
            std::string::npos);
  const testing::ScopedEnvironment env({{"PLAIT_NUM_THREADS", "3"}, {"PLAIT_CXX", ""}});
  EXPECT_EQ(environment("PLAIT_NUM_THREADS"), "3");
  EXPECT_EQ(environment("PLAIT_CXX"), std::nullopt);
  bool found = false;
  for (const EnvironmentVariable& v : environment_variables()) {
    EXPECT_FALSE(v.meaning.empty() || v.fallback.empty()) << v.name;
    found |= v.name == "PLAIT_NUM_THREADS" && v.value == "3";
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace plait
