// Attention on the CPU: one work item (a tile of packed rows x kv heads x keys) on one thread, and
// the merge of split rows. FlashAttention's loop over key tiles with the online softmax, in
// float32. Compiled into the library for the built-in variants, at run time for a user's (src/cpu).
// Order: the tile's data, its steps, the item (`attend`: read it first), the merge, the entry.
#pragma once
#include "cpu/call.h"
#include "cpu/matmul.h"
#include "host_device/convert.h"
#include "host_device/fold.h"
#include "host_device/kv_address.h"
#include "host_device/mask_bits.h"
#include "host_device/row.h"
#include "host_device/scales.h"
#include "host_device/softmax_state.h"
#include "host_device/variant.h"
#include "host_device/visibility.h"
#include "tile/rows.cuh"

namespace plait::cpu {
inline namespace PLAIT_CPU_ISA {

// Head dims are 0 where they are known only at run time: for variants without row transforms, whose
// Row has its length as a constant. The dtype of q and out is known only at run time, too: a row of
// theirs is converted once for all keys.
struct Config {
  Dtype dtype_kv;
  int head_dim_qk, head_dim_vo;
};

// Up to kTileKv keys that some row of the item may see, in order. Keys that none sees are left out:
// their pages may be gone.
struct KeyTile {
  int num_keys = 0;
  TileVisibility visibility = TileVisibility::kFull;
  int position[kTileKv];                     // absolute
  i64 k_offset[kTileKv], v_offset[kTileKv];  // of kv head 0
};

struct FloatRow {  // Storage of Row
  float* x;
  PLAIT_HD float get(int i) const { return x[i]; }
  PLAIT_HD void set(int i, float value) const { x[i] = value; }
};

template <Config kConfig, class V>
struct Attention {
  using T = Storage<kConfig.dtype_kv>;
  using Traits = VariantTraits<V>;
  static constexpr bool kUseSoftmax = Traits::kUseSoftmax;

  const Params& params;
  const PlanView& plan;
  const typename V::Params& variant;
  const Dtype dtype;
  const int dim_qk, dim_vo, pitch_qk, pitch_vo, chunk_keys;
  Scratch scratch;

  explicit Attention(const Call& call)
      : params(*call.params),
        plan(*call.params->plan),
        variant(*static_cast<const typename V::Params*>(call.variant)),
        dtype(call.dtype),
        dim_qk(kConfig.head_dim_qk ? kConfig.head_dim_qk : call.head_dim_qk),
        dim_vo(kConfig.head_dim_vo ? kConfig.head_dim_vo : call.head_dim_vo),
        pitch_qk(padded_dim(dim_qk)),
        pitch_vo(padded_dim(dim_vo)),
        chunk_keys(call.chunk_keys) {
    divide_scratch(call.scratch, dim_qk, dim_vo, scratch);
  }

  // ---- The item: set by attend(), read by the steps.
  const WorkItem* item;
  const RowBlock* block;
  bool few_rows;
  int num_rows;
  int key_request;       // RowContext::request of the item's keys
  KeyRange range;        // list positions that the item reads
  i64 first_entry;       // of the block's list in its table
  const KeyTile* ahead;  // keys to be fetched while a tile is read where it lies, and their head
  int ahead_head;
  int row_token[kManyRows], row_group_head[kManyRows];
  int row_request[kManyRows], row_position[kManyRows];

  FoldedState folded_state[kManyRows];  // invariant mode

  // First row of a pass's head in scratch: q, out and state.
  int slot(int pass_head) const { return pass_head * padded_rows(); }
  float* q_of(int pass_head) const { return scratch.q + slot(pass_head) * pitch_qk; }
  float* out_of(int pass_head) const { return scratch.out + slot(pass_head) * pitch_vo; }
  int padded_rows() const { return round_up(num_rows, few_rows ? kDotRows : kManyRowBlock); }
  static constexpr int kManyRowBlock = 6;  // 6 x 4 accumulators of 32 registers, 6 x 2 of 16

  template <int kDim>
  static auto row_of(float* x) {
    return Row<FloatRow, kDim, 1>{{x}, 0, 0};
  }

  // ---- Steps.
  void find_rows() {
    for (int r = 0; r < num_rows; ++r) {
      const int packed = item->first_row + r, i = packed / params.group_size;
      const int token = token_of(plan, block->first_token, i);
      row_token[r] = token;
      row_group_head[r] = packed - i * params.group_size;
      row_request[r] = plan.token_request[token];
      row_position[r] = plan.token_position[token];
    }
  }

  // Element i of a row of `dim`, in float32, with zeros up to the pitch.
  template <class From>
  static void convert_row(const From* from, int dim, int pitch, float* to) {
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(to + i, load(from + i));
    for (; i < dim; ++i) to[i] = to_float(from[i]);
    for (; i < pitch; ++i) to[i] = 0.0f;
  }

  void load_queries(int kv_head, int pass_head) {
    float* q = q_of(pass_head);
    for (int r = 0; r < padded_rows(); ++r) {
      float* row = q + r * pitch_qk;
      if (r >= num_rows) {
        __builtin_memset(row, 0, pitch_qk * sizeof(float));
        continue;
      }
      const int qo_head = kv_head * params.group_size + row_group_head[r];
      const i64 offset = row_token[r] * params.q_stride.token + qo_head * params.q_stride.head;
      if (dtype == Dtype::kFloat32) {
        convert_row(static_cast<const float*>(params.q) + offset, dim_qk, pitch_qk, row);
      } else if (dtype == Dtype::kBfloat16) {
        convert_row(static_cast<const Bfloat16*>(params.q) + offset, dim_qk, pitch_qk, row);
      } else {
        convert_row(static_cast<const Float16*>(params.q) + offset, dim_qk, pitch_qk, row);
      }
      if constexpr (Traits::kHasQueryTransform) {
        auto accessor = row_of<kConfig.head_dim_qk>(row);
        V::query_transform(variant, RowContext{row_request[r], row_position[r], qo_head}, accessor);
      }
    }
    __builtin_memset(out_of(pass_head), 0, padded_rows() * pitch_vo * sizeof(float));
    for (int r = 0; r < padded_rows(); ++r) {
      scratch.max_logit[slot(pass_head) + r] = kNegInf;
      scratch.sum[slot(pass_head) + r] = 0.0f;
    }
  }

  // Invariant mode: the keys from `next` on up to a multiple of kTileKv, each in the column that
  // belongs to its position. Columns of keys that no row sees are masked, and read some other key.
  int find_aligned_keys(int next, KeyTile& tile) const {
    const BlockTable& table = plan.tables[block->level];
    const bool affine = table.indices == nullptr;
    const Visibility& v = params.visible;
    const int window_begin = v.window_left < 0 ? 0 : item->min_position - v.window_left;
    const auto hidden = [&](int key) {
      const int position = block->kv_pos_begin + key;
      return position >= v.sink_tokens && position < window_begin;
    };
    tile.num_keys = 0;
    if (next < range.end && hidden(next)) next = window_begin - block->kv_pos_begin;
    if (next >= range.end) return next;
    const int begin = next / kTileKv * kTileKv, end = min(begin + kTileKv, range.end);
    bool all = true;
    for (int key = begin; key < end; ++key) {
      const bool seen = key >= next && !hidden(key);
      const KeySlot slot = key_slot(table, first_entry, params.block_size, seen ? key : next);
      tile.position[key - begin] = block->kv_pos_begin + key;
      tile.k_offset[key - begin] = key_offset(params.k_stride, slot, 0, affine);
      tile.v_offset[key - begin] = key_offset(params.v_stride, slot, 0, affine);
      all &= seen;
    }
    tile.num_keys = end - begin;
    tile.visibility =
        all ? tile_visibility(v, item->min_position, item->max_position, tile.position[0],
                              tile.position[end - begin - 1], item->mask_begin)
            : TileVisibility::kPartial;
    return end;
  }

  // Fills `tile` with the next visible keys from list position `next` on; returns where to go on.
  int find_keys(int next, KeyTile& tile) const {
    const BlockTable& table = plan.tables[block->level];
    const bool affine = table.indices == nullptr;
    const Visibility& v = params.visible;
    const int window_begin = v.window_left < 0 ? 0 : item->min_position - v.window_left;
    const int keys_a_tile = few_rows ? kFewKeys : kTileKv, begin = next;
    int n = 0;
    for (; next < range.end && n < keys_a_tile; ++next) {
      int position = block->kv_pos_begin + next;
      if (position >= v.sink_tokens && position < window_begin) {  // between sinks and window
        next += window_begin - position;
        if (next >= range.end) break;
        position = window_begin;
      }
      const KeySlot slot = key_slot(table, first_entry, params.block_size, next);
      tile.position[n] = position;
      tile.k_offset[n] = key_offset(params.k_stride, slot, 0, affine);
      tile.v_offset[n] = key_offset(params.v_stride, slot, 0, affine);
      ++n;
    }
    tile.num_keys = n;
    if (n > 0) {
      tile.visibility = tile_visibility(v, item->min_position, item->max_position, tile.position[0],
                                        tile.position[n - 1], item->mask_begin);
      // A gap between two runs of keys is not known to tile_visibility.
      if (next - begin != n) tile.visibility = TileVisibility::kPartial;
    }
    return next;
  }

  const T* k_head(int kv_head) const {
    return static_cast<const T*>(params.k) + kv_head * params.k_stride.head;
  }
  const T* v_head(int kv_head) const {
    return static_cast<const T*>(params.v) + kv_head * params.v_stride.head;
  }

  void convert_keys(int kv_head, const KeyTile& tile) {
    for (int i = 0; i < tile.num_keys; ++i) {
      float* row = scratch.k + i * pitch_qk;
      convert_row(k_head(kv_head) + tile.k_offset[i], dim_qk, pitch_qk, row);
      if constexpr (Traits::kHasKeyTransform) {
        auto accessor = row_of<kConfig.head_dim_qk>(row);
        dequantise<kConfig.dtype_kv>(accessor, params.k_scale);
        V::key_transform(variant, RowContext{key_request, tile.position[i], kv_head}, accessor);
      }
    }
  }
  void convert_values(int kv_head, const KeyTile& tile) {
    for (int i = 0; i < tile.num_keys; ++i) {
      float* row = scratch.v + i * pitch_vo;
      convert_row(v_head(kv_head) + tile.v_offset[i], dim_vo, pitch_vo, row);
      if constexpr (Traits::kHasValueTransform) {
        auto accessor = row_of<kConfig.head_dim_vo>(row);
        dequantise<kConfig.dtype_kv>(accessor, params.v_scale);
        V::value_transform(variant, RowContext{key_request, tile.position[i], kv_head}, accessor);
      }
    }
  }
  // scratch.k [keys, dim] -> scratch.k_transposed [dim, keys]; the last key again beyond num_keys.
  void transpose_keys(int num_keys) {
    for (int k = 0; k < num_keys; k += kLanes) {
      for (int d = 0; d < dim_qk; d += kLanes) {
        Vec x[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          x[i] = load(scratch.k + min(k + i, num_keys - 1) * pitch_qk + d);
        }
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(scratch.k_transposed + (d + i) * kTileKv + k, x[i]);
      }
    }
  }

  // logits[r][k] = q_r . k_k; columns beyond num_keys hold anything.
  void multiply_keys(int kv_head, int pass_head, const KeyTile& tile) {
    const float* q = q_of(pass_head);
    if (few_rows && !Traits::kHasKeyTransform && dim_qk % kLanes == 0) {
      const CacheRows<T> keys{k_head(kv_head), tile.k_offset, k_head(ahead_head), ahead->k_offset};
      dot_products(q, pitch_qk, num_rows, keys, tile.num_keys, dim_qk, scratch.logits, kTileKv);
      return;
    }
    convert_keys(kv_head, tile);
    if (few_rows) {
      dot_products(q, pitch_qk, num_rows, BufferRows{scratch.k, pitch_qk}, tile.num_keys, pitch_qk,
                   scratch.logits, kTileKv);
    } else {
      transpose_keys(tile.num_keys);
      matmul<kManyRowBlock>(q, pitch_qk, num_rows, BufferRows{scratch.k_transposed, kTileKv},
                            round_up(tile.num_keys, kLanes), dim_qk, nullptr, scratch.logits,
                            kTileKv);
    }
  }

  // What is still to be multiplied into the logits that transform_logits leaves.
  float factor() const {
    return Traits::kHasLogitsTransform ? 1.0f : logit_scale<V, kConfig.dtype_kv>(params);
  }

  // Logits of row r become what softmax sees, but for factor(): variant and masks applied.
  void transform_logits(int r, int kv_head, const KeyTile& tile) {
    float* logits = scratch.logits + r * kTileKv;
    const int num_keys = tile.num_keys;
    const int qo_head = kv_head * params.group_size + row_group_head[r];
    const int request = row_request[r], q_pos = row_position[r];
    if constexpr (Traits::kHasLogitsTransform) {
      const float scale = logit_scale<V, kConfig.dtype_kv>(params);
      for (int k = 0; k < num_keys; ++k) {
        const LogitContext context{request, q_pos, tile.position[k], qo_head, kv_head};
        logits[k] = V::logits_transform(variant, context, scale * logits[k]);
      }
    }
    constexpr float kHidden = kUseSoftmax ? kNegInf : 0.0f;
    if (tile.visibility != TileVisibility::kFull) {
      const Visibility v = params.visible;
      for (int k = 0; k < num_keys; ++k) {
        logits[k] = visible(v, q_pos, tile.position[k]) ? logits[k] : kHidden;
      }
    }
    if constexpr (Traits::kCustomMask) {
      if (tile.visibility != TileVisibility::kFull) {
        const TokenMask& mask = plan.token_mask[row_token[r]];
        for (int k = 0; k < num_keys; ++k) {
          logits[k] = mask_bit(plan.mask_words, mask, tile.position[k]) ? logits[k] : kHidden;
        }
      }
    }
    if constexpr (Traits::kHasLogitsMask) {
      for (int k = 0; k < num_keys; ++k) {
        const LogitContext context{request, q_pos, tile.position[k], qo_head, kv_head};
        logits[k] = V::logits_mask(variant, context) ? logits[k] : kHidden;
      }
    }
  }

  // logits -> weights, in place, of row r: exp2(logit - largest so far). Keeps the state of the row
  // and leaves the factor for what was accumulated before in rescale[r].
  void softmax_row(int r, int pass_head, int num_keys) {
    float* logits = scratch.logits + r * kTileKv;
    const int padded = round_up(num_keys, kLanes);
    for (int k = num_keys; k < padded; ++k) logits[k] = kNegInf;

    Vec largest = load(logits);
    for (int k = kLanes; k < padded; k += kLanes) largest = max(load(logits + k), largest);
    float& max_logit = scratch.max_logit[slot(pass_head) + r];
    const float new_max = max(max_of(largest), max_logit);
    const float offset = new_max == kNegInf ? 0.0f : new_max;  // -inf - -inf is NaN
    const float base2 = factor() * kLog2e;

    Vec sums{};
    for (int k = 0; k < padded; k += kLanes) {
      // Subtract first: the largest weight is exactly 1, so one key's value comes out unchanged.
      const Vec weights = exp2((load(logits + k) - offset) * base2);
      sums += weights;
      store(logits + k, weights);
    }
    const float rescale = exp2((max_logit - offset) * base2);
    float& sum = scratch.sum[slot(pass_head) + r];
    sum = sum * rescale + sum_of(sums);
    max_logit = new_max;
    scratch.rescale[r] = rescale;
  }

  void make_weights(int kv_head, int pass_head, const KeyTile& tile) {
    for (int r = 0; r < num_rows; ++r) {
      transform_logits(r, kv_head, tile);
      if constexpr (kUseSoftmax) {
        softmax_row(r, pass_head, tile.num_keys);
      } else {
        float* logits = scratch.logits + r * kTileKv;
        for (int k = 0; k < tile.num_keys; ++k) logits[k] *= factor();
        scratch.rescale[r] = 1.0f;
      }
    }
    for (int r = num_rows; r < padded_rows(); ++r) scratch.rescale[r] = 0.0f;
  }

  // out = rescale * out + weights V.
  void multiply_values(int kv_head, int pass_head, const KeyTile& tile) {
    float* out = out_of(pass_head);
    if (few_rows && !Traits::kHasValueTransform && dim_vo % kLanes == 0) {
      const CacheRows<T> values{v_head(kv_head), tile.v_offset, v_head(ahead_head),
                                ahead->v_offset};
      matmul<kDotRows>(scratch.logits, kTileKv, num_rows, values, dim_vo, tile.num_keys,
                       scratch.rescale, out, pitch_vo);
      return;
    }
    convert_values(kv_head, tile);
    const BufferRows values{scratch.v, pitch_vo};
    if (few_rows) {
      matmul<kDotRows>(scratch.logits, kTileKv, num_rows, values, pitch_vo, tile.num_keys,
                       scratch.rescale, out, pitch_vo);
    } else {
      matmul<kManyRowBlock>(scratch.logits, kTileKv, num_rows, values, pitch_vo, tile.num_keys,
                            scratch.rescale, out, pitch_vo);
    }
  }

  template <class To>
  void write_row(const float* out, i64 offset) const {
    To* to = static_cast<To*>(params.out) + offset;
    for (int d = 0; d < dim_vo; ++d) to[d] = from_float<To>(out[d]);
  }

  // A final row: V's scale, output_transform, conversion, LSE. `out` is normalised; `empty`: it saw
  // no key.
  void store_row(int token, int qo_head, float* out, bool empty, float lse) const {
    if constexpr (is_fp8(kConfig.dtype_kv)) {
      for (int d = 0; d < dim_vo; ++d) out[d] *= output_scale<V, kConfig.dtype_kv>(params);
    }
    if constexpr (Traits::kHasOutputTransform) {
      if (!empty) {
        const int request = plan.token_request[token], q_pos = plan.token_position[token];
        for (int d = 0; d < dim_vo; ++d) {
          out[d] = V::output_transform(variant, OutputContext{request, q_pos, qo_head, d}, out[d]);
        }
      }
    }
    const i64 offset = token * params.out_stride.token + qo_head * params.out_stride.head;
    if (dtype == Dtype::kFloat32) {
      write_row<float>(out, offset);
    } else if (dtype == Dtype::kBfloat16) {
      write_row<Bfloat16>(out, offset);
    } else {
      write_row<Float16>(out, offset);
    }
    if (kUseSoftmax && params.lse != nullptr) {
      params.lse[token * params.lse_stride.token + qo_head * params.lse_stride.head] = lse;
    }
  }

  // NaN stays NaN: a row that saw one must not pass for an empty one where states are merged.
  static float natural_lse(float max_logit, float sum) {
    return sum == 0.0f ? kNegInf : max_logit + log2(sum) * kLn2;
  }

  // ---- Invariant mode: the output of pass head 0 is that of a chunk; it is folded into `folded`.
  // No copies of this in its callers, which a compiler might contract each in its way.
  __attribute__((noinline)) static void fold_row(FoldedState& state, float lse, const float* chunk,
                                                 int dim, float* out) {
    const FoldFactors factors = kUseSoftmax ? fold(state, lse) : FoldFactors{1.0f, 1.0f};
    for (int d = 0; d < dim; ++d) {
      out[d] = kUseSoftmax ? fold(factors, out[d], chunk[d]) : out[d] + chunk[d];
    }
  }
  void start_folds() {
    for (int r = 0; r < num_rows; ++r) folded_state[r] = {};
    __builtin_memset(scratch.folded, 0, num_rows * pitch_vo * sizeof(float));
  }
  // And clears it for the next chunk.
  void fold_chunk() {
    for (int r = 0; r < num_rows; ++r) {
      float* out = out_of(0) + r * pitch_vo;
      float &max_logit = scratch.max_logit[r], &sum = scratch.sum[r];
      if constexpr (kUseSoftmax) {
        const float inverse = 1.0f / sum;
        for (int d = 0; d < dim_vo; ++d) out[d] = sum == 0.0f ? 0.0f : out[d] * inverse;
      }
      fold_row(folded_state[r], natural_lse(max_logit * factor(), sum), out, dim_vo,
               scratch.folded + r * pitch_vo);
      __builtin_memset(out, 0, dim_vo * sizeof(float));
      max_logit = kNegInf;
      sum = 0.0f;
    }
  }
  // Whether `after`, of the next keys, is of another chunk.
  bool ends_chunk(const KeyTile& tile, const KeyTile& after) const {
    return after.num_keys == 0 || after.position[0] / chunk_keys != tile.position[0] / chunk_keys;
  }

  void store_rows(int kv_head, int pass_head) const {
    for (int r = 0; r < num_rows; ++r) {
      float* out = out_of(pass_head) + r * pitch_vo;
      const float max_logit = scratch.max_logit[slot(pass_head) + r];
      const float sum = chunk_keys > 0 ? folded_state[r].sum : scratch.sum[slot(pass_head) + r];
      const bool empty = kUseSoftmax && sum == 0.0f;
      float lse;
      if (chunk_keys > 0) {
        const float scale = kUseSoftmax ? fold_scale(folded_state[r]) : 1.0f;
        for (int d = 0; d < dim_vo; ++d) out[d] = folded(scratch.folded[r * pitch_vo + d], scale);
        lse = fold_lse(folded_state[r]);
      } else {
        if constexpr (kUseSoftmax) {
          const float inverse = empty ? 0.0f : 1.0f / sum;
          for (int d = 0; d < dim_vo; ++d) out[d] = empty ? 0.0f : out[d] * inverse;
        }
        lse = natural_lse(max_logit * factor(), sum);
      }
      if (item->partial_row < 0) {
        store_row(row_token[r], kv_head * params.group_size + row_group_head[r], out, empty, lse);
      } else {
        const i64 row = item->partial_row +
                        static_cast<i64>(kv_head - item->kv_head_begin) * item->num_rows + r;
        __builtin_memcpy(params.partial_out + row * dim_vo, out, dim_vo * sizeof(float));
        params.partial_lse[row] = lse;
      }
    }
  }

  // ---- One item, kv heads [head, head + num_heads) of it, side by side in one pass over the keys.
  void attend_pass(int head, int num_heads) {
    for (int h = 0; h < num_heads; ++h) load_queries(head + h, h);
    KeyTile tiles[2];
    const auto find = [&](int next, KeyTile& tile) {
      return chunk_keys > 0 ? find_aligned_keys(next, tile) : find_keys(next, tile);
    };
    if (chunk_keys > 0) start_folds();
    int next_key = find(range.begin, tiles[0]);
    for (int t = 0; tiles[t].num_keys > 0; t = 1 - t) {
      const KeyTile &tile = tiles[t], &following = tiles[1 - t];
      next_key = find(next_key, tiles[1 - t]);
      for (int h = 0; h < num_heads; ++h) {
        // Read next: the next head of the same keys; after the last one, the next keys.
        const bool next_is_tile = h + 1 == num_heads && following.num_keys >= tile.num_keys;
        ahead = next_is_tile ? &following : &tile;
        ahead_head = h + 1 == num_heads ? head : head + h + 1;
        multiply_keys(head + h, h, tile);
        make_weights(head + h, h, tile);
        multiply_values(head + h, h, tile);
      }
      if (chunk_keys > 0 && ends_chunk(tile, following)) fold_chunk();
    }
    for (int h = 0; h < num_heads; ++h) store_rows(head + h, h);
  }

  void attend(int index, int head, int num_heads) {
    item = &plan.items[index];
    block = &plan.row_blocks[item->row_block];
    num_rows = item->num_rows;
    few_rows = num_rows <= kFewRows && chunk_keys == 0;  // else a row has other sums among others
    find_rows();
    key_request = request_of_keys(plan, *block);
    range = visible_keys(params.visible, item->min_position, item->max_position,
                         block->kv_pos_begin, block->kv_len);
    range = {max(range.begin, item->kv_begin), min(range.end, item->kv_end)};
    first_entry = plait::first_entry(plan.tables[block->level], *block);
    const int heads_a_pass = few_rows ? kHeadsPerPass : 1;
    for (int h = 0; h < num_heads; h += heads_a_pass) {
      attend_pass(head + h, min(heads_a_pass, num_heads - h));
    }
  }

  // ---- Merge: joins the partial rows of the i-th query head of a list, in the list's order.
  void merge_row(int list, int i, int qo_head) const {
    float out[256] = {};
    const int token = list / (params.num_kv_heads * plan.lists_per_head);
    if (chunk_keys > 0) {
      FoldedState state;
      for (int s = plan.merge_indptr[list]; s < plan.merge_indptr[list + 1]; ++s) {
        const i64 row = plan.merge_sources[s] + i;
        fold_row(state, kUseSoftmax ? params.partial_lse[row] : 0.0f,
                 params.partial_out + row * dim_vo, dim_vo, out);
      }
      const float scale = kUseSoftmax ? fold_scale(state) : 1.0f;
      for (int d = 0; d < dim_vo; ++d) out[d] = folded(out[d], scale);
      store_row(token, qo_head, out, kUseSoftmax && state.sum == 0.0f, fold_lse(state));
      return;
    }
    SoftmaxState state;
    for (int s = plan.merge_indptr[list]; s < plan.merge_indptr[list + 1]; ++s) {
      const i64 row = plan.merge_sources[s] + i;
      const float* partial = params.partial_out + row * dim_vo;
      OutputScales scales{1.0f, 1.0f};
      if constexpr (kUseSoftmax) {
        scales = merge(state, state_of_lse(params.partial_lse[row]));
        if (scales.b == 0.0f) continue;  // an empty state
      }
      for (int d = 0; d < dim_vo; ++d) out[d] = scales.a * out[d] + scales.b * partial[d];
    }
    const bool empty = kUseSoftmax && state.sum == 0.0f;
    if (kUseSoftmax && !empty) {
      const float inverse = 1.0f / state.sum;
      for (int d = 0; d < dim_vo; ++d) out[d] *= inverse;
    }
    store_row(token, qo_head, out, empty, natural_lse(state.max_logit * kLn2, state.sum));
  }
};

template <Config kConfig, class V>
inline void attention(const Call& call) {
  Attention<kConfig, V> self(call);
  if (call.phase == Phase::kAttend) {
    self.attend(call.index, call.head, call.num_heads);
    return;
  }
  for (int i = 0; i < call.num_heads; ++i) self.merge_row(call.index, i, call.head + i);
}

}  // namespace PLAIT_CPU_ISA
}  // namespace plait::cpu
