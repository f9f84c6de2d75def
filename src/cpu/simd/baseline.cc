#define PLAIT_CPU_ISA baseline
#include "cpu/simd/builtin.inc"

namespace plait::cpu {
Function builtin_baseline(Dtype dtype, BuiltinVariant variant) { return builtin(dtype, variant); }
}  // namespace plait::cpu
