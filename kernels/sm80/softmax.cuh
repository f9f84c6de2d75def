// What happens to logits between the two products, whatever the tile: functors and mask, the
// running maximum and sum of each row, weights. A thread keeps its rows' states; sums are its own
// part until state().
#pragma once
#include "host_device/mask_bits.h"
#include "host_device/scales.h"
#include "host_device/softmax_state.h"
#include "host_device/visibility.h"
#include "sm80/smem.cuh"

namespace plait::sm80 {

// Do all rows see all keys of the unit's j-th tile, unless a functor hides some? To be asked before
// the product whose logits it is about.
PLAIT_DEVICE bool is_full(const Unit& unit, int j) {
  const int index = unit.tiles[j];
  return index >= unit.full_tiles.begin && index < unit.full_tiles.end;
}

template <class Variant, class Tile>
struct Softmax {
  using Traits = VariantTraits<Variant>;
  static constexpr int kRows = Tile::kRows, kLogits = Tile::kLogits;
  static constexpr float kRescaleThreshold = rescale_threshold(Tile::kDtypeP);
  // The reference of a row that has seen no key: any logit outgrows it, and hidden ones weigh 0
  // against it without a condition.
  static constexpr float kNoKey = -__builtin_bit_cast(float, 0x7f7fffffu);

  float reference[kRows], sum[kRows];  // of weights: base 2; of this thread's

  // exp2(scale_log2 * s) are the weights of logits s as `transform` leaves them.
  static PLAIT_DEVICE float scale_log2(const Params& params) {
    return Traits::kHasLogitsTransform ? kLog2e
                                       : logit_scale<Variant, Tile::kDtypeKv>(params) * kLog2e;
  }

  PLAIT_DEVICE Softmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      reference[r] = kNoKey;
      sum[r] = 0.0f;
    }
  }

  // logits_transform, then -inf (without softmax: 0) for hidden keys.
  static PLAIT_DEVICE void transform(const VariantCall<Variant>& call, const Unit& unit,
                                     const RowInfo* rows, int j, int tile_kv, bool full,
                                     Tile& tile) {
    const Params& params = call.params;
    const int list_begin = unit.tiles[j] * tile_kv, k_pos = unit.kv_pos_begin + list_begin;
    if constexpr (Traits::kHasLogitsTransform || !Traits::kUseSoftmax) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const RowInfo row = rows[Tile::row(r)];
#pragma unroll
        for (int i = 0; i < kLogits; ++i) {
          float& s = tile.s[r][i];
          s *= logit_scale<Variant, Tile::kDtypeKv>(params);
          if constexpr (Traits::kHasLogitsTransform) {
            s = Variant::logits_transform(
                call.variant,
                {row.request, row.position, k_pos + Tile::key(i), row.qo_head, unit.kv_head,
                 Tile::kDtypeQ},
                s);
          }
        }
      }
    }
    if (!Traits::kHasLogitsMask && full) return;
    const int k_end = k_pos + unit.kv_end - list_begin;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowInfo row = rows[Tile::row(r)];
      VisibleRange range = visible_range(params.visible, row.position);
      range.end = min(range.end, k_end);
      constexpr int kWords = (Tile::kKeys + 31) / 32;  // of custom mask bits, 32 keys each
      unsigned words[kWords];
      if constexpr (Traits::kCustomMask) {
        const PlanView& plan = *params.plan;
        const TokenMask mask = plan.token_mask[row.token];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          words[w] = mask_word_at(plan.mask_words, mask, k_pos + Tile::first_key() + 32 * w);
        }
      }
#pragma unroll
      for (int i = 0; i < kLogits; ++i) {
        const int key = k_pos + Tile::key(i);
        bool shown = visible(range, key);
        if constexpr (Traits::kCustomMask) {
          shown &= words[i / Tile::kLogitsOfWord] >> (Tile::key(i) - Tile::first_key()) % 32 & 1;
        }
        if constexpr (Traits::kHasLogitsMask) {
          shown = shown && Variant::logits_mask(call.variant,
                                                {row.request, row.position, key, row.qo_head,
                                                 unit.kv_head, Tile::kDtypeQ});
        }
        if (!shown) tile.s[r][i] = Traits::kUseSoftmax ? kNegInf : 0.0f;
      }
    }
  }

  // References follow the rows' maxima where these have outgrown them, and sums and output stand
  // relative to them. The lanes of a row ask each other only when one of a warp's has found more.
  PLAIT_DEVICE void follow_maximum(const Params& params, Tile& tile) {
    if constexpr (!Traits::kUseSoftmax) return;
    float largest[kRows];
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float max_of[2] = {tile.s[r][0], tile.s[r][kLogits > 1 ? 1 : 0]};  // two chains: latency
#pragma unroll
      for (int i = 2; i < kLogits; ++i) max_of[i % 2] = fmaxf(max_of[i % 2], tile.s[r][i]);
      largest[r] = fmaxf(max_of[0], max_of[1]) * scale_log2(params);
      outgrown |= largest[r] - reference[r] > kRescaleThreshold;
    }
    if (!__any_sync(~0u, outgrown)) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int step = 1; step < Tile::kLanesOfRow; step *= 2) {
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], step));
      }
      float scale = 1.0f;
      if (largest[r] - reference[r] > kRescaleThreshold) {
        scale = exp2(reference[r] - largest[r]);
        reference[r] = largest[r];
      }
      sum[r] *= scale;
#pragma unroll
      for (int i = 0; i < Tile::kOutputs; ++i) tile.o[r][i] *= scale;
    }
  }

  // Logits first ... first + count - 1 of each row become weights.
  PLAIT_DEVICE void weigh(const Params& params, Tile& tile, int first, int count) {
    if constexpr (!Traits::kUseSoftmax) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = first; i < first + count; ++i) {
        tile.s[r][i] = exp2(fmaf(tile.s[r][i], scale_log2(params), -reference[r]));
        sum[r] += tile.s[r][i];
      }
    }
  }

  // State of row r over this warp's keys, the same on the lanes that share it.
  PLAIT_DEVICE SoftmaxState state(int r) const {
    float total = sum[r];
#pragma unroll
    for (int step = 1; step < Tile::kLanesOfRow; step *= 2) {
      total += __shfl_xor_sync(~0u, total, step);
    }
    return {reference[r] == kNoKey ? kNegInf : reference[r], total};
  }
};

}  // namespace plait::sm80
