// What the tiles of a kernel cost by the planner's model (PlanTarget), and costs that somebody has
// measured on the GPU at hand, with `plait tune`, in place of those that are shipped.
#pragma once
#include <map>
#include <string>

namespace plait {

// Microseconds, of head dims 128 and K and V of 16 bits.
struct KernelCost {
  float fixed_us[2] = {0, 0};    // by shape. Starting an item: Q, first loads, mask, epilogue
  float us_per_key[2] = {0, 0};  // by shape, of the whole tile
  float merge_us = 0;            // a partial tile: writing, arriving, joining
  int min_split_keys = 0;        // a shorter piece costs more than it saves; 0: as shipped
};

// Costs decide cuts and cuts decide bits: equal lengths give equal plans where these are equal too.
struct TunedCosts {
  std::string name;  // appears in the plans (Plan::cost_model)
  std::string arch;  // of the GPU, as "90a"; on another one they are refused
  // By kind: "sm90 mixed" (shapes of 128 and 64 rows), "sm90 wide" (192 and 64), "sm90 decode" (one
  // shape), "sm80" (of 128 rows, scaled to those of more than 32; of fewer). Others: as shipped.
  std::map<std::string, KernelCost> kernels;
};

}  // namespace plait
