// Row accessor of the row transforms: one row of Q, K or V, held by a group of lanes (one on the
// CPU), with element access by natural index whatever the storage (plain, swizzled). A transform
// is written with these members and nothing else:
//   row.dim                              elements in the row
//   row.map(f)                           x[i] = f(i, x[i])
//   row.map_half_pairs(f)                f(i, x[i], x[i + dim / 2]) by reference, i < dim / 2
//   row.map_adjacent_pairs(f)            f(i, x[2 i], x[2 i + 1]) by reference, i < dim / 2
//   row.sum(f)                           sum over i of f(i, x[i]), the same on every lane
//   row.rotate<kPairing, kNum>(p, memory) the first kNum elements' pairs turned by position p's
//                                        angles; kNum 0: the whole row. memory: a RotationTable's
// Storage has get(i) -> float and set(i, float). The tensor-core kernels have an accessor of
// their own with the same members (tile/register_row.cuh).
#pragma once
#include "host_device/rotation.h"

namespace plait {

template <class Storage, int kDim, int kNumLanes>
struct Row {
  static constexpr int dim = kDim;
  Storage storage;
  int lane;        // 0 ... kNumLanes - 1
  unsigned mask;   // the group's lanes within the warp; unused for kNumLanes 1

  template <class F>
  PLAIT_HD void map(F f) {
    for (int i = lane; i < kDim; i += kNumLanes) storage.set(i, f(i, storage.get(i)));
    sync();
  }
  template <class F>
  PLAIT_HD void map_half_pairs(F f) {
    for (int i = lane; i < kDim / 2; i += kNumLanes) map_pair(i, i, i + kDim / 2, f);
    sync();
  }
  template <class F>
  PLAIT_HD void map_adjacent_pairs(F f) {
    for (int i = lane; i < kDim / 2; i += kNumLanes) map_pair(i, 2 * i, 2 * i + 1, f);
    sync();
  }
  template <class F>
  PLAIT_HD float sum(F f) {
    float total = 0.0f;
    for (int i = lane; i < kDim; i += kNumLanes) total += f(i, storage.get(i));
#if defined(__CUDA_ARCH__)
    for (int step = kNumLanes / 2; step > 0; step /= 2) {
      total += __shfl_xor_sync(mask, total, step);
    }
#endif
    return total;
  }

  template <Pairing kPairing, int kNum>
  PLAIT_HD void rotate(int position, const TurnsPerPosition* turns) {
    constexpr int kPairs = (kNum == 0 ? kDim : kNum) / 2;
    for (int i = lane; i < kPairs; i += kNumLanes) {
      const CosSin r = cos_sin(turn_at(turns[i], position));
      constexpr bool kHalf = kPairing == Pairing::kHalf;
      map_pair(i, kHalf ? i : 2 * i, kHalf ? i + kPairs : 2 * i + 1,
               [&](int, float& x, float& y) { rotate_pair(r, x, y); });
    }
    sync();
  }

 private:
  template <class F>
  PLAIT_HD void map_pair(int i, int first, int second, F f) {
    float a = storage.get(first), b = storage.get(second);
    f(i, a, b);
    storage.set(first, a);
    storage.set(second, b);
  }
  PLAIT_HD void sync() {  // the next call may give a lane another lane's elements
#if defined(__CUDA_ARCH__)
    if constexpr (kNumLanes > 1) __syncwarp(mask);
#endif
  }
};

}  // namespace plait
