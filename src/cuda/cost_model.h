// What a tile costs, in microseconds: constants of the planner for each kernel. First guesses for
// an H200 (4.4 TB/s of KV reads, about 600 TFLOP/s), to be replaced by measurements; never measured
// at run time.
#pragma once
#include "host_device/config.h"
#include "plait/plan.h"

namespace plait::cuda {

struct KernelCost {
  float fixed_us;       // starting an item: Q, first loads, epilogue
  float us_per_key[2];  // by shape, of the whole tile
  float merge_us;       // a partial tile: writing, arriving, joining
  int min_split_keys;   // a shorter piece costs more than it saves
};

//                              fixed  us/key of shapes 0, 1        merge  min split
// 128 x 128 tile: 1.7 us at the tensor cores' rate.
// 64 rows, keys split over two warpgroups: 0.45 us per 64 keys of compute, but 0.0155 us to
//   read a key's 512 bytes with 1/132 of the bandwidth: the larger.
inline constexpr KernelCost kSm90MixedCost{1.0f, {0.0133f, 0.0155f}, 1.5f, 256};
// 512 bytes a key with 1/264 of the bandwidth.
inline constexpr KernelCost kSm90DecodeCost{1.0f, {0.031f, 0.0f}, 1.5f, 256};
// 16 rows x 128 elements on CUDA cores, four CTAs a multiprocessor. Not tuned.
inline constexpr KernelCost kPlainCost{3.0f, {0.06f, 0.0f}, 3.0f, 128};

inline const KernelCost& cost_of(const KernelConfig& config) {
  if (config.shapes[0].mma == Mma::kScalar) return kPlainCost;
  return config.ctas_per_sm > 1 ? kSm90DecodeCost : kSm90MixedCost;
}

}  // namespace plait::cuda
