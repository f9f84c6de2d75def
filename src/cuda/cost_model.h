// What a tile costs, in microseconds: constants of the planner for each kernel, from times on one
// H200 (132 multiprocessors, bfloat16, 32/8 heads, head_dim 128; `plait bench prefill|decode`),
// never measured at run time.
#pragma once
#include "host_device/config.h"
#include "plait/plan.h"

namespace plait::cuda {

struct KernelCost {
  float fixed_us[2];    // by shape. Starting an item: Q, first loads, mask, epilogue
  float us_per_key[2];  // by shape, of the whole tile
  float merge_us;       // a partial tile: writing, arriving, joining
  int min_split_keys;   // a shorter piece costs more than it saves
};

// Shape 0, 128 rows: 4 x 4096 tokens in 1110 us causal (2112 keys a tile on average) and 1958 us
//   full (4096), 31 tiles a CTA: 35.8 and 63.1 us a tile.
// Shape 1, 64 rows with split keys: 64 x 4096 decoded in 288 us, 3.9 tiles a CTA. Starting and
//   joining are mostly hidden, since the loads of the next item go on: 1 and 1.5 us are estimates
//   (with 2.5 and 2.5, 15 x 4096 would stay unsplit and leave every tenth CTA idle).
inline constexpr KernelCost kSm90MixedCost{{6.7f, 1.0f}, {0.0138f, 0.0175f}, 1.5f, 256};
// 64 x 4096 in 264 us, 1.94 tiles a CTA.
inline constexpr KernelCost kSm90DecodeCost{{1.0f, 0.0f}, {0.0322f, 0.0f}, 1.5f, 256};
// 16 rows on CUDA cores, four CTAs a multiprocessor: a guess, for balance alone.
inline constexpr KernelCost kPlainCost{{3.0f, 0.0f}, {0.06f, 0.0f}, 3.0f, 128};

inline const KernelCost& cost_of(const KernelConfig& config) {
  if (config.shapes[0].mma == Mma::kScalar) return kPlainCost;
  return config.ctas_per_sm > 1 ? kSm90DecodeCost : kSm90MixedCost;
}

}  // namespace plait::cuda
