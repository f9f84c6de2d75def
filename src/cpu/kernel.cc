#include "cpu/kernel.h"

#include <optional>

#include "cpu/simd/builtin.h"
#include "jit/jit.h"
#include "plait/error.h"

namespace plait::cpu {
namespace {

constexpr const char* kEntry = "plait_cpu_attention";

std::optional<BuiltinVariant> builtin_variant(const Variant& variant) {
  if (variant.parts.empty()) return BuiltinVariant::kStandard;
  const VariantPart& part = variant.parts[0];
  if (variant.parts.size() > 1 || !part.source.empty()) return std::nullopt;
  if (part.name == "soft_cap") return BuiltinVariant::kSoftCap;
  if (part.name == "alibi") return BuiltinVariant::kAlibi;
  if (part.name == "custom_mask") return BuiltinVariant::kCustomMask;
  return std::nullopt;
}

const char* cpp_name(Dtype dtype) {
  return dtype == Dtype::kFloat32    ? "plait::Dtype::kFloat32"
         : dtype == Dtype::kBfloat16 ? "plait::Dtype::kBfloat16"
         : dtype == Dtype::kFloat16  ? "plait::Dtype::kFloat16"
         : dtype == Dtype::kE4m3     ? "plait::Dtype::kE4m3"
                                     : "plait::Dtype::kE5m2";
}

Function builtin(const std::string& instruction_set, Dtype dtype_kv, BuiltinVariant variant) {
#ifdef PLAIT_X86_64_SETS
  if (instruction_set == "x86-64-v4") return builtin_x86_64_v4(dtype_kv, variant);
  if (instruction_set == "x86-64-v3") return builtin_x86_64_v3(dtype_kv, variant);
#endif
  (void)instruction_set;
  return builtin_baseline(dtype_kv, variant);
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> sets;
#ifdef PLAIT_X86_64_SETS
  // Every machine with AVX2 has F16C and BMI, every one with AVX-512 BW the rest of x86-64-v4.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back("x86-64-v4");
  }
  if (v3) sets.push_back("x86-64-v3");
#endif
  sets.push_back("baseline");
  return sets;
}

std::string instruction_set_of(const AttentionConfig& config) {
  if (config.kernel == "auto" || config.kernel == "cpu") return "";
  std::string taken = "'auto', 'cpu'";
  for (const std::string& set : instruction_sets()) {
    if (config.kernel == "cpu " + set) {
      check(builtin_variant(config.variant).has_value(), "attention: kernel is '", config.kernel,
            "', but variant '", config.variant.name(),
            "' is compiled for this machine: take 'cpu' or 'auto'");
      return set;
    }
    taken += ", 'cpu " + set + "'";
  }
  check(false, "attention: kernel is '", config.kernel, "', but the CPU here takes ", taken);
  return "";
}

std::string kernel_text(const AttentionConfig& config) {
  return concat("#include \"cpu/attention.h\"\n", jit::variant_source(config.variant),
                "extern \"C\" __attribute__((visibility(\"default\"))) void ", kEntry,
                "(const plait::cpu::Call& call) {\n  plait::cpu::attention<plait::cpu::Config{",
                cpp_name(config.dtype_kv()), ", ", config.head_dim_qk, ", ", config.head_dim_vo,
                "}, plait::Variant>(call);\n}\n");
}

Kernel find_kernel(const AttentionConfig& config, const std::string& instruction_set) {
  if (const auto variant = builtin_variant(config.variant)) {
    const std::string set = instruction_set.empty() ? instruction_sets()[0] : instruction_set;
    return {builtin(set, config.dtype_kv(), *variant), "cpu " + set};
  }
  void* compiled = jit::compile_host(kernel_text(config), kEntry, config.variant.name());
  return {reinterpret_cast<Function>(compiled), "cpu compiled for this machine"};
}

}  // namespace plait::cpu
