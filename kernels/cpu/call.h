// What the CPU executor (src/cpu) hands to a compiled attention function, and how a thread's
// scratch memory is divided. The function is compiled into the library for the built-in variants
// and at run time for a user's; both sides read this file.
#pragma once
#include "host_device/config.h"

namespace plait::cpu {

// Tiles. Keys: 64 rows of K and V in float32 at head_dim 128 are 64 KiB, and stay in L2 beside Q
// and the accumulators.
inline constexpr int kTileKv = 64;
// Rows, where there are many: K and V are converted, and K transposed, once for all of them. 96
// rows took 1.2 times as long in prefill, 384 as long. A multiple of the register block's 6 rows,
// and of group sizes 1 to 4, 6, 8, 12, 16, 24, 32.
inline constexpr int kManyRows = 192;
// Rows up to which K and V are read where they lie instead: decode, short extends. Over 2048 keys
// 20 rows take 0.72 (float32) and 0.83 (bfloat16, converted again for every 4 rows) of the time
// that way, 32 rows 0.92 and 1.0.
inline constexpr int kFewRows = 32;
// Keys of a tile of few rows. In a cache that keeps the heads of a token together every key or two
// is another 4 KiB page, and the L2 prefetcher of Intel cores follows 32 pages at a time: with 64
// keys decode in bfloat16 took 1.3 times as long, and fetching ahead gained nothing. 16 keys were
// no better than 32.
inline constexpr int kFewKeys = 32;
// Kv heads that an item of few rows takes side by side, so that neighbouring heads of a token are
// read one after the other.
inline constexpr int kHeadsPerPass = 8;
inline constexpr int kRowSlots = kFewRows * kHeadsPerPass;
static_assert(kRowSlots >= kManyRows);

enum class Phase { kAttend, kMerge };

struct Call {
  const Params* params;  // neither counters nor starts are used: merging waits for all items
  const void* variant;   // the variant's Params
  Dtype dtype;           // of q and out: float32, bfloat16 or float16
  int head_dim_qk, head_dim_vo;
  float* scratch;  // scratch_floats() of the calling thread's own, 64-byte aligned
  Phase phase;
  int index;            // kAttend: item; kMerge: merge list
  int head, num_heads;  // kAttend: the kv heads of it to do; kMerge: its query heads
  int chunk_keys = 0;   // invariant mode (host_device/fold.h); 0: off
};
using Function = void (*)(const Call&);

// Rows of floats are padded to whole vectors of any instruction set.
PLAIT_HD int padded_dim(int head_dim) { return round_up(head_dim, 16); }

struct Scratch {
  float *q, *out;          // [kRowSlots, padded_dim]
  float *max_logit, *sum;  // [kRowSlots]
  float* logits;           // [kManyRows, kTileKv]; then the weights
  float* rescale;          // [kManyRows]
  float *k, *v;            // [kTileKv, padded_dim], float32 copies
  float* k_transposed;     // [padded_dim, kTileKv]
  float* folded;           // [kManyRows, padded_dim]: invariant mode, output between chunks
};
PLAIT_HD float* take(float*& free, int count) {
  float* taken = free;
  free += count;
  return taken;
}
// Divides `base`; returns its end. (No lambda: it would be a function of its own, shared by the
// instruction sets.)
PLAIT_HD float* divide_scratch(float* base, int head_dim_qk, int head_dim_vo, Scratch& s) {
  const int dim_qk = padded_dim(head_dim_qk), dim_vo = padded_dim(head_dim_vo);
  float* free = base;
  s.q = take(free, kRowSlots * dim_qk);
  s.out = take(free, kRowSlots * dim_vo);
  s.max_logit = take(free, kRowSlots);
  s.sum = take(free, kRowSlots);
  s.logits = take(free, kManyRows * kTileKv);
  s.rescale = take(free, kManyRows);
  s.k = take(free, kTileKv * dim_qk);
  s.v = take(free, kTileKv * dim_vo);
  s.k_transposed = take(free, dim_qk * kTileKv);
  s.folded = take(free, kManyRows * dim_vo);
  return free;
}
PLAIT_HD int scratch_floats(int head_dim_qk, int head_dim_vo) {
  const int dim_qk = padded_dim(head_dim_qk), dim_vo = padded_dim(head_dim_vo);
  return kRowSlots * (dim_qk + dim_vo + 2) + kManyRows * (kTileKv + 1) +
         kTileKv * (2 * dim_qk + dim_vo) + kManyRows * dim_vo;
}

}  // namespace plait::cpu
