// What a tile costs, in microseconds: constants of the planner for each kernel, from times on one
// H200 (132 multiprocessors, bfloat16, 32/8 heads, head_dim 128; `plait bench prefill|decode`),
// never measured at run time. `plait tune` measures them on another GPU: TunedCosts, which a user
// may give in their place.
#pragma once
#include "host_device/config.h"
#include "host_device/convert.h"
#include "plait/kernel_cost.h"

namespace plait::cuda {

// Shape 0, 128 rows: 4 x 4096 tokens in 1110 us causal (2112 keys a tile on average) and 1958 us
//   full (4096), 31 tiles a CTA: 35.8 and 63.1 us a tile.
// Shape 1, 64 rows with split keys: 64 x 4096 decoded in 288 us, 3.9 tiles a CTA. Starting and
//   joining are mostly hidden, since the loads of the next item go on: 1 and 1.5 us are estimates
//   (with 2.5 and 2.5, 15 x 4096 would stay unsplit and leave every tenth CTA idle).
inline constexpr KernelCost kSm90MixedCost{{6.7f, 1.0f}, {0.0138f, 0.0175f}, 1.5f, 256};
// The same beside a third warpgroup, 192 rows: 4 x 4096 tokens in 993 us causal (2150 keys a tile
//   on average), 20.9 tiles a CTA: 47.5 us a tile. Shape 1 with two of them splitting the keys: 66
//   CTAs with 30500 keys each of 63 x 4096 decoded, beside 66 with a chunk of 2048, in 419 us.
inline constexpr KernelCost kSm90WideCost{{4.0f, 1.0f}, {0.0203f, 0.0136f}, 1.5f, 256};
// Where all three split the keys: a third less, and some of it given back; an estimate.
inline constexpr float kThreePartsOfKeys = 0.73f;
// 64 x 4096 in 264 us, 1.94 tiles a CTA; later 246, and 250 in equal shares. By time lines of CTAs
// one more part costs a CTA 6.7 us there beside its keys, 5.7 in 16 x U(512, 1024), and one more
// whole unit of 16 keys 4 in 16 x Zipf 1k.
inline constexpr KernelCost kSm90DecodeCost{{3.5f, 0.0f}, {0.0322f, 0.0f}, 2.5f, 256};
// The same for tiles of 64 rows, of which a CTA has many short ones behind a shared prefix, whose
// starts are hidden: 64 x (8192 + 256) 51.8 us, with 3.5 us for each 56.4.
inline constexpr float kSm90DecodeFixedUs64 = 1.0f;
// 16 rows on CUDA cores, four CTAs a multiprocessor: a guess, for balance alone.
inline constexpr KernelCost kPlainCost{{3.0f, 0.0f}, {0.06f, 0.0f}, 3.0f, 128};

// The sm80 template, from two rates that it was made for: 333 TFLOP/s with many rows (4 x 4096
// tokens), 4.2 TB/s with few (64 x 4096), shared by the CTAs of the multiprocessors.
inline KernelCost sm80_cost(const KernelConfig& config) {
  KernelCost cost{{0.0f, 0.0f}, {0.0f, 0.0f}, 1.5f, 256};
  const float ctas = 132.0f * config.ctas_per_sm;
  const float dims = static_cast<float>(config.head_dim_qk + config.head_dim_vo);
  for (int i = 0; i < config.num_shapes; ++i) {
    const float flop = 2 * dims * config.shapes[i].tile_q;
    const float bytes = static_cast<float>(bytes_of(config.dtype_kv)) * dims;
    const float by_flop = flop * ctas / 333e6f, by_bytes = bytes * ctas / 4.2e6f;
    cost.us_per_key[i] = by_flop > by_bytes ? by_flop : by_bytes;
    cost.fixed_us[i] = config.shapes[i].tile_q > 32 ? 5.0f : 2.0f;
  }
  return cost;
}

// Of the keys of few rows, what CTAs draw as they are through, and the shortest piece of it. 128
// requests of Zipf lengths, 4096 on average, one H200, microseconds: 528 without a queue; 15 per
// cent in pieces of 256, 512, 1024 keys 517, 497, 493; 30 per cent 494, 489 of 512, 1024.
// 12 per cent of 512, on two slower chips: 506, 521; a fifth fewer pieces for the host to plan.
inline constexpr int kQueuePercent = 12, kMinQueuedKeys = 512;
// 16,000 keys a CTA as above; 8,000, which are 64 x 4096: 250 us without, 252 with a queue.
inline constexpr int kMinKeysForQueue = 12 * 1024;

// Keys and values that stay in L2 while many tiles read them.
inline constexpr long long kCacheBytes = 16 << 20;
inline long long cache_keys(const KernelConfig& config) {
  return kCacheBytes / (bytes_of(config.dtype_kv) * (config.head_dim_qk + config.head_dim_vo));
}

// Which constants a kernel has; the keys of TunedCosts.
inline const char* kernel_kind(const KernelConfig& config) {
  switch (template_of(config)) {
    case Template::kPlain:
      return "plain";
    case Template::kSm80:
      return "sm80";
    case Template::kSm90:
      break;
  }
  return config.ctas_per_sm > 1               ? "sm90 decode"
         : config.num_consumer_warpgroups > 2 ? "sm90 wide"
                                              : "sm90 mixed";
}

// The sm80 template where its costs were measured: of 128 rows and of few, for one CTA a
// multiprocessor. Tiles of other sizes by the same two rates as above, by FLOP and by byte.
inline KernelCost tuned_sm80_cost(const KernelConfig& config, const KernelCost& tuned) {
  KernelCost cost = sm80_cost(config);
  const float dims = static_cast<float>(config.head_dim_qk + config.head_dim_vo) / 256;
  for (int i = 0; i < config.num_shapes; ++i) {
    const int rows = config.shapes[i].tile_q;
    const float scale = rows > 32 ? rows / 128.0f : bytes_of(config.dtype_kv) / 2.0f;
    cost.us_per_key[i] =
        tuned.us_per_key[rows > 32 ? 0 : 1] * scale * dims * static_cast<float>(config.ctas_per_sm);
    cost.fixed_us[i] = tuned.fixed_us[rows > 32 ? 0 : 1];
  }
  cost.merge_us = tuned.merge_us;
  return cost;
}

// tuned: in place of what is shipped for its kind; null: there is none.
inline KernelCost cost_of(const KernelConfig& config, const KernelCost* tuned = nullptr) {
  KernelCost cost;
  switch (template_of(config)) {
    case Template::kPlain:
      return kPlainCost;
    case Template::kSm80:
      return tuned != nullptr ? tuned_sm80_cost(config, *tuned) : sm80_cost(config);
    case Template::kSm90:
      cost = config.ctas_per_sm > 1               ? kSm90DecodeCost
             : config.num_consumer_warpgroups > 2 ? kSm90WideCost
                                                  : kSm90MixedCost;
      if (config.ctas_per_sm > 1 && config.shapes[0].tile_q == 64) {
        cost.fixed_us[0] = kSm90DecodeFixedUs64;
      }
  }
  if (tuned != nullptr) {
    const int min_split_keys = cost.min_split_keys;
    cost = *tuned;
    cost.min_split_keys = min_split_keys;
  }
  if (config.shapes[1].key_split > 2) cost.us_per_key[1] *= kThreePartsOfKeys;
  // Work and bytes of a key go with the head dims. (Softmax does not: below 128 a guess.)
  const float dims = static_cast<float>(config.head_dim_qk + config.head_dim_vo) / 256;
  for (float& us : cost.us_per_key) us *= dims;
  // Half the bytes of a key, where they are what it costs; how much less is a guess.
  if (is_fp8(config.dtype_kv) && config.ctas_per_sm > 1) cost.us_per_key[0] *= 0.6f;
  return cost;
}

}  // namespace plait::cuda
