#include "jit/nvrtc.h"

#include <dlfcn.h>

#include <mutex>

#include "base/environment.h"
#include "base/files.h"
#include "cuda/driver.h"
#include "plait/error.h"

namespace plait::jit {
namespace {

constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

// Opens one library; what was wrong goes to info.looked_in.
bool open_library(const std::string& path, Nvrtc& nvrtc) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed
  if (library == nullptr) {
    const char* error = dlerror();
    nvrtc.info.looked_in.push_back(concat(path, ": ", error ? error : "not opened"));
    return false;
  }
#define X(name, params) nvrtc.name = reinterpret_cast<int(*) params>(dlsym(library, "nvrtc" #name));
  PLAIT_NVRTC_FUNCTIONS(X)
#undef X
  nvrtc.GetErrorString =
      reinterpret_cast<const char* (*)(int)>(dlsym(library, "nvrtcGetErrorString"));
  bool complete = nvrtc.GetErrorString != nullptr;
#define X(name, params) complete &= nvrtc.name != nullptr;
  PLAIT_NVRTC_FUNCTIONS(X)
#undef X
  if (!complete || nvrtc.Version(&nvrtc.info.major, &nvrtc.info.minor) != 0) {
    nvrtc.info.looked_in.push_back(path + ": is no NVRTC of CUDA 11.1 or later");
    return false;
  }
  Dl_info where;
  nvrtc.info.path =
      dladdr(reinterpret_cast<void*>(nvrtc.Version), &where) != 0 ? where.dli_fname : path;
  nvrtc.info.looked_in.push_back(
      concat(path, ": version ", nvrtc.info.major, ".", nvrtc.info.minor, " in ", nvrtc.info.path));
  nvrtc.info.found = true;
  return true;
}

// The places to try, in order: a path, and how the user knows it.
struct Place {
  std::string path;   // of a library, or of a folder that has it
  std::string label;  // "CUDA_HOME=\"/x\""; empty: the path says it
};

std::vector<Place> places(const std::vector<std::string>& extra_dirs) {
  if (const auto own = environment("PLAIT_NVRTC"))
    return {{*own, concat("PLAIT_NVRTC=\"", *own, "\"")}};
  std::vector<Place> all;
  for (const char* soname : kSonames) all.push_back({soname, ""});  // torch's copy, LD_LIBRARY_PATH
  const auto add_wheels = [&](const std::string& nvidia) {
    for (const char* folder : {"/cu13/lib", "/cuda_nvrtc/lib"})
      all.push_back({nvidia + folder, ""});
  };
  for (const std::string& dir : extra_dirs) {
    add_wheels(dir);
    add_wheels(dir + "/nvidia");
    all.push_back({dir, ""});
  }
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&open_library), &self) != 0 && self.dli_fname != nullptr) {
    const std::string library = self.dli_fname;  // site-packages/plait/_plait.so
    const std::string folder = library.substr(0, library.rfind('/') + 1);
    add_wheels(folder + "../nvidia");
  }
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const auto home = environment(name)) {
      all.push_back({*home + "/lib64", concat(name, "=\"", *home, "\"")});
      all.push_back({*home + "/lib", concat(name, "=\"", *home, "\"")});
    }
  }
  all.push_back({"/usr/local/cuda/lib64", ""});
  return all;
}

// Tries `place`; a folder that does not exist, or holds no libnvrtc, is one entry of the list.
bool open_place(const Place& place, Nvrtc& nvrtc) {
  std::vector<std::string>& looked_in = nvrtc.info.looked_in;
  const size_t before = looked_in.size();
  bool found = false;
  if (is_directory(place.path)) {
    for (const char* soname : kSonames) {
      const std::string path = concat(place.path, "/", soname);
      if (!found && is_readable(path)) found = open_library(path, nvrtc);
    }
    if (looked_in.size() == before)
      looked_in.push_back(place.path + ": holds no libnvrtc.so.13 or .12");
  } else if (place.path.find(".so") != std::string::npos) {
    found = open_library(place.path, nvrtc);
  } else {
    looked_in.push_back(place.path + ": no such folder");
  }
  if (!place.label.empty()) {
    for (size_t i = before; i < looked_in.size(); ++i)
      looked_in[i] = place.label + ": " + looked_in[i];
  }
  return found;
}

std::mutex search_mutex;
std::vector<std::string>& search_dirs() {
  static std::vector<std::string> dirs;
  return dirs;
}

const Nvrtc& found_nvrtc() {
  static const Nvrtc found = [] {
    std::vector<std::string> dirs;
    {
      const std::lock_guard lock(search_mutex);
      dirs = search_dirs();
    }
    return find_nvrtc(dirs, cuda::driver_available() ? cuda::driver().version / 1000 : 0);
  }();
  return found;
}

}  // namespace

Nvrtc find_nvrtc(const std::vector<std::string>& extra_dirs, int driver_major) {
  Nvrtc chosen;  // the first that fits the driver, else the first
  std::vector<std::string> looked_in;
  for (const Place& place : places(extra_dirs)) {
    Nvrtc candidate;
    const bool found = open_place(place, candidate);
    looked_in.insert(looked_in.end(), candidate.info.looked_in.begin(),
                     candidate.info.looked_in.end());
    if (!found) continue;
    candidate.info.newer_than_driver = driver_major > 0 && candidate.info.major > driver_major;
    const bool fits = !candidate.info.newer_than_driver;
    if (fits || !chosen.info.found) chosen = candidate;
    if (fits) break;
  }
  chosen.info.looked_in = looked_in;
  return chosen;
}

const Nvrtc& nvrtc() {
  const Nvrtc& found = found_nvrtc();
  if (!found.info.found) {
    std::string text = "NVRTC was not found, which compiles the GPU kernels. Looked for:";
    // One line each, but at most ten: the first reasons are those a user can act on.
    const std::vector<std::string>& all = found.info.looked_in;
    for (size_t i = 0; i < all.size() && i < 10; ++i) text += "\n  " + all[i];
    if (all.size() > 10) text += concat("\n  and ", all.size() - 10, " more (plait doctor)");
    fail(text,
         "\nInstall it (pip install nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 for a CUDA 12 "
         "driver), or set PLAIT_NVRTC to libnvrtc.so.13 or .12, or CUDA_HOME to a toolkit");
  }
  return found;
}

}  // namespace plait::jit

namespace plait {

void add_nvrtc_search_dirs(const std::vector<std::string>& dirs) {
  const std::lock_guard lock(jit::search_mutex);
  jit::search_dirs().insert(jit::search_dirs().end(), dirs.begin(), dirs.end());
}

NvrtcInfo nvrtc_info() { return jit::found_nvrtc().info; }

}  // namespace plait
