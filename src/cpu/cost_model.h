// What a tile costs on the CPU, for the planner: constants, never measured at run time. Cuts decide
// the bits of a result, so what they depend on is listed here: the bounds, the number of threads.
#pragma once
#include "cpu/call.h"
#include "plait/attention.h"

namespace plait::cpu {

// CTAs are parts of equal modelled cost that threads take item by item. Four for each thread: a
// thread that is held up by other programs then delays the end by an eighth of its share at most,
// and partials (two tiles a CTA) stay few.
inline constexpr int kCtasPerThread = 4;

// Measured at head_dim 128 on one core of a Xeon of 2023 (Sapphire Rapids, AVX-512):
//   96 rows: 0.6 us a key in float32 and bfloat16, compute bound;
//   up to 16 rows: 0.1 us a key, the time to read its 1 KiB (bfloat16: to convert it).
inline constexpr float kManyRowsUsPerKey = 0.6f, kFewRowsUsPerKey = 0.1f;
// Queries in, a row out. Finding keys is in the price of a key.
inline constexpr float kManyRowsFixedUs = 10.0f, kFewRowsFixedUs = 1.0f;
// Writing and joining the partial states of a tile.
inline constexpr float kMergeUs = 2.0f;
// A piece of fewer keys costs more than it saves.
inline constexpr int kMinSplitKeys = 256;
// Less than this modelled work is done by the caller alone: waking threads takes 2 to 5 us.
inline constexpr float kInlineUs = 10.0f;

PlanTarget plan_target(const AttentionConfig& config, int num_threads);

}  // namespace plait::cpu
