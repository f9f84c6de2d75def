// Plans a batch whose lengths and tables lie on the device: what make_plan() does on the host with
// Scheduler::kPrefixSum, item for item, by the same cuts (host_device/shares.h). One CTA, so that
// no step waits for another one's memory; each step is a loop of all its threads.
#pragma once
#include "host_device/plan_lengths_call.h"
#include "host_device/shares.h"

// Called, not inlined: each instruction is run once or a few times, so that fetching them is most
// of what they cost. Inlined where they are used, they were 160 KB.
#if defined(__CUDACC__)
#define PLAIT_CALLED __device__ __noinline__
#else
#define PLAIT_CALLED inline
#endif

namespace plait {

struct PlanLengthsSmem {
  static constexpr int kInSmem = 512;  // row blocks and tiles; more are in global memory
  i64 unsplit_end_ps[kInSmem], pieces_end_ps[kMaxTilesInPieces];
  i64 load[kShareWays][kMaxPlannedCtas];
  CutPoint cuts[kMaxPlannedCtas + 1];
  int item_begin[kMaxPlannedCtas + 1], row_begin[kMaxPlannedCtas + 1];  // of each CTA
  int block_tile_end_in_smem[kInSmem];
  int first_token[kInSmem], num_tokens[kInSmem], kv_len[kInSmem];  // of row blocks
  i64 warp[2][32], slowest_ps[kShareWays];
  int joins[kShareWays];
  // What the steps find out, the same for all threads.
  int num_blocks, blocks_in_smem, one_tile_each;
  const int* block_tile_end;  // [num_blocks]
  MeasuredList list;
};
static_assert(sizeof(PlanLengthsSmem) <= 48 * 1024);  // what a kernel has without asking

PLAIT_DEVICE RowBlock row_block(const PlanLengthsCall& call, const PlanLengthsSmem& smem, int b) {
  if (!smem.blocks_in_smem) return call.row_blocks[b];
  RowBlock block{};
  block.first_token = smem.first_token[b];
  block.num_tokens = smem.num_tokens[b];
  block.kv_len = smem.kv_len[b];
  return block;
}

// Tile `i` of the list.
PLAIT_CALLED RowTile list_tile(const PlanLengthsCall& call, const PlanLengthsSmem& smem, int i) {
  const int b = smem.one_tile_each ? i : first_above(smem.block_tile_end, smem.num_blocks, i);
  const int first_tile = b > 0 ? smem.block_tile_end[b - 1] : 0;
  RowTile tile = row_tile_of(row_block(call, smem, b), b, i - first_tile, call.tile_q,
                             call.num_shapes, call.group_size, call.visible, call.rules);
  tile.head_ps = tile_ps(call.shapes[tile.shape], call.rules, tile.seen(), false);
  return tile;
}

PLAIT_CALLED ListCut list_cut(const PlanLengthsCall& call, const PlanLengthsSmem& smem, int way,
                              int cta) {
  struct Tiles {
    const PlanLengthsCall& call;
    const PlanLengthsSmem& smem;
    PLAIT_DEVICE RowTile operator[](int i) const { return list_tile(call, smem, i); }
  };
  return cut_list(smem.list, Tiles{call, smem}, call.shapes, call.rules, way, cta);
}

// Sums and maxima over the threads of the CTA are a barrier each: what the barrier before it was
// for is in other memory (two sets take turns).

// Of the values of all threads before this one, and of all.
struct Sums {
  i64 before, total;
};
PLAIT_DEVICE i64 warp_sum_up_to(i64 sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const i64 other = __shfl_sync(~0u, sum, max(lane - step, 0));
    if (lane >= step) sum += other;
  }
  return sum;
}
PLAIT_CALLED Sums sums_of(i64* warp_sums, i64 value) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const i64 sum = warp_sum_up_to(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  const i64 of_warp = lane < num_warps ? warp_sums[lane] : 0;
  const i64 up_to = warp_sum_up_to(of_warp);
  const Sums sums{__shfl_sync(~0u, up_to - of_warp, warp) + sum - value,
                  __shfl_sync(~0u, up_to, 31)};
  return sums;
}

