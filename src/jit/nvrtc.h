// NVRTC, opened at run time: found in the toolkit, in pip wheels or where torch has loaded it; the
// major version that the driver takes is preferred.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "plait/jit.h"

namespace plait::jit {

using NvrtcProgram = void*;
#define PLAIT_NVRTC_FUNCTIONS(X)                                                                 \
  X(Version, (int* major, int* minor))                                                           \
  X(CreateProgram, (NvrtcProgram * program, const char* text, const char* name, int num_headers, \
                    const char* const* headers, const char* const* include_names))               \
  X(DestroyProgram, (NvrtcProgram * program))                                                    \
  X(CompileProgram, (NvrtcProgram program, int num_options, const char* const* options))         \
  X(GetProgramLogSize, (NvrtcProgram program, size_t * bytes))                                   \
  X(GetProgramLog, (NvrtcProgram program, char* log))                                            \
  X(GetCUBINSize, (NvrtcProgram program, size_t * bytes))                                        \
  X(GetCUBIN, (NvrtcProgram program, char* cubin))

struct Nvrtc {
#define X(name, params) int(*name) params = nullptr;
  PLAIT_NVRTC_FUNCTIONS(X)
#undef X
  const char* (*GetErrorString)(int) = nullptr;
  NvrtcInfo info;
};

// Looks anew. `driver_major`: newest CUDA that the driver takes; 0 where there is none.
Nvrtc find_nvrtc(const std::vector<std::string>& extra_dirs, int driver_major);
// What was found first; throws Error that lists every place and says what to install or set.
const Nvrtc& nvrtc();

}  // namespace plait::jit
