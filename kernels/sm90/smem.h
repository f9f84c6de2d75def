// Sizes of the sm90a kernel's shared memory, from the configuration alone; used by the kernel's
// struct (checked there by static_assert) and by the host for the launch.
#pragma once
#include "sm90/layout.h"

namespace plait::sm90 {

PLAIT_HD constexpr int tile_q(const KernelConfig& c) {  // rows of Q's buffer: the largest shape's
  int rows = 0;
  for (int i = 0; i < c.num_shapes; ++i)
    rows = c.shapes[i].tile_q > rows ? c.shapes[i].tile_q : rows;
  return rows;
}
PLAIT_HD constexpr int key_split(const KernelConfig& c) {  // of the shape that splits them, or 1
  int split = 1;
  for (int i = 0; i < c.num_shapes; ++i)
    split = c.shapes[i].key_split > split ? c.shapes[i].key_split : split;
  return split;
}
PLAIT_HD constexpr bool splits_keys(const KernelConfig& c) { return key_split(c) > 1; }
// Whether K and V are copied by a warp each, and so independently of each other: pages.
PLAIT_HD constexpr bool loads_apart(const KernelConfig& c) {
  return c.loader == Loader::kPaged && !is_fp8(c.dtype_kv);
}
// Producers are at most two units ahead of the one that consumers store.
inline constexpr int kUnits = 3, kUnitBytes = 96;
// The next item is drawn when this many tiles of the unit before are still to be loaded: 4 us in
// decode, and 3 pass until the item, its row block and its first block's number are known.
inline constexpr int kTilesBeforeDraw = 2;
// Kernels of few rows merge what several units left together (store.cuh): tokens and kv heads, of
// which a consumer warp keeps a list meanwhile.
inline constexpr int kMergedTogether = 32;
PLAIT_HD constexpr bool merges_together(const KernelConfig& c) { return tile_q(c) <= 64; }
PLAIT_HD constexpr int num_pending(const KernelConfig& c) {
  return merges_together(c) ? kMergedTogether + tile_q(c) : 1;
}
// Whether final rows leave by way of their unit's buffer of Q, from which stores write whole rows;
// they leave from the fragment in kernels of few rows, where the next unit's Q is in that buffer,
// and where rows of V are wider than its rows.
PLAIT_HD constexpr bool stages_rows(const KernelConfig& c) {
  return tile_q(c) > 64 && c.num_q_stages > 1 &&
         panels_of(c.head_dim_vo) <= panels_of(c.head_dim_qk);
}
// Of the ring that fp8 K and V land in, up to a multiple of what tiles are aligned to.
PLAIT_HD constexpr int landing_bytes(const KernelConfig& c) {
  const int bytes = c.num_landing_stages * c.tile_kv * (c.head_dim_qk + c.head_dim_vo);
  return (bytes + 1023) / 1024 * 1024;
}
PLAIT_HD constexpr int num_threads(const KernelConfig& c) {
  return (c.num_consumer_warpgroups + 1) * 128;
}

}  // namespace plait::sm90

namespace plait {

PLAIT_HD constexpr int sm90_smem_bytes(const KernelConfig& c) {
  const int q = c.num_q_stages * sm90::tile_bytes(sm90::tile_q(c), c.head_dim_qk);
  const int kv = c.num_stages * (sm90::tile_bytes(c.tile_kv, c.head_dim_qk) +
                                 sm90::tile_bytes(c.tile_kv, c.head_dim_vo));
  const int states = 64 * c.num_consumer_warpgroups * 8;
  const int units = sm90::kUnits * sm90::kUnitBytes + int{sizeof(CtaStart)} +
                    c.num_q_stages * sm90::tile_q(c) * 4 + 4 * (8 + 8 * sm90::num_pending(c));
  const int raw = is_fp8(c.dtype_kv) ? 2 * c.num_landing_stages : c.num_stages;
  const int barriers = (4 * c.num_stages + 2 * raw + 2 * c.num_q_stages + 3 * sm90::kUnits) * 8;
  return (sm90::landing_bytes(c) + q + kv + states + units + barriers + 1023) / 1024 * 1024;
}

}  // namespace plait
