// The attention kernel of sm_80 and of every later architecture without a template of its own:
// persistent CTAs whose warps all load (cp.async, load.cuh) and all compute, on mma.sync
// (mma_tile.cuh) or, a row at a time, on CUDA cores (scalar_tile.cuh). Every format and every shape
// of the configuration runs in this one loop. docs/kernels.md draws it.
#pragma once
#include "sm80/load.cuh"
#include "sm80/mma_tile.cuh"
#include "sm80/scalar_tile.cuh"
#include "sm80/softmax.cuh"
#include "sm80/store.cuh"
#include "tile/begin.cuh"
#include "tile/draw.cuh"

namespace plait::sm80 {

template <KernelConfig kConfig>
PLAIT_DEVICE void check_config() {
  static_assert(kConfig.dtype_q == kConfig.dtype_out && bytes_of(kConfig.dtype_q) == 2,
                "the sm80 template takes bfloat16 or float16");
  static_assert(kConfig.dtype_q == kConfig.dtype_kv ||
                    (is_fp8(kConfig.dtype_kv) && kConfig.head_dim_qk % 16 == 0 &&
                     kConfig.head_dim_vo % 16 == 0),
                "K and V have q's dtype, or are fp8 in rows of whole 16 bytes");
  static_assert(kConfig.head_dim_qk % 8 == 0 && kConfig.head_dim_vo % 8 == 0,
                "rows are copied in units of 8 elements");
  static_assert(kConfig.num_stages >= 1, "K and V need a stage");
  static_assert(sizeof(Smem<kConfig>) <= sm80_smem_bytes(kConfig), "the host launches with this");
}

// Where the first of the unit's keys lies, or that of block 0.
template <KernelConfig kConfig>
PLAIT_DEVICE const unsigned char* first_row(const void* data, const KvStrides& stride,
                                            const Unit& unit) {
  constexpr bool kAffine = kConfig.loader == plait::Loader::kAffine;
  const KeySlot slot{kAffine ? unit.first_entry : 0, 0};
  return static_cast<const unsigned char*>(data) +
         bytes_of(kConfig.dtype_kv) * key_offset(stride, slot, unit.kv_head, kAffine);
}

// Invariant mode: the chunks that an item visits.
template <KernelConfig kConfig>
PLAIT_DEVICE TileList chunks_of(const Params& params, const WorkItem& item, const RowBlock& block) {
  return tiles_of(item, params.visible, block.kv_pos_begin, kConfig.chunk_keys);
}

// Hands the item's head-th kv head to all threads: the unit, and the rows of its tile.
template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void start_unit(const VariantCall<Variant>& call, Smem<kConfig>& smem, int item_index,
                             int head, int chunk, int tile_q) {
  using Traits = VariantTraits<Variant>;
  const Params& params = call.params;
  const PlanView& plan = *params.plan;
  const WorkItem& item = plan.items[item_index];
  const RowBlock& block = plan.row_blocks[item.row_block];
  __syncthreads();  // the unit before is stored
  if (threadIdx.x == 0) {
    Unit& unit = smem.unit;
    unit.item_index = item_index;
    unit.head = head;
    unit.table = plan.tables[block.level];
    unit.first_entry = first_entry(unit.table, block);
    unit.kv_head = item.kv_head_begin + head;
    unit.k = first_row<kConfig>(params.k, params.k_stride, unit);
    unit.v = first_row<kConfig>(params.v, params.v_stride, unit);
    unit.num_rows = item.num_rows;
    unit.kv_pos_begin = block.kv_pos_begin;
    const auto take_keys = [&](const WorkItem& keys) {
      unit.kv_end = keys.kv_end;
      unit.tiles = tiles_of(keys, params.visible, block.kv_pos_begin, kConfig.tile_kv);
      unit.num_tiles = unit.tiles.size();
      unit.full_tiles = full_tiles_of(keys, params.visible, block.kv_pos_begin, kConfig.tile_kv);
    };
    if constexpr (kConfig.chunk_keys > 0) {
      unit.chunk = chunk;
      const TileList chunks = chunks_of<kConfig>(params, item, block);
      take_keys(chunk_of(item, params.visible, block.kv_pos_begin, chunks[chunk],
                         kConfig.chunk_keys, kConfig.tile_kv));
    } else {
      take_keys(item);
    }
    if constexpr (Traits::kHasKeyTransform || Traits::kHasValueTransform) {
      unit.request = request_of_keys(plan, block);
    }
  }
#pragma unroll 1  // a round, or two
  for (int row = threadIdx.x; row < tile_q; row += num_threads(kConfig)) {
    const PackedRow packed =
        packed_row(plan, block, item.first_row + (row < item.num_rows ? row : 0),
                   item.kv_head_begin + head, params.group_size);
    smem.rows[row] = {packed.token, packed.qo_head, plan.token_request[packed.token],
                      plan.token_position[packed.token]};
  }
  __syncthreads();
}

// The unit's tiles, in one shape; K and V of the first are under way.
template <KernelConfig kConfig, class Variant, int kShape>
PLAIT_DEVICE void attend(const VariantCall<Variant>& call, Smem<kConfig>& smem,
                         Loader<kConfig, Variant>& loader) {
  using Tile = Select<kConfig.shapes[kShape].mma == Mma::kScalar, ScalarTile<kConfig, kShape>,
                      MmaTile<kConfig, kShape, VariantTraits<Variant>::kUseSoftmax>>;
  Tile tile;
  Softmax<Variant, Tile> softmax;
  tile.clear_output();
#pragma unroll 1
  for (int j = 0; j < smem.unit.num_tiles; ++j) {
    const int stage = j % kConfig.num_stages;
    loader.await_k(j, stage);
    const bool full = is_full(smem.unit, j);
    tile.multiply_q_k(smem.q, smem.q_scales, loader.k_tile(stage), loader.next_v(j, stage));
    loader.await_v(j, stage);
    softmax.transform(call, smem.unit, smem.rows, j, kConfig.tile_kv, full, tile);
    softmax.follow_maximum(call.params, tile);
    tile.add_p_v(
        loader.v_tile(stage),
        [&](int first, int count) { softmax.weigh(call.params, tile, first, count); },
        loader.next_k(j, stage));
  }
  if constexpr (kConfig.chunk_keys > 0) {
    const WorkItem& item = call.params.plan->items[smem.unit.item_index];
    const RowBlock& block = call.params.plan->row_blocks[item.row_block];
    const bool is_last = smem.unit.chunk + 1 >= chunks_of<kConfig>(call.params, item, block).size();
    store_rows<kConfig, Variant>(call, smem, tile, softmax, smem.unit.chunk == 0, is_last);
  } else {
    store_rows<kConfig, Variant>(call, smem, tile, softmax, true, true);
  }
}

template <KernelConfig kConfig, class Variant>
PLAIT_DEVICE void attention(const VariantCall<Variant>& call) {
  check_config<kConfig>();
  constexpr bool kFixed = kConfig.shapes[0].tile_q > 64;  // else a register too many
  Smem<kConfig>& smem =
      *static_cast<Smem<kConfig>*>(kFixed ? ptx::fixed_dynamic_smem() : ptx::dynamic_smem());
  const Params& params = call.params;
  const PlanView& plan = *params.plan;
  begin_kernel();
  int item_index = params.starts[blockIdx.x].item_begin, head = 0, chunk = 0;
#pragma unroll 1
  while (true) {
    if (head == 0 && chunk == 0) item_index = next_item(params, item_index, &smem.unit.drawn);
    if (item_index < 0) break;
    const bool first_shape = kConfig.num_shapes == 1 || plan.items[item_index].shape == 0;
    const int tile_q = kConfig.shapes[first_shape ? 0 : 1].tile_q;
    start_unit<kConfig, Variant>(call, smem, item_index, head, chunk, tile_q);
    Loader<kConfig, Variant> loader{call, smem};
    if (smem.unit.num_tiles > 0) loader.start(tile_q);
    if (first_shape) {
      attend<kConfig, Variant, 0>(call, smem, loader);
    } else if constexpr (kConfig.num_shapes > 1) {
      attend<kConfig, Variant, 1>(call, smem, loader);
    }
    // From shared memory, and from the plan anew: nothing of it is kept in registers meanwhile.
    item_index = smem.unit.item_index;
    head = smem.unit.head;
    const WorkItem& item = plan.items[item_index];
    if constexpr (kConfig.chunk_keys > 0) {
      chunk = smem.unit.chunk + 1;
      if (chunk < chunks_of<kConfig>(params, item, plan.row_blocks[item.row_block]).size())
        continue;
      chunk = 0;
    }
    if (item.partial_row >= 0) {
      constexpr int kThreads = num_threads(kConfig);
      const auto head_of = [&](int i) { return head_of_item(params, plan, item, head, i); };
      const auto is_end = [&] {
        return head + 1 == item.num_heads && !has_queue(params) &&
               item_index + 1 >= params.starts[blockIdx.x].item_end;
      };
      arrive_and_merge<kConfig, Variant>(params, call.variant, plan, head_of,
                                         item.first_row % params.group_size, item.num_rows,
                                         threadIdx.x, kThreads, smem.merging, is_end(),
                                         [] { __syncthreads(); });
    }
    if (++head == item.num_heads) {
      head = 0;
      ++item_index;
    }
  }
  store_padding_rows<kConfig, Variant>(params, plan, threadIdx.x, num_threads(kConfig));
}

}  // namespace plait::sm80
