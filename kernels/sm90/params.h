// What the sm90a kernel is launched with: tensor maps of K and V for the affine loader, the common
// Params and the variant's own.
#pragma once
#include "host_device/config.h"

namespace plait {

struct alignas(64) TensorMap {  // CUtensorMap
  unsigned long long opaque[16];
};

// Maps: dimensions (head_dim, kv head, row); box {64, 1, tile_kv}; 128-byte swizzle.
struct Sm90Maps {
  TensorMap k, v;
};

template <class Variant>
struct Sm90Call {
  Sm90Maps maps;  // unused by the gather loader
  Params params;
  typename Variant::Params variant;
};

}  // namespace plait
