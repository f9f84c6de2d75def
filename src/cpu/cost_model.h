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

// Measured at head_dim 128 on a core of a Xeon of 2023 (Sapphire Rapids, AVX-512), a kv head:
//   192 rows: 0.9 us a key, 110 GFLOP/s;
//   4 rows: 0.04 us a key in bfloat16, 0.07 in float32, the time to read it; 16 rows 0.12, 32 rows
//   0.23. Most tiles of few rows are decode.
inline constexpr float kManyRowsUsPerKey = 0.9f, kFewRowsUsPerKey = 0.08f;
// Queries in, a row out. Finding keys is in the price of a key.
inline constexpr float kManyRowsFixedUs = 10.0f, kFewRowsFixedUs = 0.3f;
// Writing and joining the partial states of a tile.
inline constexpr float kMergeUs = 2.0f;
// A piece of fewer keys costs more than it saves.
inline constexpr int kMinSplitKeys = 256;
// Less than this modelled work is done by the caller alone: waking threads takes 2 to 5 us.
inline constexpr float kInlineUs = 15.0f;

PlanTarget plan_target(const AttentionConfig& config, int num_threads);

}  // namespace plait::cpu
