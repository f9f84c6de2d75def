// What a kernel is compiled for (KernelConfig) and what it is launched with (Params).
// KernelConfig is structural: a template argument of every kernel and part of its cache key.
#pragma once
#include "host_device/base.h"

namespace plait {

// How K and V reach shared memory: rows at equal strides; or rows found by block table, kPaged by
// TMA boxes of 8 and more rows of a page, kGather one by one.
enum class Loader { kAffine, kPaged, kGather };
enum class Mma { kScalar, kMmaSync, kWgmma };

// The shapes of one config share tile_kv and the KV ring. wgmma shapes share one main loop:
//   key_split 1: warpgroup w takes rows 64 w ... of every stage;
//   key_split s: s warpgroups take the same rows, w takes tiles w, w + s, ..., then they join.
// A warpgroup computes 64 rows; of tile_q < 64 (rows that Q's buffer holds) the rest is waste.
// Shapes of the sm80 template are for its num_warps warps: key_split of them share the same rows of
// a tile, each takes its part of the tile's keys, then they join.
struct TileShape {
  Mma mma;
  int tile_q, key_split;
};

struct KernelConfig {
  Dtype dtype_q, dtype_kv, dtype_out;
  int head_dim_qk, head_dim_vo;
  Loader loader;
  int tile_kv;
  int num_stages;               // of the KV ring; 0 where there is none
  int num_q_stages;             // buffers of Q; likewise
  int num_consumer_warpgroups;  // 0 for kernels without warp specialisation
  int producer_registers, consumer_registers;
  int ctas_per_sm;
  int num_shapes;
  TileShape shapes[2];
  int num_warps = 0;           // of the sm80 template, where all warps do all; 0 elsewhere
  int num_landing_stages = 0;  // sm90, fp8 K and V: of the ring that they are copied into
  int num_wide_tiles = 0;      // sm80, fp8: 1, which K and V in turn become, where a transform
                               //   rewrites rows; 0: they become 16-bit numbers in registers
  int chunk_keys = 0;          // invariant mode (fold.h): keys of a chunk, a multiple of tile_kv,
                               //   and no shape splits keys; 0: off
};

// kernels/plain.cuh, kernels/sm80/, kernels/sm90/.
enum class Template { kPlain, kSm80, kSm90 };
PLAIT_HD constexpr Template template_of(const KernelConfig& c) {
  return c.shapes[0].mma == Mma::kWgmma ? Template::kSm90
         : c.num_warps > 0              ? Template::kSm80
                                        : Template::kPlain;
}

struct RowStrides {  // in elements
  i64 token, head;
};
struct KvStrides {  // in elements; affine: block is 0
  i64 block, token, head;
};

struct Params {
  const void* q;           // [num_rows, num_qo_heads, head_dim_qk]
  const void* k;           // blocks or rows of [num_kv_heads, head_dim_qk]
  const void* v;           // blocks or rows of [num_kv_heads, head_dim_vo]
  void* out;               // [num_rows, num_qo_heads, head_dim_vo]
  float* lse;              // [num_rows, num_qo_heads], natural log; may be null
  const PlanView* plan;    // in the executor's memory
  const CtaStart* starts;  // likewise, [CTAs of the grid]; the CPU has none
  float* partial_out;      // [partial rows, head_dim_vo], normalised; null if nothing may be split
  float* partial_lse;      // [partial rows], natural log
  float* folds;            // invariant mode: fold_floats() a CTA, for chunks of one row
  unsigned* arrived;       // [merge lists]: PlanView::merge_indptr; 0 between runs
  unsigned* tickets;       // how many the queue has given out; 0 between runs
  RowStrides q_stride, out_stride, lse_stride;
  KvStrides k_stride, v_stride;
  int num_rows;    // rows of q, out and lse; those at and beyond plan->num_tokens are
                   //   padding and get (0, -inf)
  int block_size;  // page size; 1 where affine
  int num_qo_heads, num_kv_heads, group_size;
  float sm_scale;
  float k_scale = 1, v_scale = 1;  // of fp8 K and V: host_device/scales.h
  Visibility visible;
  int zero = 0;       // stays 0; an order that ptxas cannot see through (sm90/compute.cuh)
  i64 num_kv_blocks;  // pages of k and v, affine: rows; where TMA stops reading
};
static_assert(sizeof(Params) % 8 == 0, "VariantCall appends 8-byte slots");

// The argument of a kernel (the sm90 template puts its tensor maps in front). V::Params takes an
// 8-byte slot for each parameter.
template <class V>
struct VariantCall {
  Params params;
  typename V::Params variant;
};

// Floats that a CTA keeps of its rows between their chunks, for any kernel: a row's output and what
// its threads know of its state.
PLAIT_HD constexpr int fold_floats(const KernelConfig& c) {
  if (c.chunk_keys == 0) return 0;
  int rows = 0;
  for (int i = 0; i < c.num_shapes; ++i) {
    rows = c.shapes[i].tile_q > rows ? c.shapes[i].tile_q : rows;
  }
  return (rows + 63) / 64 * 64 * ((c.head_dim_vo + 15) / 16 * 16 + 16);
}

// How many packed rows of whole tokens fit a tile; a group larger than the tile is split.
PLAIT_HD int rows_per_tile(int tile_q, int group_size) {
  return group_size >= tile_q ? tile_q : tile_q / group_size * group_size;
}
// Into how many parts, each of at most tile_q heads, tiles split a token's group; what is joined is
// a part.
PLAIT_HD int lists_per_head(int tile_q, int group_size) {
  return (group_size + tile_q - 1) / tile_q;
}

// A merge (tile/merge.cuh): heads that a CTA claims in one pass, at most; and the ints of shared
// memory that it takes for parts of so many heads.
inline constexpr int kMostClaims = 16;
PLAIT_HD constexpr int merge_scratch(int heads) { return heads + kMostClaims + 1; }

}  // namespace plait
