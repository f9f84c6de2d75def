// The list of row tiles that kernels/plan_lengths.cuh cuts: the requests with queries as row
// blocks, their tiles numbered and measured, and any tile or cut of the list by its number.
#pragma once
#include "host_device/plan_lengths_call.h"
#include "host_device/shares.h"
#include "planner/cta_sums.cuh"

namespace plait {

struct PlannerSmem {
  // Memory of one step after the other, in 8 bytes: where tiles end (more are in global memory), or
  // merge lists; behind them, to the end, the row blocks.
  static constexpr int kSize = 4096, kRowBlocks = 512, kBeforeRowBlocks = kSize - 2 * kRowBlocks;
  i64 steps[kSize];
  CutPoint cuts[kMaxPlannedCtas + 1];
  // Of each CTA: its first item and its first part (num_parts()).
  int item_begin[kMaxPlannedCtas + 1], part_begin[kMaxPlannedCtas + 1];
  // Of each cut in a head: rows of its tile; once items are numbered, the first cut in that head.
  unsigned short rows_or_first_cut[kMaxPlannedCtas + 1];
  Addends of_warps[2][32];
  unsigned slowest[kShareWays];
  int joins[kShareWays];
  // What the steps find out, the same for all threads.
  int num_blocks, blocks_in_smem, one_tile_each;
  MeasuredList list;
  // Copies of what functions that are called need of the kernel's argument: they know it only by
  // its address, and would wait for memory.
  int causal, window_left, sink_tokens;  // Visibility
  CutRules rules;
  ShapeCost shapes[2];
  int tile_q[2], num_shapes, group_size;
  const RowBlock* row_blocks;
  const int* global_tile_end;

