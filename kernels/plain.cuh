// The slow, obvious attention kernel that every other one is checked against, and that runs what
// they do not take: any storage type, head dims up to 256, head_dim_qk != head_dim_vo, any strides
// and alignment, every format and functor, sm_75 and later. Read it first: a fast kernel does the
// same steps with other instructions. Everything is float32 in shared memory and registers; a CTA
// walks its work items, a warp owns some rows of the tile, 32 keys at a time:
//   logits: a lane takes a key; weights x V: a lane takes every 32nd element of the head dim.
#pragma once
#include "host_device/convert.h"
#include "host_device/fold.h"
#include "host_device/kv_address.h"
#include "host_device/mask_bits.h"
#include "host_device/row.h"
#include "host_device/scales.h"
#include "host_device/softmax_state.h"
#include "host_device/variant.h"
#include "host_device/visibility.h"
#include "tile/begin.cuh"
#include "tile/draw.cuh"
#include "tile/merge.cuh"
#include "tile/rows.cuh"
#include "tile/store_out.cuh"

namespace plait::plain {

inline constexpr int kNumThreads = 128;
inline constexpr int kNumWarps = kNumThreads / 32;
inline constexpr int kNumKeys = 32;  // in shared memory at a time: one for each lane

template <KernelConfig kConfig>
struct Tile {
  static constexpr int kRows = kConfig.shapes[0].tile_q;
  static constexpr int kRowsOfWarp = kRows / kNumWarps;
  static constexpr int kDimQk = kConfig.head_dim_qk, kDimVo = kConfig.head_dim_vo;
  static constexpr int kElements = (kDimVo + 31) / 32;  // of an output row that a lane holds
  // Odd, so that 32 lanes that read 32 keys at one dim meet 32 banks.
  static constexpr int kKeyStride = (kDimQk > kDimVo ? kDimQk : kDimVo) + 1;
  static_assert(kRows % kNumWarps == 0, "plain: a tile's rows are shared out among four warps");

  struct Smem {
    float q[kRows][kDimQk];
    float kv[kNumKeys][kKeyStride];  // K, and after the logits V
    int token[kRows], request[kRows], position[kRows], qo_head[kRows];
    int merging[merge_scratch(kRows)];
  };
  static_assert(sizeof(Smem) <= 48 * 1024, "plain: static shared memory; take a smaller tile_q");
};

struct FloatRow {  // storage of host_device/row.h
  float* x;
  PLAIT_HD float get(int i) const { return x[i]; }
  PLAIT_HD void set(int i, float value) { x[i] = value; }
};

// One warp copies a row of kDim elements from global memory, as float.
template <int kDim, class T>
PLAIT_DEVICE void load_row(float* to, const T* from, int lane) {
  for (int i = lane; i < kDim; i += 32) to[i] = to_float(from[i]);
  __syncwarp();  // a transform may give a lane another lane's elements
}

// Packed rows of the item for one kv head, transformed. Rows beyond num_rows are left as they are:
// no result of theirs is stored.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE void load_q(typename Tile<kConfig>::Smem& smem, const VariantCall<V>& call,
                         const PlanView& plan, const RowBlock& block, const WorkItem& item,
                         int kv_head) {
  using Q = Storage<kConfig.dtype_q>;
  const Params& params = call.params;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int r = warp; r < item.num_rows; r += kNumWarps) {
    const PackedRow row = packed_row(plan, block, item.first_row + r, kv_head, params.group_size);
    const int request = plan.token_request[row.token], position = plan.token_position[row.token];
    if (lane == 0) {
      smem.token[r] = row.token;
      smem.qo_head[r] = row.qo_head;
      smem.request[r] = request;
      smem.position[r] = position;
    }
    const Q* from = static_cast<const Q*>(params.q) +
                    existing_row(params, row.token) * params.q_stride.token +
                    row.qo_head * params.q_stride.head;
    load_row<kConfig.head_dim_qk>(smem.q[r], from, lane);
    if constexpr (VariantTraits<V>::kHasQueryTransform) {
      Row<FloatRow, kConfig.head_dim_qk, 32> x{{smem.q[r]}, lane, 0xffffffffu};
      V::query_transform(call.variant, RowContext{request, position, row.qo_head}, x);
    }
  }
}

