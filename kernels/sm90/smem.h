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
PLAIT_HD constexpr bool splits_keys(const KernelConfig& c) {
  for (int i = 0; i < c.num_shapes; ++i) {
    if (c.shapes[i].key_split > 1) return true;
  }
  return false;
}
inline constexpr int kBarrierBytes = 512;  // barriers, and the two units; rounded up
PLAIT_HD constexpr int num_threads(const KernelConfig& c) {
  return (c.num_consumer_warpgroups + 1) * 128;
}

}  // namespace plait::sm90

namespace plait {

PLAIT_HD constexpr int sm90_smem_bytes(const KernelConfig& c) {
  const int q = sm90::tile_bytes(sm90::tile_q(c), c.head_dim_qk);
  const int kv = c.num_stages * (sm90::tile_bytes(c.tile_kv, c.head_dim_qk) +
                                 sm90::tile_bytes(c.tile_kv, c.head_dim_vo));
  const int rest = sm90::tile_q(c) * 4 + sm90::kBarrierBytes;  // scratch, units, barriers
  return (q + kv + rest + 1023) / 1024 * 1024;
}

}  // namespace plait
