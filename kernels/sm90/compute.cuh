// A consumer warpgroup's part of a unit: 64 packed rows against its tiles of K and V. S = Q K^T of
// the next tile is issued before O += P V of the last, so that softmax runs while the tensor cores
// do. Source of the overlap: FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608), section 3.2.
#pragma once
#include "host_device/mask_bits.h"
#include "host_device/scales.h"
#include "host_device/softmax_state.h"
#include "host_device/visibility.h"
#include "ptx/copy.cuh"
#include "ptx/pack.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/smem.cuh"

namespace plait::sm90 {

// A thread's two rows: lane / 4 and lane / 4 + 8 of its warp's 16.
struct ThreadRows {
  bool valid[2];
  int row[2], token[2], qo_head[2], request[2], position[2];
};

// The rows of this thread when its warpgroup takes rows row_begin ... of the unit's tile.
PLAIT_DEVICE ThreadRows thread_rows(const Params& params, const PlanView& plan, const Unit& unit,
                                    int row_begin) {
  ThreadRows rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_begin + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    rows.row[r] = row;
    rows.valid[r] = row < unit.num_rows;
    const PackedRow packed = row_of(params, plan.row_map, unit, rows.valid[r] ? row : 0);
    rows.token[r] = packed.token;
    rows.qo_head[r] = packed.qo_head;
    rows.request[r] = plan.token_request[packed.token];
    rows.position[r] = plan.token_position[packed.token];
  }
  return rows;
}

template <KernelConfig kConfig, class Variant>
struct Consumer {
  using R = Roles<kConfig, Variant>;
  using Traits = VariantTraits<Variant>;
  using Slot = RingSlot<kConfig.num_stages>;
  static constexpr int kTileKv = kConfig.tile_kv;
  static constexpr int kDimQk = padded_dim(kConfig.head_dim_qk);
  static constexpr int kDimVo = padded_dim(kConfig.head_dim_vo);
  using QkMma = ptx::Wgmma<kConfig.dtype_q, kTileKv>;
  using PvMma = ptx::Wgmma<kConfig.dtype_kv, kDimVo>;
  // A row's reference maximum follows its true one only when that has grown by more than this (base
  // 2), so that O is rarely rescaled; P stays below 2^8, exact in the final division.
  static constexpr float kRescaleThreshold = 8.0f;

  Smem<kConfig>& smem;
  const Params& params;
  const typename Variant::Params& variant;
  float scale_log2;  // exp2(scale_log2 * s) are the weights of logits s as `logits` leaves them

  float o[kDimVo / 2];         // O fragment, not normalised
  float max_logit[2], sum[2];  // of the two rows; sum is this thread's part until `reduce_sums`

  PLAIT_DEVICE void release_q() { release(&smem.q_empty); }

  // Before the first unit: the first turn is warpgroup 0's.
  PLAIT_DEVICE void start() {
    if (threadIdx.x >= 128) pass_turn();
  }

