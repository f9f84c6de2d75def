// Arguments of the small kernels beside attention (upload.cuh, pack_mask.cuh, merge_states.cuh,
// append_kv.cuh, read_all.cuh), filled in by the CUDA backend.
#pragma once
#include "host_device/config.h"

namespace plait {

// kernels/upload.cuh: pinned host memory -> the executor's plan. Sizes in units of 16 bytes.
struct UploadCall {
  const void* from;  // [head][body], pinned
  void *head, *body;
  int head_units, body_units;
  unsigned* counters;  // to zero
  i64 num_counters;
};

// kernels/pack_mask.cuh: a caller's mask on the device -> words of the plan.
struct PackMaskCall {
  const unsigned char* from;  // bits or bools
  const TokenMask* tokens;    // [num_tokens]
  const i64* token_source;    // [num_tokens]: first bit or bool of the token's row
  unsigned* words;
  int num_tokens, bools;
};

// kernels/merge_states.cuh: see merge_states in plait/attention.h.
struct MergeStatesCall {
  const void* v;
  const float* lse;
  void* out;
  float* out_lse;
  i64 v_stride_row, v_stride_state, v_stride_head;
  i64 lse_stride_row, lse_stride_state, lse_stride_head;
  RowStrides out_stride, out_lse_stride;
  i64 num_rows;
  int num_states, num_heads, head_dim;
  float log2_per_lse, lse_per_log2;  // log2(e) and ln(2); of an lse in base 2 both 1
  int padding = 0;
};

// kernels/append_kv.cuh: see append_kv in plait/attention.h. Bytes rather than elements: a copy
// does not care what the elements are.
struct AppendKvCall {
  const char *k_new, *v_new;
  char *k_cache, *v_cache;
  RowStrides k_new_stride, v_new_stride;  // in bytes
  KvStrides k_stride, v_stride;           // in bytes
  int k_row_bytes, v_row_bytes;           // of the cache
  int num_tokens, num_kv_heads, block_size;
  int k_unit, v_unit;  // 16 where everything is aligned for it, else element bytes
  int affine;
  const void *slots, *batch_indices, *positions;  // slots null: by batch index and position
  int slots_bytes, batch_indices_bytes, positions_bytes;
  Dtype dtype_new, dtype_cache;  // equal: rows are copied; else values / scale become fp8
  float k_scale, v_scale;
  int padding = 0;
  i64 slots_stride, batch_indices_stride, positions_stride;
  BlockTable table;
};

// kernels/read_all.cuh.
struct ReadAllCall {
  const void* data;  // num_units times 16 bytes, all zero
  i64 num_units;
  unsigned* found;
};

}  // namespace plait