PLAIT_DEVICE i64 warp_max(i64 value) {
#pragma unroll 1
  for (int step = 16; step > 0; step /= 2) {
    const i64 other = __shfl_xor_sync(~0u, value, step);
    if (other > value) value = other;
  }
  return value;
}
// Of values that are not negative.
PLAIT_CALLED i64 max_of(i64* warp_values, i64 value) {
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  value = warp_max(value);
  if (lane == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(lane < num_warps ? warp_values[lane] : 0);
}

class LengthsPlanner {
 public:
  PLAIT_DEVICE LengthsPlanner(const PlanLengthsCall& call, PlanLengthsSmem& smem)
      : call_(call), smem_(smem), thread_(threadIdx.x), num_threads_(blockDim.x) {}

  PLAIT_DEVICE void plan() {
    read_requests();
    write_tokens();
    measure_tiles();
    choose_cuts();
    number_items();
    write_items();
    if (num_partial_rows_ > 0) write_merge_lists();
    write_head();
  }

 private:
  PLAIT_DEVICE RowTile tile(int i) const { return list_tile(call_, smem_, i); }
  PLAIT_DEVICE ListCut cut(int way, int cta) const { return list_cut(call_, smem_, way, cta); }
  PLAIT_DEVICE i64* next_warp_memory() { return smem_.warp[turn_ ^= 1]; }
  PLAIT_DEVICE Sums sums_of(i64 value) { return plait::sums_of(next_warp_memory(), value); }
  PLAIT_DEVICE i64 max_of(i64 value) { return plait::max_of(next_warp_memory(), value); }

  // Row blocks of the requests with queries, their tiles counted.
  PLAIT_DEVICE void read_requests() {
    const int num_requests = call_.lengths.num_requests;
    const bool in_smem = num_requests <= PlanLengthsSmem::kInSmem;
    int* const tile_end = in_smem ? smem_.block_tile_end_in_smem : call_.block_tile_end;
    constexpr int kTileBits = 40;
    constexpr i64 kTiles = (i64{1} << kTileBits) - 1;
    i64 sum = 0;  // blocks << kTileBits | tiles
    int end_token = 0;
    bool several = false;
#pragma unroll 1
    for (int first = 0; first < num_requests; first += num_threads_) {
      const int request = first + thread_;
      RowBlock block{};
      if (request < num_requests) block = row_block_of(call_.lengths, request);
      const int tiles =
          min(num_row_tiles(block.num_tokens, call_.tile_q[0], call_.group_size), call_.max_tiles);
      const Sums sums = sums_of(i64{block.num_tokens > 0} << kTileBits | tiles);
      const i64 before = sum + sums.before;
      sum += sums.total;
      if (block.num_tokens == 0) continue;
      const int b = static_cast<int>(before >> kTileBits);
      tile_end[b] = clamped((before & kTiles) + tiles, 0, call_.max_tiles);
      call_.row_blocks[b] = block;
      if (in_smem) {
        smem_.first_token[b] = block.first_token;
        smem_.num_tokens[b] = block.num_tokens;
        smem_.kv_len[b] = block.kv_len;
      }
      if (block.num_tokens == 1) {
        call_.token_request[block.first_token] = request;
        call_.token_position[block.first_token] = block.kv_len - 1;
      }
      several |= block.num_tokens > 1;
      end_token = max(end_token, block.first_token + block.num_tokens);
    }
    if (thread_ == 0) {
      smem_.num_blocks = static_cast<int>(sum >> kTileBits);
      smem_.blocks_in_smem = in_smem;
      smem_.one_tile_each = (sum & kTiles) == sum >> kTileBits;
      smem_.block_tile_end = tile_end;
    }
    num_tiles_ = clamped(sum & kTiles, 0, call_.max_tiles);
    num_tokens_ = static_cast<int>(max_of(end_token));
    has_long_requests_ = max_of(several) > 0;
  }

  // Those of requests with several; the others' are written.
  PLAIT_DEVICE void write_tokens() const {
    if (!has_long_requests_) return;
    struct Ends {
      const DeviceLengths& lengths;
      PLAIT_DEVICE i64 operator[](int i) const { return lengths.qo_indptr[i + 1]; }
    };
    const DeviceLengths& lengths = call_.lengths;
#pragma unroll 1
    for (int token = thread_; token < num_tokens_; token += num_threads_) {
      const int request = first_above(Ends{lengths}, lengths.num_requests, i64{token});
      call_.token_request[token] = request;
      call_.token_position[token] =
          static_cast<int>(kv_len_of(lengths, request) - lengths.qo_indptr[request + 1] + token);
    }
  }

  // Lengths of the list, and its shares.
  PLAIT_DEVICE void measure_tiles() {
    const CutRules& rules = call_.rules;
    i64* const unsplit_end =
        num_tiles_ <= PlanLengthsSmem::kInSmem ? smem_.unsplit_end_ps : call_.tile_end_ps;
    i64 unsplit_ps = 0, keys = 0, smallest_ps = 0;
#pragma unroll 1
    for (int first = 0; first < num_tiles_; first += num_threads_) {
      const int i = first + thread_;
      i64 ps = 0;
      if (i < num_tiles_) {
        const RowTile at = tile(i);
        ps = unsplit_length(at, rules).total_ps();
        keys += at.seen();
        const i64 piece_ps = smallest_piece_ps(at, call_.shapes[at.shape], rules);
        if (piece_ps > smallest_ps) smallest_ps = piece_ps;
      }
      const Sums sums = sums_of(ps);
      if (i < num_tiles_) unsplit_end[i] = unsplit_ps + sums.before + ps;
      unsplit_ps += sums.total;
    }
    MeasuredList list{};
    list.num_tiles = num_tiles_;
    list.unsplit_end_ps = unsplit_end;
    list.pieces_end_ps = smem_.pieces_end_ps;
    list.share_ps[0] = share_of(unsplit_ps, max_of(smallest_ps), call_.num_ctas);
    num_ways_ = share_ways(num_tiles_, rules, call_.num_ctas);
    if (num_ways_ > 1) {
      list.chunk = keys_a_cta(sums_of(keys).total * rules.num_kv_heads, rules, call_.num_ctas);
      measure_pieces(list);
    }
    if (thread_ == 0) smem_.list = list;
    __syncthreads();
  }
  PLAIT_DEVICE void measure_pieces(MeasuredList& list) {
    const CutRules& rules = call_.rules;
    i64 pieces_ps = 0, longest_ps = 0;
#pragma unroll 1
    for (int first = 0; first < num_tiles_; first += num_threads_) {
      const int i = first + thread_;
      i64 ps = 0;
      if (i < num_tiles_) {
        const RowTile at = tile(i);
        const TileLength length = length_in_pieces(at, call_.shapes[at.shape], rules, list.chunk);
        ps = length.total_ps();
        if (length.piece_ps > longest_ps) longest_ps = length.piece_ps;
      }
      const Sums sums = sums_of(ps);
      if (i < num_tiles_) smem_.pieces_end_ps[i] = pieces_ps + sums.before + ps;
      pieces_ps += sums.total;
    }
    list.share_ps[1] = share_of(pieces_ps, 0, call_.num_ctas);
    list.share_ps[2] = share_of(pieces_ps, max_of(longest_ps), call_.num_ctas);
  }

  PLAIT_DEVICE void choose_cuts() {
    const int num_ctas = call_.num_ctas;
    int way = 0;
    if (num_ways_ > 1) {
      if (thread_ < kShareWays) smem_.joins[thread_] = 0;
      __syncthreads();
#pragma unroll 1
      for (int i = thread_; i < num_ways_ * num_ctas; i += num_threads_) {
        const int w = i / num_ctas, cta = i - w * num_ctas;
        const ListCut from = cut(w, cta);
        smem_.load[w][cta] = run_ps(from, cut(w, cta + 1), call_.shapes, call_.rules);
        if (from.shape >= 0) smem_.joins[w] = 1;
      }
      __syncthreads();
#pragma unroll 1
      for (int w = thread_ / 32; w < num_ways_; w += num_threads_ / 32) {
        const auto load = [&](int cta) { return cta < num_ctas ? smem_.load[w][cta] : 0; };
        const i64 slowest = warp_max(slowest_of(num_ctas, call_.num_sms, load, thread_ % 32, 32));
        smem_.slowest_ps[w] = slowest + join_ps(call_.num_sms, smem_.joins[w]);
      }
      __syncthreads();
#pragma unroll 1
      for (int w = 1; w < num_ways_; ++w) {
        if (smem_.slowest_ps[w] < smem_.slowest_ps[way]) way = w;
      }
    }
#pragma unroll 1
    for (int cta = thread_; cta <= num_ctas; cta += num_threads_)
      smem_.cuts[cta] = cut(way, cta).at;
    __syncthreads();
  }

  PLAIT_DEVICE ListRun run_of(int cta) const {
    return {smem_.cuts[cta], smem_.cuts[cta + 1], call_.rules.num_kv_heads};
  }

  // Where each CTA's items and partial rows begin.
  PLAIT_DEVICE void number_items() {
    i64 sum = 0;  // items << 32 | partial rows
#pragma unroll 1
    for (int first = 0; first < call_.num_ctas; first += num_threads_) {
      const int cta = first + thread_;
      i64 value = 0;
      if (cta < call_.num_ctas) {
        const ListRun run = run_of(cta);
        int rows = 0;
        if (run.has_rest() || (run.in_one_head() && run.size() > 0)) {
          rows = tile(run.from.tile).num_rows;
        }
        if (run.has_first_keys()) rows += tile(run.to.tile).num_rows;
        value = i64{run.size()} << 32 | rows;
        if (run.size() == 0) call_.starts[cta] = CtaStart{};
      }
      const Sums sums = sums_of(value);
      const i64 before = sum + sums.before;
      if (cta < call_.num_ctas) {
        smem_.item_begin[cta] = static_cast<int>(before >> 32);
        smem_.row_begin[cta] = static_cast<int>(before & 0x7fffffff);
      }
      sum += sums.total;
    }
    num_items_ = static_cast<int>(sum >> 32);
    num_partial_rows_ = static_cast<int>(sum & 0x7fffffff);
    if (thread_ == 0) {
      smem_.item_begin[call_.num_ctas] = num_items_;
      smem_.row_begin[call_.num_ctas] = num_partial_rows_;
    }
    __syncthreads();
  }

  // Of a part of a head, of the run of `cta`: behind what was cut before, or before what is cut.
  PLAIT_DEVICE int partial_row_of(int cta, bool first_keys, int num_rows) const {
    return first_keys ? smem_.row_begin[cta + 1] - num_rows : smem_.row_begin[cta];
  }

  // In the order of their CTAs, of which each begins with the head that its end cuts, if any.
  PLAIT_DEVICE void write_items() const {
#pragma unroll 1
    for (int i = thread_; i < num_items_; i += num_threads_) {
      const int cta = first_above(smem_.item_begin + 1, call_.num_ctas, i);
      const int begin = smem_.item_begin[cta], end = smem_.item_begin[cta + 1];
      const ListRun run = run_of(cta);
      const ListPiece piece = piece_of(run, i - begin);
      const RowTile at = tile(piece.at.tile);
      WorkItem item = make_item(at, piece.at.head, piece.num_heads, piece.at.key,
                                piece.key_end < 0 ? at.seen() : piece.key_end, piece.is_part);
      const bool first_keys = run.has_first_keys() && i == end - 1;
      if (piece.is_part) item.partial_row = partial_row_of(cta, first_keys, at.num_rows);
      const int to = !run.has_first_keys() ? i : first_keys ? begin : i + 1;
      call_.items[to] = item;
      if (to == begin) {
        call_.starts[cta] = {begin, end, call_.lengths.table, item, call_.row_blocks[at.row_block]};
      }
    }
  }

  // ---- Merge lists. ----

  // The first cut that is not before a place.
  PLAIT_DEVICE int first_cut_at(const CutPoint& place) const {
    int low = 0, high = call_.num_ctas;
    while (low < high) {
      const int middle = (low + high) / 2;
      const CutPoint& at = smem_.cuts[middle];
      const bool is_before = at.tile != place.tile   ? at.tile < place.tile
                             : at.head != place.head ? at.head < place.head
                                                     : at.key < place.key;
      if (is_before) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // The part of a head that run i / 2 begins with (i even) or ends with, as an entry of the merge
  // lists of its tokens: entry `index` of `count`.
  struct Part {
    int first_list, list_stride, first_source, num_tokens;  // of its tokens
    int index, count;
  };
  PLAIT_CALLED bool part_of(int i, Part& part) const {
    const int cta = i / 2;
    const bool first_keys = i % 2 != 0;
    const ListRun run = run_of(cta);
    if (first_keys ? !run.has_first_keys()
                   : !run.has_rest() && !(run.in_one_head() && run.size() > 0)) {
      return false;
    }
    const CutPoint& at = first_keys ? run.to : run.from;
    const RowTile rows_at = tile(at.tile);
    const int group_size = call_.group_size, rows = rows_at.num_rows;
    // Partial rows of a head's parts are one behind the other.
    const int first_row = smem_.row_begin[first_cut_at({at.tile, at.head, 1})] - rows;
    const int last_row = smem_.row_begin[first_cut_at({at.tile, at.head + 1, 0}) - 1];
    const int row = partial_row_of(cta, first_keys, rows);
    const int first = rows_at.first_row / group_size;
    const int token = row_block(call_, smem_, rows_at.row_block).first_token + first;
    const int per_head = lists_per_head(call_.tile_q[0], group_size);
    part.list_stride = call_.rules.num_kv_heads * per_head;
    part.first_list = token * part.list_stride + at.head * per_head +
                      rows_at.first_row % group_size / call_.tile_q[0];
    part.first_source = row;
    part.num_tokens = (rows_at.first_row + rows - 1) / group_size + 1 - first;
    part.index = (row - first_row) / rows;
    part.count = (last_row - first_row) / rows + 1;
    return true;
  }

  PLAIT_DEVICE int num_lists() const {
    return num_tokens_ * call_.rules.num_kv_heads *
           lists_per_head(call_.tile_q[0], call_.group_size);
  }

  // indptr[list + 1]: how many sources a list has, then where it ends.
  PLAIT_DEVICE void write_merge_lists() {
    int* const indptr = call_.merge_indptr;
    const int lists = num_lists();
#pragma unroll 1
    for (int i = thread_; i <= lists; i += num_threads_) indptr[i] = 0;
    __syncthreads();
    Part part;
#pragma unroll 1
    for (int i = thread_; i < 2 * call_.num_ctas; i += num_threads_) {
      if (!part_of(i, part) || part.index > 0) continue;
#pragma unroll 1
      for (int t = 0; t < part.num_tokens; ++t) {
        indptr[part.first_list + t * part.list_stride + 1] = part.count;
      }
    }
    __syncthreads();
    constexpr int kListsOfThread = 8;
    i64 sum = 0;
#pragma unroll 1
    for (int first = 1; first <= lists; first += kListsOfThread * num_threads_) {
      const int begin = first + kListsOfThread * thread_;
      int count[kListsOfThread];
      int own = 0;
      for (int j = 0; j < kListsOfThread; ++j) {
        count[j] = begin + j <= lists ? indptr[begin + j] : 0;
        own += count[j];
      }
      const Sums sums = sums_of(own);
      int end = static_cast<int>(sum + sums.before);
      for (int j = 0; j < kListsOfThread; ++j) {
        end += count[j];
        if (begin + j <= lists) indptr[begin + j] = end;
      }
      sum += sums.total;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread_; i < 2 * call_.num_ctas; i += num_threads_) {
      if (!part_of(i, part)) continue;
#pragma unroll 1
      for (int t = 0; t < part.num_tokens; ++t) {
        call_.merge_sources[indptr[part.first_list + t * part.list_stride] + part.index] =
            part.first_source + t * call_.group_size;
      }
    }
  }

  PLAIT_DEVICE void write_head() const {
    const int counters = call_.num_tickets + (num_partial_rows_ > 0 ? num_lists() : 0);
#pragma unroll 1
    for (int i = thread_; i < counters; i += num_threads_) call_.counters[i] = 0;
    if (thread_ != 0) return;
    PlanView head{};
    head.num_tokens = num_tokens_;
    head.queue_begin = head.queue_end = num_items_;
    head.lists_per_head = lists_per_head(call_.tile_q[0], call_.group_size);
    head.row_blocks = call_.row_blocks;
    head.items = call_.items;
    head.token_request = call_.token_request;
    head.token_position = call_.token_position;
    if (num_partial_rows_ > 0) {
      head.merge_indptr = call_.merge_indptr;
      head.merge_sources = call_.merge_sources;
    }
    head.tables[0] = call_.lengths.table;
    *call_.head = head;
  }

  const PlanLengthsCall& call_;
  PlanLengthsSmem& smem_;
  const int thread_, num_threads_;
  // The same in all threads.
  int turn_ = 0;
  bool has_long_requests_ = false;
  int num_tiles_ = 0, num_tokens_ = 0, num_ways_ = 0, num_items_ = 0, num_partial_rows_ = 0;
};

// One CTA of whole warps.
PLAIT_DEVICE void plan_lengths(const PlanLengthsCall& call) {
  __shared__ PlanLengthsSmem smem;
  LengthsPlanner(call, smem).plan();
}

}  // namespace plait

#undef PLAIT_CALLED
