// Built-in variants for AVX-512 (F, BW, DQ, VL).
#include "cpu/simd/builtin.h"
#ifdef PLAIT_X86_64_SETS
#define PLAIT_CPU_ISA x86_64_v4
#include "cpu/simd/builtin.inc"

namespace plait::cpu {
Function builtin_x86_64_v4(Dtype dtype_kv, BuiltinVariant variant) {
  return builtin(dtype_kv, variant);
}
}  // namespace plait::cpu
#endif
