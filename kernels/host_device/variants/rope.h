// Rotary position embedding of Q and K, by their absolute positions, for caches that hold K as it
// was projected. Source: Su et al., 2021, arXiv:2104.09864.
#pragma once
#include "host_device/row.h"
#include "host_device/variant.h"

namespace plait {

// kRotaryDim: the first elements of a head, which are turned; 0: all of it.
template <Pairing kPairing, int kRotaryDim>
struct Rope {
  struct Params {
    alignas(8) const TurnsPerPosition* rotations;  // a RotationTable of rotary_dim / 2 pairs
  };
  template <class Row>
  PLAIT_HD static void query_transform(const Params& p, const RowContext& c, Row& row) {
    row.template rotate<kPairing, kRotaryDim>(c.position, p.rotations);
  }
  template <class Row>
  PLAIT_HD static void key_transform(const Params& p, const RowContext& c, Row& row) {
    row.template rotate<kPairing, kRotaryDim>(c.position, p.rotations);
  }
};

}  // namespace plait
