// Source -> cubin by NVRTC, through the caches: in this process, then on disk.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <map>
#include <mutex>

#include "base/environment.h"
#include "base/files.h"
#include "base/hash.h"
#include "jit/diagnostics.h"
#include "jit/disk_cache.h"
#include "jit/embedded.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "jit/texts.h"
#include "plait/error.h"

namespace plait::jit {
namespace {

constexpr int kNvrtcOutOfMemory = 1;

// Folders of the CUDA headers, only for a user text that includes some: ours need none, and NVRTC
// looks nowhere by itself.
std::vector<std::string> toolkit_includes(const std::string& text) {
  if (!includes_other_files(text)) return {};
  std::vector<std::string> roots;
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const auto home = environment(name)) roots.push_back(*home);
  }
  const std::string& library = nvrtc().info.path;
  roots.push_back(library.substr(0, library.rfind('/') + 1) + "..");
  roots.push_back("/usr/local/cuda");
  for (const std::string& root : roots) {
    const std::string include = root + "/include";
    if (!is_readable(include + "/cuda_fp16.h")) continue;
    std::vector<std::string> dirs = {include};
    if (is_directory(include + "/cccl")) dirs.push_back(include + "/cccl");  // <cuda/std/...>
    return dirs;
  }
  return {};
}

// -default-device: a user's helper function needs no __device__, nor a constexpr one.
std::vector<std::string> options_for(const KernelSource& source, const std::string& arch) {
  std::vector<std::string> options = {"-arch=sm_" + arch, "-std=c++20", "-default-device",
                                      "--ptxas-options=-v"};
  if (!source.contracts) options.push_back("-fmad=false");
  // Who keeps the sources reads profiles beside them; for all others lines cost 3 % of the time.
  if (environment("PLAIT_JIT_KEEP")) options.push_back("-lineinfo");
  for (const std::string& dir : toolkit_includes(source.text)) options.push_back("-I" + dir);
  return options;
}

std::string key_of(const KernelSource& source, const std::vector<std::string>& options) {
  const NvrtcInfo& info = nvrtc().info;
  Hash128 key;
  key.add(source.text).add(embedded_hash()).add(concat(info.major, ".", info.minor));
  for (const std::string& option : options) key.add(option);
  return key.hex();
}

// What ptxas -v says; functions that were not inlined count as well.
KernelResources parse_resources(const std::string& log) {
  KernelResources total;
  for (size_t begin = 0; begin < log.size();) {
    const size_t end = std::min(log.find('\n', begin), log.size());
    const std::string line = log.substr(begin, end - begin);
    begin = end + 1;
    int stack = 0, stores = 0, loads = 0, registers = 0, smem = 0;
    const size_t first_digit = line.find_first_of("0123456789");
    if (line.find("bytes spill stores") != std::string::npos &&
        std::sscanf(line.c_str() + first_digit,
                    "%d bytes stack frame, %d bytes spill stores, %d bytes spill loads", &stack,
                    &stores, &loads) == 3) {
      total.stack_bytes = std::max(total.stack_bytes, stack);
      total.spill_bytes += stores + loads;
    }
    if (const size_t used = line.find("Used "); used != std::string::npos) {
      std::sscanf(line.c_str() + used, "Used %d registers", &registers);
      total.registers = std::max(total.registers, registers);
      if (const size_t bytes = line.find(" bytes smem"); bytes != std::string::npos) {
        const size_t number = line.rfind(' ', bytes - 1);
        if (number != std::string::npos) std::sscanf(line.c_str() + number, "%d", &smem);
        total.smem_bytes = std::max(total.smem_bytes, smem);
      }
    }
  }
  return total;
}

// An artefact is one line of numbers and the cubin.
std::string pack(const Cubin& cubin) {
  char line[128];
  const KernelResources& r = cubin.resources;
  std::snprintf(line, sizeof line, "%d %d %d %d %.6f\n", r.registers, r.stack_bytes, r.spill_bytes,
                r.smem_bytes, cubin.seconds);
  return line + cubin.bytes;
}

std::optional<Cubin> unpack(const std::string& artefact) {
  Cubin cubin;
  KernelResources& r = cubin.resources;
  const size_t end = artefact.find('\n');
  if (end == std::string::npos ||
      std::sscanf(artefact.substr(0, end).c_str(), "%d %d %d %d %lf", &r.registers, &r.stack_bytes,
                  &r.spill_bytes, &r.smem_bytes, &cubin.seconds) != 5) {
    return std::nullopt;
  }
  cubin.bytes = artefact.substr(end + 1);
  cubin.from_cache = true;
  return cubin;
}