enum class Operand { kKey, kValue };

// Keys first ... first + kNumKeys - 1 of the list, transformed. Keys at or beyond `end` are zeros:
// what lies in memory there belongs to nobody, and 0 * NaN is NaN.
template <KernelConfig kConfig, class V, Operand kOperand>
PLAIT_DEVICE void load_kv(typename Tile<kConfig>::Smem& smem, const VariantCall<V>& call,
                          const BlockTable& table, const RowBlock& block, int request, int kv_head,
                          int first, int end) {
  using Kv = Storage<kConfig.dtype_kv>;
  constexpr bool kAffine = kConfig.loader == Loader::kAffine;
  constexpr bool kIsKey = kOperand == Operand::kKey;
  constexpr int kDim = kIsKey ? kConfig.head_dim_qk : kConfig.head_dim_vo;
  const Params& params = call.params;
  const KvStrides& stride = kIsKey ? params.k_stride : params.v_stride;
  const Kv* base = static_cast<const Kv*>(kIsKey ? params.k : params.v);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 list = first_entry(table, block);
#pragma unroll 1  // here and below: compile time counts, too
  for (int j = warp; j < kNumKeys; j += kNumWarps) {
    float* to = smem.kv[j];
    if (first + j >= end) {
      for (int i = lane; i < kDim; i += 32) to[i] = 0.0f;
      continue;
    }
    const KeySlot slot = key_slot(table, list, params.block_size, first + j);
    load_row<kDim>(to, base + key_offset(stride, slot, kv_head, kAffine), lane);
    const RowContext context{request, block.kv_pos_begin + first + j, kv_head};
    Row<FloatRow, kDim, 32> x{{to}, lane, 0xffffffffu};
    if constexpr (kIsKey && VariantTraits<V>::kHasKeyTransform) {
      dequantise<kConfig.dtype_kv>(x, params.k_scale);
      V::key_transform(call.variant, context, x);
    }
    if constexpr (!kIsKey && VariantTraits<V>::kHasValueTransform) {
      dequantise<kConfig.dtype_kv>(x, params.v_scale);
      V::value_transform(call.variant, context, x);
    }
  }
}

// Logit of row r and key `first + lane`; `hidden` if the row does not see the key. Base 2 with
// softmax, as it is without.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE float finish_logit(const typename Tile<kConfig>::Smem& smem,
                                const VariantCall<V>& call, const PlanView& plan,
                                const RowBlock& block, int kv_head, int r, int key, int end,
                                float dot) {
  using Traits = VariantTraits<V>;
  const Params& params = call.params;
  constexpr float kHidden = Traits::kUseSoftmax ? kNegInf : 0.0f;
  const LogitContext context{smem.request[r], smem.position[r], block.kv_pos_begin + key,
                             smem.qo_head[r], kv_head};
  if (key >= end || !visible(params.visible, context.q_pos, context.k_pos)) return kHidden;
  if constexpr (Traits::kCustomMask) {
    if (!mask_bit(plan.mask_words, plan.token_mask[smem.token[r]], context.k_pos)) return kHidden;
  }
  if constexpr (Traits::kHasLogitsMask) {
    if (!V::logits_mask(call.variant, context)) return kHidden;
  }
  float logit = dot * logit_scale<V, kConfig.dtype_kv>(params);
  if constexpr (Traits::kHasLogitsTransform) {
    logit = V::logits_transform(call.variant, context, logit);
  }
  return Traits::kUseSoftmax ? logit * kLog2e : logit;
}

// Invariant mode: what a warp keeps of its rows between their chunks.
template <KernelConfig kConfig, bool kHas = (kConfig.chunk_keys > 0)>
struct Folded {};
template <KernelConfig kConfig>
struct Folded<kConfig, true> {
  using T = Tile<kConfig>;
  FoldedState state[T::kRowsOfWarp];
  float out[T::kRowsOfWarp][T::kElements] = {};

