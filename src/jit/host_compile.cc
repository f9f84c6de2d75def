// Custom variants on a CPU: the host compiler, started without a shell, makes a shared library that
// is loaded and never closed.
#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/environment.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/subprocess.h"
#include "jit/diagnostics.h"
#include "jit/disk_cache.h"
#include "jit/jit.h"
#include "jit/texts.h"
#include "plait/error.h"
#include "variants/functors.h"

namespace plait::jit {
namespace {

HostCompilerInfo find_compiler() {
  HostCompilerInfo info;
  std::vector<std::string> commands;
  std::string label;
  if (const auto own = environment("PLAIT_CXX")) {
    commands = {*own};
    label = concat("PLAIT_CXX=\"", *own, "\": ");
  } else {
    if (const auto cxx = environment("CXX")) commands.push_back(*cxx);
    commands.insert(commands.end(), {"c++", "g++", "clang++"});
  }
  for (const std::string& command : commands) {
    const ProcessResult version = run_process({command, "--version"});
    if (version.ok()) {
      info.found = true;
      info.command = command;
      info.version = version.output.substr(0, version.output.find('\n'));
      info.looked_for.push_back(concat(label, command, ": ", info.version));
      break;
    }
    info.looked_for.push_back(concat(
        label, command, ": ",
        !version.started ? version.why_not : concat("--version failed with ", version.exit_code)));
  }
  return info;
}

// Found anew while none is there, so that one installed meanwhile is taken.
HostCompilerInfo compiler() {
  static std::mutex mutex;
  static std::map<std::string, HostCompilerInfo> found;  // by the variables that decide
  const std::lock_guard lock(mutex);
  const std::string key =
      environment("PLAIT_CXX").value_or("") + "\n" + environment("CXX").value_or("");
  HostCompilerInfo& info = found[key];
  if (!info.found) info = find_compiler();
  return info;
}

// -march=native makes the result this CPU's own: its features are part of the key.
const std::string& cpu_features() {
  static const std::string features = [] {
    const std::string text = read_file("/proc/cpuinfo").value_or("");
    const size_t begin = text.find("\nflags");
    if (begin == std::string::npos) return text.substr(0, 4096);
    return text.substr(begin + 1, text.find('\n', begin + 1) - begin - 1);
  }();
  return features;
}

const std::vector<std::string>& flags() {
  static const std::vector<std::string> flags = {"-std=c++20",
                                                 "-O3",
                                                 "-march=native",
                                                 "-ffp-contract=fast",  // off in ISO mode
                                                 "-fno-math-errno",
                                                 "-fno-trapping-math",
                                                 "-fPIC",
                                                 "-shared",
                                                 "-fvisibility=hidden",
                                                 "-w"};
  return flags;
}

// User text with PTX in it is refused here by name; the host compiler would speak of the assembler.
void refuse_ptx(const std::string& text, const std::string& variant_name) {
  for (const std::string& file : user_files(text)) {
    const std::string mark = concat("#line 1 \"", file, "\"\n");
    const size_t begin = text.find(mark) + mark.size();
    const size_t end = text.find("\n#line ", begin);
    const int line = line_of_ptx(text.substr(begin, end == std::string::npos ? end : end - begin));
    if (line != 0) {
      fail("variant '", variant_name, "', CPU: ", file, "(", line,
           "): asm is PTX text, which runs on CUDA devices only; guard it with #if "
           "defined(__CUDA_ARCH__) and give the CPU plain C++");
    }
  }
}

std::string build_error(const ProcessResult& result, const std::string& variant_name,
                        const std::string& command, const std::string& key,
                        const std::string& text) {
  const std::string where = concat("variant '", variant_name, "', CPU: ");
  const bool killed_below =  // the driver outlives the compiler proper
      result.output.find("Killed signal terminated program") != std::string::npos ||
      result.output.find("unable to execute command: Killed") != std::string::npos;
  if (!result.started) return concat(where, command, " did not start: ", result.why_not);
  const std::string path = keep_log(key, result.output, text);
  const std::string log =
      concat("\nfull log and source: ",
             path.empty() ? "set PLAIT_JIT_KEEP to a folder to keep them" : path);
  if (result.signal != 0 || killed_below) {
    const std::string by = result.signal != 0 ? concat("signal ", result.signal) : "a signal";
    return concat(where, command, " was killed by ", by,
                  ", which is no error in the variant: is there enough memory?", log);
  }
  return concat(where, first_error(result.output, user_files(text)), log);
}

void* open_entry(const std::string& path, const std::string& entry,
                 const std::string& variant_name) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* address = library != nullptr ? dlsym(library, entry.c_str()) : nullptr;
  if (address == nullptr) {
    const char* error = dlerror();
    fail("variant '", variant_name,
         "', CPU: the compiled library does not load: ", error ? error : "no reason given");
  }
  return address;
}

}  // namespace

void* compile_host(const std::string& text, const std::string& entry,
                   const std::string& variant_name) {
  refuse_ptx(text, variant_name);
  const HostCompilerInfo found = compiler();
  if (!found.found) {
    std::string message =
        concat("variant '", variant_name, "', CPU: this variant needs a C++ compiler. Looked for:");
    for (const std::string& line : found.looked_for) message += "\n  " + line;
    fail(message,
         "\nInstall g++ or clang++, or set PLAIT_CXX to one. None is needed by causal(), "
         "sliding_window(), and one of soft_cap(), alibi() and custom_mask() beside them");
  }
  Hash128 hash;
  hash.add(found.command).add(found.version).add(cpu_features()).add(text).add(embedded_hash());
  for (const std::string& flag : flags()) hash.add(flag);
  const std::string key = hash.hex();

  static std::mutex
      mutex;  // one build at a time in a process: rare, and the second may be the same
  static std::map<std::string, void*> libraries;  // by key and entry
  const std::lock_guard lock(mutex);
  const bool cached = !includes_other_files(text);
  void* fresh = nullptr;
  void*& address = cached ? libraries[key + entry] : fresh;
  if (address != nullptr) return address;

  const std::string file = key + ".so";
  if (const auto path = cached ? cache_find(file) : std::nullopt) {
    return address = open_entry(*path, entry, variant_name);
  }

  const std::string expanded = expand_includes(text, "generated_variant.h");
  const TemporaryDir scratch;
  const std::string library = scratch.path() + "/variant.so";
  std::vector<std::string> arguments = {found.command};
  arguments.insert(arguments.end(), flags().begin(), flags().end());
  arguments.insert(arguments.end(), {"-x", "c++", "-", "-o", library});
  const ProcessResult result = run_process(arguments, expanded);
  const std::string keep_name = concat("cpu ", variant_name, " ", key.substr(0, 8));
  keep_artefact(keep_name, "cc", expanded);
  keep_artefact(keep_name, "log", result.output);
  if (!result.ok()) throw Error(build_error(result, variant_name, found.command, key, text));
  const auto bytes = cached ? read_file(library) : std::nullopt;
  if (bytes && cache_store(file, *bytes)) {
    if (const auto path = cache_find(file)) return address = open_entry(*path, entry, variant_name);
  }
  return address = open_entry(library, entry, variant_name);  // loaded, it outlives its file
}

}  // namespace plait::jit

namespace plait {

HostCompilerInfo host_compiler_info() { return jit::compiler(); }

}  // namespace plait
