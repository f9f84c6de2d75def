// What the sm90a kernel is launched with: how its loaders find K and V, the common Params and the
// variant's own.
#pragma once
#include "host_device/config.h"
#include "host_device/kv_address.h"

namespace plait {

struct alignas(64) TensorMap {  // CUtensorMap
  unsigned long long opaque[16];
};

// Maps: dimensions (head_dim, row in page, kv head, page), affine tensors are one page; box
// {64, box_rows, 1, 1}; 128-byte swizzle. Unused by the gather loader, which has units.
struct Sm90Maps {
  TensorMap k, v;
  int box_rows;  // affine: tile_kv; paged: divides page and tile, a multiple of 8
  Divisor block_size;
  RowUnits k_units, v_units;
};

template <class Variant>
struct Sm90Call {
  Sm90Maps maps;
  Params params;
  typename Variant::Params variant;
};

}  // namespace plait
