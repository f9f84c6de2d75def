#include "base/environment.h"

#include <cstdlib>
#include <cstring>

#include "plait/error.h"
#include "plait/jit.h"

namespace plait {
namespace {

struct Entry {
  const char *name, *meaning, *fallback;
};

constexpr Entry kTable[] = {
    {"PLAIT_CACHE_DIR", "folder of compiled kernels",
     "XDG_CACHE_HOME/plait, then HOME/.cache/plait"},
    {"PLAIT_NVRTC", "libnvrtc.so.* or its folder; nothing else is tried",
     "searched, see plait doctor"},
    {"PLAIT_CXX", "host compiler for custom variants on the CPU; nothing else is tried",
     "CXX, c++, g++, clang++"},
    {"PLAIT_JIT_KEEP", "folder that keeps every compiled source with its log",
     "only failures' logs"},
    {"PLAIT_JIT_NAPS",
     "seed: warps of kernels compiled from now on sleep at random where they meet",
     "no naps; slow, for tests of barriers"},
    {"PLAIT_NUM_THREADS", "threads of the CPU backend", "the cores this process may use"},
    {"XDG_CACHE_HOME", "user's cache folder", "HOME/.cache"},
    {"HOME", "home folder", "no cache on disk"},
    {"TMPDIR", "folder for the host compiler's temporary files", "/tmp"},
    {"CXX", "host compiler, where PLAIT_CXX is not set", "c++"},
    {"CUDA_HOME", "CUDA toolkit: its lib64 is searched for NVRTC", "CUDA_PATH, /usr/local/cuda"},
    {"CUDA_PATH", "the same, after CUDA_HOME", "/usr/local/cuda"},
};

const char* value_of(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

}  // namespace

std::optional<std::string> environment(const char* name) {
  bool known = false;
  for (const Entry& entry : kTable) known |= std::strcmp(entry.name, name) == 0;
  if (!known) fail("environment variable ", name, " is missing from the table in environment.cc");
  const char* value = value_of(name);
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

std::vector<EnvironmentVariable> environment_variables() {
  std::vector<EnvironmentVariable> all;
  for (const Entry& entry : kTable) {
    const char* value = value_of(entry.name);
    all.push_back({entry.name, entry.meaning, entry.fallback, value ? value : ""});
  }
  return all;
}

}  // namespace plait