  // Folds in a chunk, and clears it for the next.
  template <bool kUseSoftmax>
  PLAIT_DEVICE void add(SoftmaxState (&chunk)[T::kRowsOfWarp],
                        float (&chunk_out)[T::kRowsOfWarp][T::kElements]) {
    for (int r = 0; r < T::kRowsOfWarp; ++r) {
      const float scale = chunk[r].sum == 0.0f ? 0.0f : 1.0f / chunk[r].sum;
      const FoldFactors factors =
          kUseSoftmax ? fold(state[r], lse_of(chunk[r])) : FoldFactors{1.0f, 1.0f};
      for (int e = 0; e < T::kElements; ++e) {
        out[r][e] = kUseSoftmax ? fold(factors, out[r][e], chunk_out[r][e] * scale)
                                : out[r][e] + chunk_out[r][e];
        chunk_out[r][e] = 0.0f;
      }
      chunk[r] = {};
    }
  }
};

template <KernelConfig kConfig, class V>
PLAIT_DEVICE void attend(typename Tile<kConfig>::Smem& smem, const VariantCall<V>& call,
                         const PlanView& plan, const RowBlock& block, const WorkItem& item,
                         int kv_head) {
  using T = Tile<kConfig>;
  constexpr bool kUseSoftmax = VariantTraits<V>::kUseSoftmax;
  constexpr unsigned kAll = 0xffffffffu;
  const Params& params = call.params;
  const BlockTable& table = plan.tables[block.level];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp * T::kRowsOfWarp;  // of this warp, within the tile
  const int request = request_of_keys(plan, block);

  __syncthreads();  // the last user of shared memory is done
  load_q<kConfig, V>(smem, call, plan, block, item, kv_head);

  SoftmaxState state[T::kRowsOfWarp];  // the same on every lane
  float out[T::kRowsOfWarp][T::kElements] = {};
  Folded<kConfig> folded;
  for (int first = item.kv_begin; first < item.kv_end; first += kNumKeys) {
    if constexpr (kConfig.chunk_keys > 0) {
      if (first % kConfig.chunk_keys == 0) folded.template add<kUseSoftmax>(state, out);
    }
    const int num_keys = min(kNumKeys, item.kv_end - first);
    const int k_pos = block.kv_pos_begin + first;
    if (tile_visibility(params.visible, item.min_position, item.max_position, k_pos,
                        k_pos + num_keys - 1, item.mask_begin) == TileVisibility::kSkip) {
      continue;
    }

    __syncthreads();  // V of the keys before is read (and at first: Q is written)
    load_kv<kConfig, V, Operand::kKey>(smem, call, table, block, request, kv_head, first,
                                       item.kv_end);
    __syncthreads();
    float weight[T::kRowsOfWarp] = {};
#pragma unroll 4
    for (int i = 0; i < T::kDimQk; ++i) {
      const float k = smem.kv[lane][i];
      for (int r = 0; r < T::kRowsOfWarp; ++r) weight[r] += smem.q[first_row + r][i] * k;
    }
    for (int r = 0; r < T::kRowsOfWarp; ++r) {
      if (first_row + r >= item.num_rows) {  // uninitialised Q: a row that nobody asked for
        weight[r] = 0.0f;
        continue;
      }
      const float logit = finish_logit<kConfig, V>(smem, call, plan, block, kv_head, first_row + r,
                                                   first + lane, item.kv_end, weight[r]);
      if constexpr (!kUseSoftmax) {
        weight[r] = logit;
      } else {
        float max_logit = logit;
        for (int step = 16; step > 0; step /= 2) {
          max_logit = max(max_logit, __shfl_xor_sync(kAll, max_logit, step));
        }
        weight[r] = max_logit == kNegInf ? 0.0f : exp2(logit - max_logit);
        float sum = weight[r];
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
        const OutputScales scales = merge(state[r], SoftmaxState{max_logit, sum});
        weight[r] *= scales.b;
        for (int e = 0; e < T::kElements; ++e) out[r][e] *= scales.a;
      }
    }

    __syncthreads();  // K is read
    load_kv<kConfig, V, Operand::kValue>(smem, call, table, block, request, kv_head, first,
                                         item.kv_end);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < num_keys; ++j) {
      for (int r = 0; r < T::kRowsOfWarp; ++r) {
        const float w = __shfl_sync(kAll, weight[r], j);
        if (w == 0.0f) continue;  // a hidden key's V may be anything
        for (int e = 0; e < T::kElements; ++e) {
          const int dim = lane + 32 * e;
          if (dim < T::kDimVo) out[r][e] += w * smem.kv[j][dim];
        }
      }
    }
  }

  if constexpr (kConfig.chunk_keys > 0) folded.template add<kUseSoftmax>(state, out);
  // Rows are put together in shared memory, where Q was, and leave by four elements a lane.
  __syncthreads();
  for (int r = 0; r < T::kRowsOfWarp; ++r) {
    const int row = first_row + r;
    if (row >= item.num_rows) continue;  // the same for the whole warp
    float lse = lse_of(state[r]), sum = state[r].sum;
    float scale = kUseSoftmax ? (sum == 0.0f ? 0.0f : 1.0f / sum) : 1.0f;
    if constexpr (kConfig.chunk_keys > 0) {
      lse = fold_lse(folded.state[r]);
      sum = folded.state[r].sum;
      scale = kUseSoftmax ? fold_scale(folded.state[r]) : 1.0f;
    }
    const bool empty = kUseSoftmax && sum == 0.0f;
    float* assembled = smem.kv[warp];
    for (int e = 0; e < T::kElements; ++e) {
      float x = out[r][e];
      if constexpr (kConfig.chunk_keys > 0) x = folded.out[r][e];
      if (lane + 32 * e < T::kDimVo) {
        assembled[lane + 32 * e] = kConfig.chunk_keys > 0 ? plait::folded(x, scale) : x * scale;
      }
    }
    __syncwarp();
    const i64 partial_row =
        item.partial_row + static_cast<i64>(kv_head - item.kv_head_begin) * item.num_rows + row;
#pragma unroll 1
    for (int dim = 4 * lane; dim < T::kDimVo; dim += 128) {
      const float x[4] = {assembled[dim], assembled[dim + 1], assembled[dim + 2],
                          assembled[dim + 3]};
      if (item.partial_row < 0) {
        store_out4<kConfig, V>(params, call.variant, plan, smem.token[row], smem.qo_head[row], dim,
                               empty, x);
      } else {
        store4<false>(params.partial_out + partial_row * T::kDimVo + dim, x);
      }
    }
    if (lane == 0) {
      if (item.partial_row < 0) {
        store_lse<V>(params, smem.token[row], smem.qo_head[row], lse);
      } else if constexpr (kUseSoftmax) {
        params.partial_lse[partial_row] = lse;
      }
    }
    __syncwarp();
  }
  if (item.partial_row >= 0) {
    const int head = kv_head - item.kv_head_begin;
    arrive_and_merge<kConfig, V>(
        params, call.variant, plan,
        [&](int i) { return head_of_item(params, plan, item, head, i); },
        item.first_row % params.group_size, item.num_rows, threadIdx.x, kNumThreads,
        smem.merging, false, [] { __syncthreads(); });
  }
}

// The kernel: `kNumThreads` threads, grid of the plan's CTAs, no dynamic shared memory.
template <KernelConfig kConfig, class V>
PLAIT_DEVICE void attention(const VariantCall<V>& call) {
  __shared__ typename Tile<kConfig>::Smem smem;
  const PlanView& plan = *call.params.plan;
  __shared__ int drawn;
  begin_kernel();
  const auto next = [&](int item) { return next_item(call.params, item, &drawn); };
  for (int i = next(call.params.starts[blockIdx.x].item_begin); i >= 0; i = next(i + 1)) {
    const WorkItem item = plan.items[i];
    const RowBlock block = plan.row_blocks[item.row_block];
    for (int h = 0; h < item.num_heads; ++h) {
      attend<kConfig, V>(smem, call, plan, block, item, item.kv_head_begin + h);
    }
  }
  store_padding_rows<kConfig, V>(call.params, plan, threadIdx.x, kNumThreads);
}

}  // namespace plait::plain
