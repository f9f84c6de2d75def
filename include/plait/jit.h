// What a program may ask of run-time compilation: where NVRTC is looked for, what was found on this
// machine (plait doctor), the cache folder, and the compilation of everything that plait ships
// (plait compile).
#pragma once
#include <string>
#include <vector>

namespace plait {

// More folders to look for libnvrtc.so.13/.12 in, before the toolkit's: Python passes those of the
// nvidia-cuda-nvrtc wheels. No effect once NVRTC has been opened.
void add_nvrtc_search_dirs(const std::vector<std::string>& dirs);

struct NvrtcInfo {
  bool found = false;
  std::string path;
  int major = 0, minor = 0;
  bool newer_than_driver = false;      // its kernels may not load: another major is wanted
  std::vector<std::string> looked_in;  // each place, with what was wrong there
};
NvrtcInfo nvrtc_info();

struct HostCompilerInfo {
  bool found = false;
  std::string command;  // as it is started: "c++"
  std::string version;  // first line of --version
  std::vector<std::string> looked_for;
};
HostCompilerInfo host_compiler_info();

struct GpuRow {
  std::string name, arch;  // "NVIDIA H200", "90a"
  int num_multiprocessors = 0;
  long long memory_bytes = 0;
};
struct DriverInfo {
  bool found = false;
  std::string why_not;       // what is missing and what to do
  int major = 0, minor = 0;  // newest CUDA that the driver takes
  std::vector<GpuRow> gpus;
};
DriverInfo driver_info();

// The environment variables that plait reads, all of them.
struct EnvironmentVariable {
  std::string name, meaning, fallback;  // fallback: what holds if it is not set
  std::string value;                    // "" if not set
};
std::vector<EnvironmentVariable> environment_variables();

std::string cache_dir();         // "" if no folder can be written: memory only
std::string cache_dir_reason();  // how it was chosen, or why there is none
long long clear_cache();         // removes plait's files there; returns how many

// Compiles every shipped configuration for `arch`, past the cache, one after the other on this
// thread. A failure is a row with `error`. Throws ArgumentError for an architecture that is not
// shipped, naming those that are, and Error without NVRTC.
struct CompiledKernel {
  std::string kernel, arch;
  double seconds = 0;
  int registers = 0, spill_bytes = 0;
  int smem_bytes = 0;  // dynamic + static
  std::string error;
};
std::vector<CompiledKernel> compile_shipped(const std::string& arch);
std::vector<std::string> shipped_architectures();

// The tiles of the sm80 template on an architecture and, on sm_90a, of the sm90 template; bfloat16,
// paged (sm90: pages of 16), compiled. In order of tile_q, tile_kv, stages. Of sm80 the number of
// warps that scores best; of sm90 two stages and, up to 4, the most that fit.
struct TileRow {
  std::string kernel;  // "sm80 128x64x2", as AttentionConfig::kernel takes it
  int tile_q = 0;
  int num_warps = 0, ctas_per_sm = 0, smem_bytes = 0;
  int registers = 0;           // a thread's: sm80 what the compiler took, sm90 a consumer's share
  int wanted_registers = 0;    // sm80: estimated, what the choice went by; sm90: O, S and P alone
  int spill_bytes = 0;         // of the compiler
  double clocks_per_key = 0;   // modelled; sm90: 0, it has no model
  bool chosen = false;         // for bounds of tile_q packed rows, beside others or alone
};
std::vector<TileRow> tile_table(const std::string& arch, int head_dim_qk, int head_dim_vo);

}  // namespace plait
