// Built-in variants for the default instruction set: runs on every machine of the architecture.
#define PLAIT_CPU_ISA baseline
#include "cpu/simd/builtin.inc"

namespace plait::cpu {
Function builtin_baseline(Dtype dtype_kv, BuiltinVariant variant) {
  return builtin(dtype_kv, variant);
}
}  // namespace plait::cpu
