// Built-in variants for AVX2, FMA and F16C.
#include "cpu/simd/builtin.h"
#ifdef PLAIT_X86_64_SETS
#define PLAIT_CPU_ISA x86_64_v3
#include "cpu/simd/builtin.inc"

namespace plait::cpu {
Function builtin_x86_64_v3(Dtype dtype_kv, BuiltinVariant variant) {
  return builtin(dtype_kv, variant);
}
}  // namespace plait::cpu
#endif
