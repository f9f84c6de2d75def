// The attention functions of the built-in variants, compiled once per instruction set: each file of
// this folder is the same text (builtin.inc) with flags of its own (src/cpu/CMakeLists.txt) and a
// namespace of its own. They include no standard header: an inline function shared with the rest of
// the library might be linked in its AVX-512 version.
#pragma once
#include "cpu/call.h"

// Not under the sanitizers: the same text for minutes more.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define PLAIT_X86_64_SETS
#endif

namespace plait::cpu {

enum class BuiltinVariant { kStandard, kSoftCap, kAlibi, kCustomMask };

Function builtin_baseline(Dtype dtype_kv, BuiltinVariant variant);
#ifdef PLAIT_X86_64_SETS
Function builtin_x86_64_v3(Dtype dtype_kv, BuiltinVariant variant);  // AVX2, FMA, F16C
Function builtin_x86_64_v4(Dtype dtype_kv, BuiltinVariant variant);  // AVX-512
#endif

}  // namespace plait::cpu