class Program {
 public:
  explicit Program(const KernelSource& source) {
    std::vector<const char*> names, texts;
    for (int i = 0; i < kNumEmbeddedFiles; ++i) {
      names.push_back(kEmbeddedFiles[i].name);
      texts.push_back(kEmbeddedFiles[i].text);
    }
    const std::string file = source.entry + ".cu";
    check_nvrtc(nvrtc().CreateProgram(&program_, source.text.c_str(), file.c_str(),
                                      kNumEmbeddedFiles, texts.data(), names.data()));
  }
  ~Program() { nvrtc().DestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  int compile(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return nvrtc().CompileProgram(program_, static_cast<int>(pointers.size()), pointers.data());
  }
  std::string log() const {
    size_t bytes = 0;
    if (nvrtc().GetProgramLogSize(program_, &bytes) != 0 || bytes == 0) return "";
    std::string log(bytes, '\0');
    nvrtc().GetProgramLog(program_, log.data());
    log.resize(log.find_last_not_of('\0') + 1);
    return log;
  }
  std::string cubin() const {
    size_t bytes = 0;
    check_nvrtc(nvrtc().GetCUBINSize(program_, &bytes));
    std::string cubin(bytes, '\0');
    check_nvrtc(nvrtc().GetCUBIN(program_, cubin.data()));
    return cubin;
  }

 private:
  static void check_nvrtc(int error) {
    if (error != 0) fail("NVRTC: ", nvrtc().GetErrorString(error));
  }
  NvrtcProgram program_ = nullptr;
};

Cubin compile_now(const KernelSource& source, const std::string& arch,
                  const std::vector<std::string>& options, const std::string& key) {
  const auto start = std::chrono::steady_clock::now();
  Program program(source);
  const int error = program.compile(options);
  const std::string log = program.log();
  const std::string keep_name = source.name + " sm_" + arch;
  keep_artefact(keep_name, "cu", source.text);
  keep_artefact(keep_name, "log", log);
  if (error != 0) {
    const std::string where = concat("variant '", source.variant_name, "', sm_", arch, ": ");
    if (error == kNvrtcOutOfMemory) fail(where, "NVRTC ran out of memory");
    const std::string path = keep_log(key, log, source.text);
    fail(where,
         log.empty() ? std::string(nvrtc().GetErrorString(error))
                     : first_error(log, user_files(source.text)),
         "\nfull log and source: ",
         path.empty() ? "set PLAIT_JIT_KEEP to a folder to keep them" : path);
  }
  Cubin cubin;
  cubin.bytes = program.cubin();
  cubin.resources = parse_resources(log);
  cubin.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  keep_artefact(keep_name, "cubin", cubin.bytes);
  return cubin;
}

Cubin load_or_compile(const KernelSource& source, const std::string& arch,
                      const std::vector<std::string>& options, const std::string& key) {
  const std::string file = key + ".cubin";
  if (const auto artefact = cache_load(file)) {
    if (const auto cubin = unpack(*artefact)) return *cubin;
  }
  const Cubin cubin = compile_now(source, arch, options, key);
  cache_store(file, pack(cubin));
  return cubin;
}

}  // namespace

Cubin compile_cubin_uncached(const KernelSource& source, const std::string& arch) {
  const std::vector<std::string> options = options_for(source, arch);
  return compile_now(source, arch, options, key_of(source, options));
}

Cubin compile_cubin(const KernelSource& source, const std::string& arch) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_future<Cubin>> cubins;  // done or being compiled
  if (includes_other_files(source.text)) return compile_cubin_uncached(source, arch);
  const std::vector<std::string> options = options_for(source, arch);
  const std::string key = key_of(source, options);
  std::promise<Cubin> promise;
  std::shared_future<Cubin> other;
  {
    const std::lock_guard lock(mutex);
    const auto [it, inserted] = cubins.try_emplace(key, promise.get_future());
    if (!inserted) other = it->second;
  }
  if (other.valid()) {
    Cubin cubin = other.get();  // rethrows the error of the thread that compiles it
    cubin.from_cache = true;
    return cubin;
  }
  try {
    const Cubin cubin = load_or_compile(source, arch, options, key);
    promise.set_value(cubin);
    return cubin;
  } catch (...) {
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex);
    cubins.erase(key);  // what failed may work later: out of memory, a header that appears
    throw;
  }
}

}  // namespace plait::jit