  // Runs tiles first, first + step, ... of the unit for rows [row_begin, + 64) of Q's buffer. Q is
  // released as soon as it has been read, but with split keys, whose join needs the buffer.
  PLAIT_DEVICE void run(const Unit& unit, const ThreadRows& rows, int row_begin, int first,
                        int step) {
    max_logit[0] = max_logit[1] = kNegInf;
    sum[0] = sum[1] = 0.0f;
    const int num_tiles = unit.tiles.size();
    if (first >= num_tiles) {
#pragma unroll
      for (int i = 0; i < kDimVo / 2; ++i) o[i] = 0.0f;
      if (step == 1) release_q();
      return;
    }
    const unsigned q_descriptor =
        uniform(k_major_descriptor(ptx::smem_address(smem.q) + row_begin * kPanelRowBytes));
    const TileList tiles = unit.tiles;
    const FullTiles full_tiles = unit.full_tiles;
    float s[kTileKv / 2];
    unsigned p[kTileKv / 4] = {};
    Slot slot(unit.first_tile + first), previous = slot;
    // The first round has no V to multiply with. A branch around a wgmma makes ptxas serialise them
    // all (C7520), a second loop body costs half a second of NVRTC; so P = 0 is multiplied with
    // what lies in Q's buffer, and the first accumulation after it starts from zero.
    unsigned v_descriptor = uniform(n_major_descriptor(ptx::smem_address(smem.q), kTileKv));
    ptx::Barrier* v_full = &smem.full_k[slot.stage];  // passed by then
    int accumulate = 0;
    for (int j = first; j < num_tiles; j += step) {
      const bool is_first = j == first, is_last = j + step >= num_tiles;
      const unsigned k_descriptor =
          uniform(k_major_descriptor(ptx::smem_address(smem.k[slot.stage])));
      wait_full(&smem.full_k[slot.stage], slot.parity, !R::kTransformK);
      if (step == 1) wait_turn();
      ptx::wgmma_fence();
      issue_qk(q_descriptor, k_descriptor, s);
      ptx::wgmma_commit();
      wait_full(v_full, previous.parity, !R::kTransformV);
      ptx::wgmma_fence();
      issue_pv(p, v_descriptor, accumulate);
      ptx::wgmma_commit();
      if (step == 1) pass_turn();
      const int tile = tiles[j];
      const bool full =
          !Traits::kHasLogitsMask && tile >= full_tiles.begin && tile < full_tiles.end;
      const MaskBits bits = mask_bits(rows, unit.kv_pos_begin + tile * kTileKv, full);
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_registers(s);
      release(&smem.empty_k[slot.stage], step);
      if (step == 1 && is_last && !is_first) release_q();
      logits(unit, rows, tile, full, s);
      if (!full) hide(bits, s);
      float scale[2];
      softmax(s, scale);
      ptx::wgmma_fence_registers(s);
      order_after(sum[0] + sum[1]);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_registers(o);
      if (!is_first) release(&smem.empty_v[previous.stage], step);
      if (step == 1 && is_last && is_first) release_q();
      rescale(scale);
      pack(s, p);
      v_descriptor = uniform(n_major_descriptor(ptx::smem_address(smem.v[slot.stage]), kTileKv));
      v_full = &smem.full_v[slot.stage];
      accumulate = !is_first;
      previous = slot;
      slot.advance(step);
    }
    wait_full(v_full, previous.parity, !R::kTransformV);
    ptx::wgmma_fence();
    issue_pv(p, v_descriptor, accumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(o);
    release(&smem.empty_v[previous.stage], step);
  }

  // The states of the two rows; their outputs are o, not normalised.
  PLAIT_DEVICE SoftmaxState state(int r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    return {max_logit[r] * scale_log2, sum[r]};
  }

 private:
  PLAIT_DEVICE void wait_full(ptx::Barrier* barrier, unsigned parity, bool direct) {
    ptx::mbarrier_wait(barrier, parity);
    // cp.async wrote through the generic proxy and nobody has fenced since.
    if (!R::kTma && direct) ptx::fence_proxy_async();
  }

  // The same value in every lane, which the compiler then keeps in a uniform register.
  static PLAIT_DEVICE unsigned uniform(unsigned x) { return __shfl_sync(~0u, x, 0); }

  // Two warpgroups with the same tiles issue in turns, so that one computes softmax while the
  // tensor cores work for the other; handed over at issue, not at completion (which is slower).
  static constexpr bool kTakesTurns = kConfig.num_consumer_warpgroups == 2;
  PLAIT_DEVICE void wait_turn() {
    if constexpr (kTakesTurns) ptx::named_barrier(kTurnBarrier + threadIdx.x / 128, 256);
  }
  PLAIT_DEVICE void pass_turn() {
    if constexpr (kTakesTurns) ptx::named_barrier_arrive(kTurnBarrier + 1 - threadIdx.x / 128, 256);
  }

  // ptxas moves a wgmma wait up over arithmetic that does not depend on it, which would put softmax
  // behind P V. It does not move it over a barrier, nor that over the computation of its number:
  // params.zero is 0, but only the host knows.
  PLAIT_DEVICE void order_after(float value) {
    ptx::named_barrier(kOrderBarrier + threadIdx.x / 128 + (__float_as_int(value) & params.zero),
                       128);
  }

  PLAIT_DEVICE void issue_qk(unsigned q_descriptor, unsigned k_descriptor,
                             float (&s)[kTileKv / 2]) {
#pragma unroll
    for (int k16 = 0; k16 < kDimQk / 16; ++k16) {
      QkMma::ss(s, descriptor(q_descriptor + (k_major_step(Smem<kConfig>::kTileQ, k16) >> 4)),
                descriptor(k_descriptor + (k_major_step(kTileKv, k16) >> 4)), k16 > 0);
    }
  }

  PLAIT_DEVICE void issue_pv(const unsigned (&p)[kTileKv / 4], unsigned v_descriptor,
                             int accumulate) {
#pragma unroll
    for (int k16 = 0; k16 < kTileKv / 16; ++k16) {
      PvMma::rs(o, &p[4 * k16], descriptor(v_descriptor + (n_major_step(k16) >> 4)),
                accumulate || k16 > 0);
    }
  }

  // A stage expects every consumer warp; one that has a stage to itself arrives for the others
  // (count: the unit's key split).
  PLAIT_DEVICE void release(ptx::Barrier* barrier, int count = 1) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier, count);
  }

  // Columns of a fragment: element i of a thread is row i / 2 % 2, column column_of(i).
  static PLAIT_DEVICE int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

  // Custom mask bits of this thread's elements of a tile, fetched while S is being computed.
  struct MaskBits {
    unsigned of_row[2];
  };
  PLAIT_DEVICE MaskBits mask_bits(const ThreadRows& rows, int k_pos, bool full) {
    unsigned first = 0, second = 0;
    if constexpr (Traits::kCustomMask) {
#pragma unroll 1  // both rows at once spill
      for (int r = full ? 2 : 0; r < 2; ++r) {
        const PlanView& plan = *params.plan;
        first = second;
        second = fragment_mask<(kTileKv + 31) / 32>(
            plan.mask_words, plan.token_mask[r == 0 ? rows.token[0] : rows.token[1]], k_pos,
            threadIdx.x % 4);
      }
    }
    return {{first, second}};
  }
  PLAIT_DEVICE void hide(const MaskBits& bits, float (&s)[kTileKv / 2]) {
    if constexpr (Traits::kCustomMask) {
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) {
        const bool shown = (bits.of_row[i / 2 % 2] & fragment_mask_bit(i / 4, i % 2)) != 0;
        if (!shown) s[i] = Traits::kUseSoftmax ? kNegInf : 0.0f;
      }
    }
  }

  // logits_transform, then -inf (without softmax: 0) for hidden keys.
  PLAIT_DEVICE void logits(const Unit& unit, const ThreadRows& rows, int tile, bool full,
                           float (&s)[kTileKv / 2]) {
    const int list_begin = tile * kTileKv;
    const int k_pos = unit.kv_pos_begin + list_begin;
    if constexpr (Traits::kHasLogitsTransform || !Traits::kUseSoftmax) {
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) {
        s[i] *= logit_scale<Variant, kConfig.dtype_kv>(params);
        if constexpr (Traits::kHasLogitsTransform) {
          s[i] = Variant::logits_transform(variant, context(unit, rows, k_pos, i), s[i]);
        }
      }
    }
    if (full) return;
    const int k_end = k_pos + unit.kv_end - list_begin;
    VisibleRange range[2] = {visible_range(params.visible, rows.position[0]),
                             visible_range(params.visible, rows.position[1])};
    range[0].end = min(range[0].end, k_end);
    range[1].end = min(range[1].end, k_end);
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      bool shown = visible(range[i / 2 % 2], k_pos + column_of(i));
      if constexpr (Traits::kHasLogitsMask) {
        shown = shown && Variant::logits_mask(variant, context(unit, rows, k_pos, i));
      }
      if (!shown) s[i] = Traits::kUseSoftmax ? kNegInf : 0.0f;
    }
  }

  PLAIT_DEVICE LogitContext context(const Unit& unit, const ThreadRows& rows, int k_pos, int i) {
    const int r = i / 2 % 2;
    const float first = static_cast<float>(k_pos + column_of(0) - rows.position[r]);
    return {rows.request[r], rows.position[r], k_pos + column_of(i),
            rows.qo_head[r], unit.kv_head,     first + static_cast<float>(i / 4 * 8 + i % 2)};
  }

  // s becomes weights relative to the rows' reference maxima; `scale` is what O must be multiplied
  // with to stand relative to them.
  PLAIT_DEVICE void softmax(float (&s)[kTileKv / 2], float (&scale)[2]) {
    if constexpr (!Traits::kUseSoftmax) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max_of[2] = {kNegInf, kNegInf};  // two chains: latency, not rate, is what they cost
#pragma unroll
      for (int i = 2 * r; i < kTileKv / 2; i += 4) {
        max_of[0] = fmaxf(max_of[0], s[i]);
        max_of[1] = fmaxf(max_of[1], s[i + 1]);
      }
      float tile_max = fmaxf(max_of[0], max_of[1]);
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 2));
      scale[r] = 1.0f;
      if ((tile_max - max_logit[r]) * scale_log2 >
          kRescaleThreshold) {  // false while both are -inf
        scale[r] = exp2((max_logit[r] - tile_max) * scale_log2);
        max_logit[r] = tile_max;
        sum[r] *= scale[r];
      }
      const float offset = max_logit[r] == kNegInf ? 0.0f : max_logit[r] * scale_log2;
      float sum_of[2] = {sum[r], 0.0f};
#pragma unroll
      for (int i = 2 * r; i < kTileKv / 2; i += 4) {
        s[i] = exp2(fmaf(s[i], scale_log2, -offset));
        s[i + 1] = exp2(fmaf(s[i + 1], scale_log2, -offset));
        sum_of[0] += s[i];
        sum_of[1] += s[i + 1];
      }
      sum[r] = sum_of[0] + sum_of[1];
    }
  }

  PLAIT_DEVICE void rescale(const float (&scale)[2]) {
    if constexpr (!Traits::kUseSoftmax) return;
    // Multiplying by 1 changes nothing: a warp skips it where no row moved.
    if (!__any_sync(~0u, scale[0] != 1.0f || scale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kDimVo / 2; ++i) o[i] *= scale[i / 2 % 2];
  }

  // The accumulator fragment of S is the A fragment of P, two columns a register.
  PLAIT_DEVICE void pack(const float (&s)[kTileKv / 2], unsigned (&p)[kTileKv / 4]) {
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) {
      p[i] = ptx::pack2<kConfig.dtype_kv>(s[2 * i], s[2 * i + 1]);
    }
  }
};

}  // namespace plait::sm90
