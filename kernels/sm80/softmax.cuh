// What happens to logits between the two products, whatever the tile: functors and mask, the
// running maximum and sum of each row, weights. A thread keeps its rows' states; sums are its own
// part until state().
#pragma once
#include "host_device/mask_bits.h"
#include "host_device/scales.h"
#include "host_device/visibility.h"
#include "sm80/smem.cuh"

namespace plait::sm80 {

template <class Variant, class Tile>
struct Softmax {
  using Traits = VariantTraits<Variant>;
  static constexpr int kRows = Tile::kRows, kLogits = Tile::kLogits;
  // A row's reference maximum follows its true one only when that has grown by more than this (base
  // 2), so that O is rarely rescaled; P stays below 2^8, exact in the final division.
  static constexpr float kRescaleThreshold = 8.0f;

  float max_logit[kRows], sum[kRows];

  // exp2(scale_log2 * s) are the weights of logits s as `transform` leaves them.
  static PLAIT_DEVICE float scale_log2(const Params& params) {
    return Traits::kHasLogitsTransform ? kLog2e
                                       : logit_scale<Variant, Tile::kDtypeKv>(params) * kLog2e;
  }

  PLAIT_DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      max_logit[r] = kNegInf;
      sum[r] = 0.0f;
    }
  }

  // logits_transform, then -inf (without softmax: 0) for hidden keys of the unit's j-th tile.
  static PLAIT_DEVICE void transform(const VariantCall<Variant>& call, const Unit& unit,
                                     const RowInfo* rows, int j, int tile_kv, Tile& tile) {
    const Params& params = call.params;
    const int index = unit.tiles[j], list_begin = index * tile_kv;
    const int k_pos = unit.kv_pos_begin + list_begin;
    const bool full =
        !Traits::kHasLogitsMask && index >= unit.full_tiles.begin && index < unit.full_tiles.end;
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
                {row.request, row.position, k_pos + Tile::key(i), row.qo_head, unit.kv_head}, s);
          }
        }
      }
    }
    if (full) return;
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
          shown = shown && Variant::logits_mask(call.variant, {row.request, row.position, key,
                                                               row.qo_head, unit.kv_head});
        }
        if (!shown) tile.s[r][i] = Traits::kUseSoftmax ? kNegInf : 0.0f;
      }
    }
  }

  // Logits become weights relative to the rows' reference maxima, and the output stands relative
  // to them.
  PLAIT_DEVICE void weigh(const Params& params, Tile& tile) {
    if constexpr (Traits::kUseSoftmax) {
      float scale[kRows];
      bool any = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        scale[r] = update(scale_log2(params), tile.s[r], max_logit[r], sum[r]);
        any |= scale[r] != 1.0f;
      }
      // Multiplying by 1 changes nothing: a warp skips it where no row moved.
      if (!__any_sync(~0u, any)) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < Tile::kOutputs; ++i) tile.o[r][i] *= scale[r];
      }
    }
  }

  // State of row r over this warp's keys, the same on the lanes that share it.
  PLAIT_DEVICE SoftmaxState state(const Params& params, int r) const {
    float total = sum[r];
#pragma unroll
    for (int step = 1; step < Tile::kLanesOfRow; step *= 2) {
      total += __shfl_xor_sync(~0u, total, step);
    }
    return {max_logit[r] * scale_log2(params), total};
  }

 private:
  // Returns what the row's output must be multiplied with.
  static PLAIT_DEVICE float update(float scale_log2, float (&s)[kLogits], float& max_logit,
                                   float& sum) {
    float max_of[2] = {kNegInf, kNegInf};  // two chains: latency, not rate, is what they cost
#pragma unroll
    for (int i = 0; i < kLogits; ++i) max_of[i % 2] = fmaxf(max_of[i % 2], s[i]);
    float tile_max = fmaxf(max_of[0], max_of[1]);
#pragma unroll
    for (int step = 1; step < Tile::kLanesOfRow; step *= 2) {
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, step));
    }
    float scale = 1.0f;
    // False while both are -inf, true for the first finite one.
    if ((tile_max - max_logit) * scale_log2 > kRescaleThreshold) {
      scale = exp2((max_logit - tile_max) * scale_log2);
      max_logit = tile_max;
      sum *= scale;
    }
    const float offset = max_logit == kNegInf ? 0.0f : max_logit * scale_log2;
    float sum_of[2] = {sum, 0.0f};
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      s[i] = exp2(fmaf(s[i], scale_log2, -offset));
      sum_of[i % 2] += s[i];
    }
    sum = sum_of[0] + sum_of[1];
    return scale;
  }
};

}  // namespace plait::sm80
