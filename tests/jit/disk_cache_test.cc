// The artefact folder: which folder, what is found out to be broken, and work without any.
#include "jit/disk_cache.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "jit/support.h"
#include "plait/jit.h"

namespace plait::jit {
namespace {

using testing::ScopedEnvironment;
using testing::write_text;

const std::string kFile = std::string(32, 'a') + ".cubin";

TEST(DiskCache, FindsOutEveryBrokenArtefact) {
  const TemporaryDir dir;
  const ScopedEnvironment env({{"PLAIT_CACHE_DIR", dir.path()}});
  const std::string payload(1000, 'p');
  EXPECT_EQ(cache_load(kFile), std::nullopt);
  ASSERT_TRUE(cache_store(kFile, payload));
  EXPECT_EQ(cache_load(kFile), payload);
  const std::string path = dir.path() + "/" + kFile;
  const std::string whole = *read_file(path);
  std::string flipped = whole, grown = whole + "x";
  flipped[500] ^= 1;
  for (const std::string& broken :
       {std::string(), whole.substr(0, whole.size() / 2), whole.substr(0, whole.size() - 1),
        whole.substr(1), flipped, grown, std::string(1056, '\xa7')}) {
    write_text(path, broken);
    EXPECT_EQ(cache_load(kFile), std::nullopt) << broken.size();
    EXPECT_EQ(cache_find(kFile), std::nullopt);
  }
  ASSERT_TRUE(cache_store(kFile, payload));  // a rebuilt one takes its place
  EXPECT_EQ(cache_load(kFile), payload);
  EXPECT_EQ(cache_find(kFile), path);
  ASSERT_TRUE(cache_store(kFile, ""));
  EXPECT_EQ(cache_load(kFile), "");
}

TEST(DiskCache, FolderMayDisappear) {
  const TemporaryDir dir;
  const ScopedEnvironment env({{"PLAIT_CACHE_DIR", dir.path() + "/cache"}});
  ASSERT_TRUE(cache_store(kFile, "x"));
  std::filesystem::remove_all(dir.path() + "/cache");
  EXPECT_EQ(cache_load(kFile), std::nullopt);
  EXPECT_TRUE(cache_store(kFile, "x"));
  EXPECT_EQ(cache_load(kFile), "x");
}

// C35: own variable, then XDG_CACHE_HOME, then HOME; the first that is set decides.
TEST(DiskCache, ChoosesTheFolder) {
  const TemporaryDir dir;
  const std::string& d = dir.path();
  {
    const ScopedEnvironment env(
        {{"PLAIT_CACHE_DIR", d + "/own"}, {"XDG_CACHE_HOME", d + "/xdg"}, {"HOME", d + "/home"}});
    EXPECT_EQ(cache_dir(), d + "/own");
    EXPECT_EQ(cache_dir_reason(), "PLAIT_CACHE_DIR=" + d + "/own");
  }
  {
    const ScopedEnvironment env(
        {{"PLAIT_CACHE_DIR", ""}, {"XDG_CACHE_HOME", d + "/xdg"}, {"HOME", d + "/home"}});
    EXPECT_EQ(cache_dir(), d + "/xdg/plait");
  }
  const ScopedEnvironment env(
      {{"PLAIT_CACHE_DIR", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", d + "/home"}});
  EXPECT_EQ(cache_dir(), d + "/home/.cache/plait");
}

TEST(DiskCache, NoFolderMeansMemoryOnly) {
  const TemporaryDir dir;
  write_text(dir.path() + "/file", "");
  const std::string file = dir.path() + "/file";
  struct Case {
    std::string own, xdg, home, reason;
  };
  for (const Case& c :
       {Case{"", "", "", "memory only: none of PLAIT_CACHE_DIR"},
        Case{"", "", file, "memory only: HOME=" + file},
        Case{"", file, dir.path(), "memory only: XDG_CACHE_HOME=" + file},
        Case{"/proc/plait", dir.path(), dir.path(), "memory only: PLAIT_CACHE_DIR=/proc/plait"}}) {
    const ScopedEnvironment env(
        {{"PLAIT_CACHE_DIR", c.own}, {"XDG_CACHE_HOME", c.xdg}, {"HOME", c.home}});
    EXPECT_EQ(cache_dir(), "");
    EXPECT_EQ(cache_dir_reason().substr(0, c.reason.size()), c.reason);
    EXPECT_FALSE(cache_store(kFile, "x"));
    EXPECT_EQ(cache_load(kFile), std::nullopt);
    EXPECT_EQ(clear_cache(), 0);
  }
}

TEST(DiskCache, FolderWithoutPermission) {
  const TemporaryDir dir;
  const ScopedEnvironment env({{"PLAIT_CACHE_DIR", dir.path()}});
  ASSERT_TRUE(cache_store(kFile, "x"));
  std::filesystem::permissions(dir.path(), std::filesystem::perms(0555));
  const pid_t child = testing::start_child([&] {
    if (getuid() == 0 && setuid(65534) != 0) return 2;  // root writes anywhere: become nobody
    if (cache_store(kFile, "y") || !cache_dir().empty()) return 1;
    // What is there already can still be read, where the folders above let us.
    return 0;
  });
  EXPECT_EQ(testing::wait_for(child), 0);
  EXPECT_EQ(cache_load(kFile), "x");
  std::filesystem::permissions(dir.path(), std::filesystem::perms(0755));
}

TEST(DiskCache, ClearRemovesOnlyItsOwn) {
  const TemporaryDir dir;
  const ScopedEnvironment env({{"PLAIT_CACHE_DIR", dir.path()}});
  ASSERT_TRUE(cache_store(kFile, "x"));
  ASSERT_TRUE(cache_store(std::string(32, '0') + ".so", "x"));
  write_text(dir.path() + "/" + kFile + ".123.0.tmp", "left by a killed process");
  write_text(dir.path() + "/notes.txt", "the user's");
  write_text(dir.path() + "/" + std::string(32, 'g') + ".so", "not hexadecimal");
  EXPECT_EQ(clear_cache(), 3);
  EXPECT_EQ(clear_cache(), 0);
  EXPECT_EQ(read_file(dir.path() + "/notes.txt"), "the user's");
}

}  // namespace
}  // namespace plait::jit
