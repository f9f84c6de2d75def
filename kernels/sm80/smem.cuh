// The sm80 kernel's shared memory, and a unit of work.
#pragma once
#include "host_device/convert.h"
#include "host_device/softmax_state.h"
#include "host_device/tile_list.h"
#include "host_device/variant.h"
#include "ptx/cp_async.cuh"
#include "sm80/layout.h"
#include "tile/rows.cuh"

namespace plait::sm80 {

// A packed row of the unit's tile. Rows beyond the item's are as its first.
struct alignas(16) RowInfo {
  int token, qo_head, request, position;
};

// One item and one of its kv heads, and where the keys of its row block are found. It stays in
// shared memory: registers are short.
struct Unit {
  BlockTable table;
  i64 first_entry;             // of the table
  const unsigned char *k, *v;  // the kv head's row of block 0; affine: of the list's first key
  int item_index, head;        // of the plan; of the item
  int kv_head, num_rows, kv_end, kv_pos_begin;
  TileList tiles;
  int num_tiles;
  FullTiles full_tiles;
  int request;  // of the keys, for transforms
  int drawn;    // of next_item
  int chunk;    // invariant mode: of the item's chunks
};
static_assert(sizeof(Unit) <= kUnitBytes);

template <KernelConfig kConfig, bool kHas = (kConfig.num_wide_tiles > 0)>
struct WideTile {};
template <KernelConfig kConfig>
struct WideTile<kConfig, true> {
  unsigned char wide[wide_tile_bytes(kConfig)];
};
template <KernelConfig kConfig>
struct Ring : WideTile<kConfig> {
  static constexpr int kTileKv = kConfig.tile_kv;
  unsigned char k[kConfig.num_stages][kTileKv * row_bytes(kConfig.head_dim_qk, kConfig.dtype_kv)];
  unsigned char v[kConfig.num_stages][kTileKv * row_bytes(kConfig.head_dim_vo, kConfig.dtype_kv)];
};
// What lies where products read K and V, and what is multiplied: fp8 becomes float16 in an
// instruction for two, bfloat16 in four, and Q's numbers can be float16's too.
PLAIT_HD constexpr Dtype read_dtype(const KernelConfig& c) {
  return c.num_wide_tiles > 0 ? c.dtype_q : c.dtype_kv;
}
PLAIT_HD constexpr Dtype product_dtype(const KernelConfig& c) {
  return is_fp8(read_dtype(c)) ? Dtype::kFloat16 : c.dtype_q;
}

template <KernelConfig kConfig>
struct alignas(128) Smem {
  static constexpr int kTileQ = max_tile_q(kConfig);
  static constexpr int kBlockRows = kTileQ < kSliceRows ? kTileQ : kSliceRows;
  struct Slice {  // of the output
    float x[kBlockRows][kSliceStride];
  };
  // Tiles start at multiples of 128 bytes: MmaTile::advance.
  alignas(128) unsigned char q[kTileQ * row_bytes(kConfig.head_dim_qk)];
  union {
    alignas(128) Ring<kConfig> ring;
    Slice slices[kConfig.num_warps];  // once the last tile is read
  };
  RowInfo rows[kTileQ];
  float q_scales[kTileQ];  // fp8 K: Loader::arrange_q
  union {
    const unsigned char* addresses[kConfig.num_stages + 1][2][kConfig.tile_kv];  // of rows of K, V
    float factors[num_states(kConfig)];  // of outputs, as states lie; once the last tile is read
  };
  SoftmaxState states[num_states(kConfig)];  // [key split][row of the shape's tile]
  Unit unit;
  int merging[merge_scratch(kTileQ)];
};

}  // namespace plait::sm80
