// Run-time compilation: assemble one readable source, look in the disk cache, compile (NVRTC for
// the GPU, the host compiler for custom variants on the CPU), hand back the artefact. Needs no GPU.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "host_device/config.h"
#include "plait/jit.h"
#include "plait/variant.h"

namespace plait::jit {

// One kernel to compile. `text` is a whole translation unit over the embedded files.
struct KernelSource {
  std::string name;          // "sm90 bf16 d128 gather 128x128+64x128 soft_cap": for people
  std::string variant_name;  // for error messages
  std::string entry;         // the extern "C" function
  std::string text;
  int num_threads = 0;
  int smem_bytes = 0;  // dynamic shared memory of a launch
  // Whether the compiler may make one rounding of a product and a sum, as it likes in each place:
  // not where kernels of other shapes must have the same bits.
  bool contracts = true;
};

// kernels/plain.cuh and kernels/sm90/attention.cuh with a config and a variant.
KernelSource assemble_attention(const KernelConfig& config, const Variant& variant);

// kernels/<name>.cuh, a kernel that knows no variant: its device function plait::<name>, a template
// over the dtype if one is given, called with one `const call_type&`:
//   extern "C" __global__ void plait_<name>(const __grid_constant__ call_type call) {
//     <name><Dtype::kBfloat16>(call);
//   }
inline constexpr int kUtilityThreads = 128;  // of a CTA; these kernels take any grid
KernelSource assemble_utility(const std::string& name, std::optional<Dtype> dtype,
                              const std::string& call_type, int num_threads);

struct KernelResources {
  int registers = 0, stack_bytes = 0, spill_bytes = 0;  // spill stores + loads
  int smem_bytes = 0;                                   // static
};
struct Cubin {
  std::string bytes;
  KernelResources resources;
  double seconds = 0;  // NVRTC's time when it was compiled
  bool from_cache = false;
};
// arch: "75", "80", "86", "89", "90a", "100", "120". Throws Error: NVRTC not found (everywhere it
// was looked for, what to set), or the compiler's first error in the user's own text, at most 15
// lines. A text that includes files of the user's is compiled anew by every call: no cache can tell
// whether they have changed.
Cubin compile_cubin(const KernelSource& source, const std::string& arch);
// The same past the cache, for measuring.
Cubin compile_cubin_uncached(const KernelSource& source, const std::string& arch);

// Compiles `text` to a shared library with the host compiler and returns dlsym(entry). The library
// stays loaded. `variant_name` is for errors. Throws Error as above; compiles anew as above.
void* compile_host(const std::string& text, const std::string& entry,
                   const std::string& variant_name);

// The C++ text that defines `namespace plait { struct/using Variant }` for `variant`, with #line
// directives into user sources; used by both of the above.
std::string variant_source(const Variant& variant);
// The functors that a part defines, by name.
std::string_view text_of(const VariantPart& part);  // its source, or the built-in's file
std::vector<std::string> functors_of(const VariantPart& part);

// Every configuration that plait ships for an architecture of shipped_architectures(), in one list
// (shipped.cc).
std::vector<KernelSource> shipped_kernels(const std::string& arch);

}  // namespace plait::jit
