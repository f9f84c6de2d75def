// A consumer warpgroup: 64 packed rows of each unit against its tiles of K and V, in one pipeline
// over all units. S = Q K^T of the next tile, be it the next unit's, is issued before O += P V of
// the last, so that softmax and stores run while the tensor cores do.
// Source of the overlap: FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608), section 3.2.
#pragma once
#include "host_device/mask_bits.h"
#include "host_device/scales.h"
#include "host_device/softmax_state.h"
#include "host_device/visibility.h"
#include "ptx/copy.cuh"
#include "ptx/memory_order.cuh"
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

// Row r of this thread among its warpgroup's 64.
PLAIT_DEVICE int row_of_thread(int r) {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
}

// The rows of this thread when its warpgroup takes rows row_begin ... of the unit's tile;
// `positions` of the tile's rows while they are at hand, then null.
PLAIT_DEVICE ThreadRows thread_rows(const Params& params, const PlanView& plan, const Unit& unit,
                                    const int* positions, int row_begin) {
  ThreadRows rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_begin + row_of_thread(r);
    rows.row[r] = row;
    rows.valid[r] = row < unit.num_rows;
    const int existing = rows.valid[r] ? row : 0;
    const PackedRow packed = row_of(params, plan.row_map, unit, existing);
    rows.token[r] = packed.token;
    rows.qo_head[r] = packed.qo_head;
    rows.request[r] = plan.token_request[packed.token];
    rows.position[r] =
        positions != nullptr ? positions[existing] : plan.token_position[packed.token];
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
  using PvMma = ptx::Wgmma<kConfig.dtype_q, kDimVo>;
  // Functors and mask bits want to know the rows in every round; else a position is read where a
  // mask is, and registers are for the loop.
  static constexpr bool kKeepsRows =
      Traits::kHasLogitsTransform || Traits::kHasLogitsMask || Traits::kCustomMask;
  // One of so many columns is transformed without powers where it may be: both units that compute
  // are busy then. Soft cap, 4 x 4096 causal, microseconds: none 1300, of 4 1325, of 3 1276, of 2
  // 1290, all 1320.
  static constexpr int kShareWithoutPowers = 3;
  // Whether the O of a unit without keys is looked at: where it is joined, or nothing tells that
  // the unit is empty.
  static constexpr bool kClearsO = splits_keys(kConfig) || !Traits::kUseSoftmax;

  Smem<kConfig>& smem;
  const Params& params;
  const typename Variant::Params& variant;
  float scale_log2;  // exp2(scale_log2 * s) are the weights of logits s as `logits` leaves them

  float o[kDimVo / 2];         // O fragment, not normalised
  float max_logit[2], sum[2];  // of the two rows; sum is this thread's part

  PLAIT_DEVICE void release_q(unsigned u) { release(&smem.q_empty[u % Smem<kConfig>::kQStages]); }
  PLAIT_DEVICE const Unit& unit_of(unsigned u) { return smem.units[u % kUnits]; }

  // The whole pipeline. A round issues S of one tile and P V of the one before. Every unit has a
  // round at least: one without tiles for this warpgroup computes on whatever lies in the ring and
  // hides all of it; so does the end, whose round serves the last unit's P V. So no wgmma is behind
  // a branch, which would make ptxas serialise them all (C7520), and the loop is there once (a
  // second body costs half a second of NVRTC).
  // store(u): called with unit u's output in o and its states where `state` finds them.
  template <class Store>
  PLAIT_DEVICE void run(Store&& store) {
    constexpr int kQStages = Smem<kConfig>::kQStages;
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 1) pass_turn();  // the first turn is warpgroup 0's
    float s[kTileKv / 2];
    unsigned p[kTileKv / 4] = {};  // of the tile before; and its V:
    Slot previous(0);
    bool previous_none = true;  // there was no tile
    int previous_step = 1, accumulate = 0;
    ThreadRows rows{};
    for (unsigned u = 0;; ++u) {
      ptx::mbarrier_wait(&smem.q_full[u % kQStages], u / kQStages & 1);
      const Unit& unit = unit_of(u);
      const bool is_end = uniform(unit.item == nullptr);
      // key_split 1: own rows, every tile. Else: the same rows, every key_split-th tile; none for
      // further warpgroups.
      const int step = uniform(unit.key_split);
      const int num_tiles = uniform(unit.tiles.size());
      const int first = step == 1 ? 0 : warpgroup < step ? warpgroup : num_tiles;
      const int row_begin = step == 1 ? 64 * warpgroup : 0;
      const bool none = first >= num_tiles;
      const unsigned q_descriptor = uniform(
          k_major_descriptor(ptx::smem_address(smem.q[u % kQStages]) + row_begin * kPanelRowBytes));
      Slot slot(uniform(unit.first_tile) + first);
      for (int j = first;; j += step) {
        const bool is_first = j == first, is_last = j + step >= num_tiles;
        const unsigned k_descriptor =
            uniform(k_major_descriptor(ptx::smem_address(smem.k[slot.stage])));
        const unsigned v_descriptor =
            uniform(n_major_descriptor(ptx::smem_address(smem.v[previous.stage]), kTileKv));
        // A warpgroup's next tile may be more than num_stages on here: its wait would take the
        // phase before for its own, had not another seen the tile between.
        if (splits_keys(kConfig) && is_first && previous_step > 1) {
          ptx::named_barrier(kJoinReady, 128 * kConfig.num_consumer_warpgroups);
        }
        if (!none) wait_full(&smem.full_k[slot.stage], slot.parity, !R::kTransformK);
        if (step == 1) wait_turn();
        ptx::wgmma_fence();
        issue_qk(q_descriptor, k_descriptor, s);
        ptx::wgmma_commit();
        if (!previous_none) {
          wait_full(&smem.full_v[previous.stage], previous.parity, !R::kTransformV);
        }
        ptx::wgmma_fence();
        issue_pv(p, v_descriptor, accumulate);
        ptx::wgmma_commit();
        if (step == 1) pass_turn();
        if (is_first) {
          if (u > 0) keep_states();  // of the unit before
          max_logit[0] = max_logit[1] = kNegInf;
          sum[0] = sum[1] = 0.0f;
          if (kKeepsRows && !is_end) {
            rows = thread_rows(params, *params.plan, unit, smem.positions[u % kQStages], row_begin);
          }
        }
        const int tile = none ? 0 : unit.tiles[j];
        const bool full = !Traits::kHasLogitsMask && !none && tile >= unit.full_tiles.begin &&
                          tile < unit.full_tiles.end;
        const auto shown_keys = [&] {
          return this->shown_keys(unit, rows, smem.positions[u % kQStages], row_begin, tile,
                                  none ? 0 : unit.kv_end);
        };
        ShownKeys shown{};
        // Else the loop has registers to spare where it is rarely run.
        if (kKeepsRows && !full) shown = shown_keys();
        ptx::wgmma_wait<1>();
        ptx::wgmma_fence_registers(s);
        if (!none) release(&smem.empty_k[slot.stage], owners_of(step));
        Shared shared[2];
        logits(unit, rows, tile, full, s, shared);
        if (!full) {
          if constexpr (!kKeepsRows) shown = shown_keys();
          hide(unit, rows, tile, shown, s);
        }
        float scale[2];
        const bool moves = softmax(s, shared, scale);
        ptx::wgmma_fence_registers(s);
        order_after(sum[0] + sum[1]);
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_registers(o);
        if (!previous_none) release(&smem.empty_v[previous.stage], owners_of(previous_step));
        pack(s, p);
        if (is_first) {
          if (u > 0) {
            if (kClearsO && previous_none) clear_o();
            store(u - 1);
            __syncwarp();
            if (threadIdx.x % 32 == 0) smem.release_unit(u - 1);
          }
          if (is_end) return;
        } else if (moves) {
          rescale(scale);
        }
        if (!stages_rows(kConfig) && is_last && step == 1) release_q(u);
        accumulate = !is_first;
        previous = slot;
        previous_none = none;
        previous_step = step;
        slot.advance(step);
        if (is_last) break;
      }
    }
  }

  // State of this thread's row r as `store` sees it, its output is o, not normalised; or that of
  // the same row of a later warpgroup.
  PLAIT_DEVICE SoftmaxState& state(int r, int warpgroups_on = 0) {
    return smem.states[64 * warpgroups_on + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r];
  }
  // Those of the 16 rows of this warp.
  PLAIT_DEVICE const SoftmaxState* states() { return &smem.states[threadIdx.x / 32 * 16]; }

 private:
  PLAIT_DEVICE void clear_o() {
    ptx::keep_branch();
#pragma unroll
    for (int i = 0; i < kDimVo / 2; ++i) o[i] = 0.0f;
  }

  // Puts the states of this warp's rows where `state` finds them: registers are scarce while the
  // next tile's softmax runs.
  PLAIT_DEVICE void keep_states() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (threadIdx.x % 4 == 0) state(r) = {max_logit[r] * scale_log2, sum[r]};
    }
    __syncwarp();
  }

  PLAIT_DEVICE void wait_full(ptx::Barrier* barrier, unsigned parity, bool direct) {
    ptx::mbarrier_wait(barrier, parity);
    // cp.async wrote through the generic proxy and nobody has fenced since.
    if (!R::kTma && direct) ptx::fence_proxy_async();
  }

  // The same value in every lane, which the compiler then keeps in a uniform register.
  template <class T>
  static PLAIT_DEVICE T uniform(T x) {
    return __shfl_sync(~0u, x, 0);
  }

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

  // A stage expects every consumer warp; one whose warpgroup has a stage to itself arrives for all.
  static PLAIT_DEVICE int owners_of(int key_split) {
    return key_split == 1 ? 1 : kConfig.num_consumer_warpgroups;
  }
  PLAIT_DEVICE void release(ptx::Barrier* barrier, int count = 1) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier, count);
  }

  // Columns of a fragment: element i of a thread is row i / 2 % 2, column column_of(i).
  static PLAIT_DEVICE int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

  // Of this thread's columns of a tile, by row: what positions and custom mask bits let it see.
  // `positions`: of the rows of the unit's tile.
  struct ShownKeys {
    FragmentBits<kTileKv> of_row[2];
  };
  PLAIT_DEVICE ShownKeys shown_keys(const Unit& unit, const ThreadRows& rows, const int* positions,
                                    int row_begin, int tile, int kv_end) {
    const int list_begin = tile * kTileKv, k_pos = unit.kv_pos_begin + list_begin;
    FragmentBits<kTileKv> first = 0, second = 0;
    constexpr int kAtOnce = Traits::kCustomMask ? 1 : 2;  // mask bits of both rows at once spill
#pragma unroll kAtOnce
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin + row_of_thread(r);
      VisibleRange range = visible_range(params.visible, positions[row < unit.num_rows ? row : 0]);
      range.end = min(range.end, k_pos + kv_end - list_begin);
      first = second;
      second = fragment_visible<kTileKv>(range, k_pos, threadIdx.x % 4);
      if constexpr (Traits::kCustomMask) {
        const PlanView& plan = *params.plan;
        second &= fragment_mask<(kTileKv + 31) / 32>(
            plan.mask_words, plan.token_mask[r == 0 ? rows.token[0] : rows.token[1]], k_pos,
            threadIdx.x % 4);
      }
    }
    return {{first, second}};
  }

  // What the variant makes of the products; what a row's logits share is left to the softmax.
  struct Shared {
    float scale, offset;
  };
  // full: all of them are visible, so that what is done with them depends on nobody else's keys.
  PLAIT_DEVICE void logits(const Unit& unit, const ThreadRows& rows, int tile, bool full,
                           float (&s)[kTileKv / 2], Shared (&shared)[2]) {
    shared[0] = shared[1] = {1.0f, 0.0f};
    // fp8 numbers may have a scale of 0, and a sum that is left to the softmax is divided by it.
    const float scale = fmaxf(logit_scale<Variant, kConfig.dtype_kv>(params), 1e-30f);
    const int k_pos = unit.kv_pos_begin + tile * kTileKv;
    const auto transform = [&](auto&& of) {
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) {
        const Logit logit = of(i, context(unit, rows, k_pos, i), Logit(s[i], scale));
        if constexpr (Traits::kUseSoftmax) {
          s[i] = logit.product;
          shared[i / 2 % 2] = {logit.scale, logit.offset};
        } else {
          s[i] = logit;
        }
      }
    };
    // (Which of two ways a logit goes depends on others: not in invariant mode.)
    if constexpr (Traits::kHasSmallLogitsTransform && kConfig.chunk_keys == 0) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) largest = fmaxf(largest, fabsf(s[i]));
      if (full && __all_sync(~0u, largest * scale <= Variant::small_logit(variant))) {
        transform([&](int i, const LogitContext& c, Logit logit) {
          return i / 4 % kShareWithoutPowers == 0
                     ? Variant::small_logits_transform(variant, c, logit)
                     : Variant::logits_transform(variant, c, logit);
        });
        return;
      }
    }
    if constexpr (Traits::kHasLogitsTransform) {
      transform([&](int, const LogitContext& c, Logit logit) {
        return Logit(Variant::logits_transform(variant, c, logit));
      });
    } else if constexpr (!Traits::kUseSoftmax) {
      transform([](int, const LogitContext&, Logit logit) { return logit; });
    }
  }

  // -inf (without softmax: 0) for keys that are not shown.
  PLAIT_DEVICE void hide(const Unit& unit, const ThreadRows& rows, int tile, const ShownKeys& keys,
                         float (&s)[kTileKv / 2]) {
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      bool shown = fragment_bit(keys.of_row[i / 2 % 2], i / 4, i % 2);
      if constexpr (Traits::kHasLogitsMask) {
        const int k_pos = unit.kv_pos_begin + tile * kTileKv;
        shown = shown && Variant::logits_mask(variant, context(unit, rows, k_pos, i));
      }
      if (!shown) s[i] = Traits::kUseSoftmax ? kNegInf : 0.0f;
    }
  }

  PLAIT_DEVICE LogitContext context(const Unit& unit, const ThreadRows& rows, int k_pos, int i) {
    const int r = i / 2 % 2;
    const float shared = static_cast<float>(k_pos + column_of(0) - rows.position[r]);
    return {rows.request[r],
            rows.position[r],
            k_pos + column_of(i),
            rows.qo_head[r],
            unit.kv_head,
            kConfig.dtype_q,
            {shared, static_cast<float>(i / 4 * 8 + i % 2)}};
  }

  // s becomes weights relative to the rows' reference maxima. True if a row's has moved: O must be
  // multiplied with `scale` to stand relative to it.
  PLAIT_DEVICE bool softmax(float (&s)[kTileKv / 2], const Shared (&shared)[2], float (&scale)[2]) {
    scale[0] = scale[1] = 1.0f;
    if constexpr (!Traits::kUseSoftmax) return false;
    float tile_max[2];  // of this thread's columns
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max_of[2] = {kNegInf, kNegInf};  // two chains: latency, not rate, is what they cost
#pragma unroll
      for (int i = 2 * r; i < kTileKv / 2; i += 4) {
        max_of[0] = fmaxf(max_of[0], s[i]);
        max_of[1] = fmaxf(max_of[1], s[i + 1]);
      }
      tile_max[r] = fmaxf(max_of[0], max_of[1]);
      if constexpr (Traits::kHasLogitsTransform) {
        tile_max[r] = fmaf(tile_max[r], shared[r].scale, shared[r].offset);
      }
    }
    const auto outgrows = [&](int r) {  // false while both are -inf
      return (tile_max[r] - max_logit[r]) * scale_log2 > rescale_threshold(kConfig.dtype_q);
    };
    // Seldom, and so the four threads of a row need not agree on its maximum for most tiles.
    const bool moves = __any_sync(~0u, outgrows(0) || outgrows(1));
    if (moves) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(~0u, tile_max[r], 1));
        tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(~0u, tile_max[r], 2));
        if (outgrows(r)) {
          scale[r] = exp2((max_logit[r] - tile_max[r]) * scale_log2);
          max_logit[r] = tile_max[r];
          sum[r] *= scale[r];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float offset = max_logit[r] == kNegInf ? 0.0f : max_logit[r] * scale_log2;
      float factor = scale_log2;
      if constexpr (Traits::kHasLogitsTransform) {
        offset = fmaf(-shared[r].offset, scale_log2, offset);
        factor *= shared[r].scale;
      }
      float sum_of[2] = {sum[r], 0.0f};
#pragma unroll
      for (int i = 2 * r; i < kTileKv / 2; i += 4) {
        s[i] = exp2(fmaf(s[i], factor, -offset));
        s[i + 1] = exp2(fmaf(s[i + 1], factor, -offset));
        sum_of[0] += s[i];
        sum_of[1] += s[i + 1];
      }
      sum[r] = sum_of[0] + sum_of[1];
    }
    return moves;
  }

  PLAIT_DEVICE void rescale(const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < kDimVo / 2; ++i) o[i] *= scale[i / 2 % 2];
  }

  // The accumulator fragment of S is the A fragment of P, two columns a register.
  PLAIT_DEVICE void pack(const float (&s)[kTileKv / 2], unsigned (&p)[kTileKv / 4]) {
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) {
      p[i] = ptx::pack2<kConfig.dtype_q>(s[2 * i], s[2 * i + 1]);
    }
  }
};

}  // namespace plait::sm90