  // Row blocks.
  PLAIT_DEVICE int* tile_end() { return reinterpret_cast<int*>(steps + kBeforeRowBlocks); }
  PLAIT_DEVICE int* first_token() { return tile_end() + kRowBlocks; }
  PLAIT_DEVICE int* num_tokens() { return first_token() + kRowBlocks; }
  PLAIT_DEVICE int* kv_len() { return num_tokens() + kRowBlocks; }
  // Of a list that is tried in several ways.
  PLAIT_DEVICE i64* pieces_end_ps() { return steps + kMaxTilesInPieces; }
  PLAIT_DEVICE unsigned* loads() {
    return reinterpret_cast<unsigned*>(steps + 2 * kMaxTilesInPieces);
  }
};
static_assert(2 * kMaxTilesInPieces + kShareWays * kMaxPlannedCtas / 2 <=
              PlannerSmem::kBeforeRowBlocks);
static_assert(sizeof(PlannerSmem) <= 48 * 1024);  // what a kernel has without asking
__shared__ PlannerSmem smem;

// What the steps find out, in the registers of every thread.
struct Found {
  int num_tiles, num_tokens, num_ways, num_items, num_partial_rows;
  bool has_long_requests;
};

PLAIT_DEVICE RowBlock row_block(int b) {
  if (!smem.blocks_in_smem) return smem.row_blocks[b];
  RowBlock block{};
  block.first_token = smem.first_token()[b];
  block.num_tokens = smem.num_tokens()[b];
  block.kv_len = smem.kv_len()[b];
  return block;
}

// Tile `i` of the list.
PLAIT_CALLED RowTile list_tile(int i) {
  int b = i, first_tile = i;
  if (!smem.one_tile_each) {
    const int* const tile_end = smem.blocks_in_smem ? smem.tile_end() : smem.global_tile_end;
    b = first_above(tile_end, smem.num_blocks, i);
    first_tile = b > 0 ? tile_end[b - 1] : 0;
  }
  RowTile tile =
      row_tile_of(row_block(b), b, i - first_tile, smem.tile_q, smem.num_shapes, smem.group_size,
                  {smem.causal, smem.window_left, smem.sink_tokens}, smem.rules);
  tile.head_ps = tile_ps(smem.shapes[tile.shape], smem.rules, tile.seen(), false);
  return tile;
}

PLAIT_CALLED ListCut list_cut(int way, int cta) {
  struct Tiles {
    PLAIT_DEVICE RowTile operator[](int i) const { return list_tile(i); }
  };
  return cut_list(smem.list, Tiles{}, smem.shapes, smem.rules, way, cta);
}

// Row blocks of the requests with queries, their tiles counted, and the tokens of those with one.
PLAIT_DEVICE void read_requests(const PlanLengthsCall& call, Found& found) {
  const int thread = threadIdx.x, num_threads = blockDim.x;
  const int num_requests = call.lengths.num_requests;
  const bool in_smem = num_requests <= PlannerSmem::kRowBlocks;
  constexpr int kTileBits = 40;
  constexpr i64 kTiles = (i64{1} << kTileBits) - 1;
  if (thread == num_threads - 1) {
    smem.causal = call.visible.causal;
    smem.window_left = call.visible.window_left;
    smem.sink_tokens = call.visible.sink_tokens;
    smem.rules = call.rules;
    for (int i = 0; i < 2; ++i) smem.shapes[i] = call.shapes[i];
    for (int i = 0; i < 2; ++i) smem.tile_q[i] = call.tile_q[i];
    smem.num_shapes = call.num_shapes;
    smem.group_size = call.group_size;
    smem.row_blocks = call.row_blocks;
    smem.global_tile_end = call.block_tile_end;
  }
  i64 sum = 0, long_requests = 0;  // sum: blocks << kTileBits | tiles
  int turn = 0;
#pragma unroll 1
  for (int first = 0; first < num_requests; first += num_threads) {
    const int request = first + thread;
    RowBlock block{};
    if (request < num_requests) block = row_block_of(call.lengths, request);
    int tiles = block.num_tokens > 0;
    if (block.num_tokens * call.group_size > call.tile_q[0]) {
      tiles = min(num_row_tiles(block.num_tokens, call.tile_q[0], call.group_size), call.max_tiles);
    }
    const Addends own{i64{block.num_tokens > 0} << kTileBits | tiles, block.num_tokens > 1,
                      block.num_tokens > 0 ? block.first_token + block.num_tokens : 0};
    const CtaSums sums = cta_sums(smem.of_warps[turn ^= 1], own, num_requests - first);
    const i64 before = sum + sums.before;
    sum += sums.total;
    long_requests += sums.also;
    found.num_tokens = max(found.num_tokens, sums.most);
    if (block.num_tokens == 0) continue;
    const int b = static_cast<int>(before >> kTileBits);
    const int tile_end = clamped((before & kTiles) + tiles, 0, call.max_tiles);
    if (in_smem) {
      smem.tile_end()[b] = tile_end;
      smem.first_token()[b] = block.first_token;
      smem.num_tokens()[b] = block.num_tokens;
      smem.kv_len()[b] = block.kv_len;
    }
    call.block_tile_end[b] = tile_end;
    call.row_blocks[b] = block;
    if (block.num_tokens == 1) {
      call.token_request[block.first_token] = request;
      call.token_position[block.first_token] = block.kv_len - 1;
    }
  }
  found.num_tiles = clamped(sum & kTiles, 0, call.max_tiles);
  found.has_long_requests = long_requests > 0;
  if (thread == 0) {
    smem.num_blocks = static_cast<int>(sum >> kTileBits);
    // Else the ends of tiles are written there.
    smem.blocks_in_smem = in_smem && found.num_tiles <= PlannerSmem::kBeforeRowBlocks;
    smem.one_tile_each = (sum & kTiles) == sum >> kTileBits;
  }
  __syncthreads();
}

// Tokens of requests with several.
PLAIT_DEVICE void write_tokens(const PlanLengthsCall& call, const Found& found) {
  struct Ends {
    const DeviceLengths& lengths;
    PLAIT_DEVICE i64 operator[](int i) const { return lengths.qo_indptr[i + 1]; }
  };
  const DeviceLengths& lengths = call.lengths;
#pragma unroll 1
  for (int token = threadIdx.x; token < found.num_tokens; token += blockDim.x) {
    const int request = first_above(Ends{lengths}, lengths.num_requests, i64{token});
    call.token_request[token] = request;
    call.token_position[token] =
        static_cast<int>(kv_len_of(lengths, load_lengths(lengths, request)) -
                         lengths.qo_indptr[request + 1] + token);
  }
}

// Where tiles end in the list, and its shares: of unsplit heads, then in pieces.
PLAIT_DEVICE void measure_tiles(const PlanLengthsCall& call, Found& found) {
  const CutRules& rules = call.rules;
  const int num_tiles = found.num_tiles, num_threads = blockDim.x;
  i64* const unsplit_end_ps = num_tiles <= PlannerSmem::kSize ? smem.steps : call.tile_end_ps;
  int chunk = 0;
  found.num_ways = share_ways(num_tiles, rules, call.num_ctas);
  int turn = 0;
#pragma unroll 1
  for (int pieces = 0; pieces < (found.num_ways > 1 ? 2 : 1); ++pieces) {
    i64* const end_ps = pieces ? smem.pieces_end_ps() : unsplit_end_ps;
    i64 total_ps = 0, keys = 0;
    int longest = 0;
#pragma unroll 1
    for (int first = 0; first < num_tiles; first += num_threads) {
      const int i = first + threadIdx.x;
      Addends own{};
      if (i < num_tiles) {
        const RowTile tile = list_tile(i);
        const ShapeCost& shape = call.shapes[tile.shape];
        const TileLength length =
            pieces ? length_in_pieces(tile, shape, rules, chunk) : unsplit_length(tile, rules);
        own = {length.total_ps(), tile.seen(),
               units_of(pieces ? length.piece_ps : smallest_piece_ps(tile, shape, rules))};
      }
      const CtaSums sums = cta_sums(smem.of_warps[turn ^= 1], own, num_tiles - first);
      if (i < num_tiles) end_ps[i] = total_ps + sums.before + own.value;
      total_ps += sums.total;
      keys += sums.also;
      longest = max(longest, sums.most);
    }
    const int first_of_warp = threadIdx.x / 32 * 32;
    if (!pieces && found.num_ways > 1 && first_of_warp < num_tiles) {
      chunk = keys_a_cta(keys * rules.num_kv_heads, rules, call.num_ctas);
    }
    if (threadIdx.x == 32 * (1 + pieces)) {  // of a warp that need not go on
      const i64 mean_ps = mean_share(total_ps, call.num_ctas);
      smem.list.share_ps[pieces] = share_of(mean_ps, pieces ? 0 : longest);
      if (pieces) smem.list.share_ps[2] = share_of(mean_ps, longest);
    }
  }
  if (threadIdx.x == 0) {
    smem.list.num_tiles = num_tiles;
    smem.list.chunk = chunk;
    smem.list.unsplit_end_ps = unsplit_end_ps;
    smem.list.pieces_end_ps = smem.pieces_end_ps();
    for (int& joins : smem.joins) joins = 0;
  }
  __syncthreads();
}

}  // namespace plait
