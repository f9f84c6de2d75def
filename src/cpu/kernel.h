// Which attention function runs: a built-in one for the machine's instruction set, or one compiled
// at run time from the variant's text.
#pragma once
#include <string>
#include <vector>

#include "cpu/call.h"
#include "plait/attention.h"

namespace plait::cpu {

// Instruction sets that the library has code for and this machine can run, best first: "x86-64-v4"
// (AVX-512), "x86-64-v3" (AVX2), "baseline".
std::vector<std::string> instruction_sets();

// What AttentionConfig::kernel asks for: "" for "auto" and "cpu", X for "cpu X", X one of the above
// and the variant built in. Throws ArgumentError for anything else.
std::string instruction_set_of(const AttentionConfig& config);

struct Kernel {
  Function function = nullptr;
  std::string name;  // "cpu x86-64-v4", "cpu compiled for this machine"
};
// `instruction_set` "": the best, for a built-in variant; else this machine's. Throws Error where
// the variant needs a compiler and there is none.
Kernel find_kernel(const AttentionConfig& config, const std::string& instruction_set = "");

// The translation unit of a variant that is not built in, for jit::compile_host.
std::string kernel_text(const AttentionConfig& config);

}  // namespace plait::cpu
