// Merge lists of the heads that are cut, for kernels/plan_lengths.cuh.
#pragma once
#include "planner/items.cuh"

namespace plait {

// A part of a head: entry `index` of the merge lists of its tokens.
struct Part {
  int first_list, list_stride, first_source, num_tokens;  // of its tokens
  int index;
  bool is_last;
};
// The part that the run of `cta` begins or ends (first_keys) with; num_tokens 0: none.
PLAIT_CALLED Part part_of(int cta, bool first_keys) {
  Part part{};
  const ListRun run = run_of(cta);
  if (first_keys ? !run.has_first_keys() : !begins_with_part(run)) return part;
  const CutPoint at = smem.cuts[cta + first_keys];
  const RowTile tile = list_tile(at.tile);
  const int group_size = smem.group_size, tile_q = smem.tile_q[0];
  int first = 0, part_of_group = 0;
  part.num_tokens = 1;
  if (tile.first_row > 0 || tile.num_rows > group_size) {
    first = tile.first_row / group_size;
    part.num_tokens = (tile.first_row + tile.num_rows - 1) / group_size + 1 - first;
    part_of_group = (tile.first_row - first * group_size) / tile_q;
  }
  const int per_head = lists_per_head(tile_q, group_size);
  const int token = row_block(tile.row_block).first_token + first;
  part.list_stride = smem.rules.num_kv_heads * per_head;
  part.first_list = token * part.list_stride + at.head * per_head + part_of_group;
  part.first_source = partial_row_of(cta, first_keys, tile.num_rows);
  if (!first_keys && run.from.key > 0) {  // not the head's first; that ends at first_cut
    const int first_cut = smem.rows_or_first_cut[cta];
    part.index = num_parts(smem.part_begin[cta]) - num_parts(smem.part_begin[first_cut]) + 1;
    part.is_last = run.has_rest();
  }
  return part;
}

class MergeLists {
 public:
  PLAIT_DEVICE MergeLists(const PlanLengthsCall& call, int num_lists)
      : call_(call),
        num_lists_(num_lists),
        in_smem_(num_lists < 2 * PlannerSmem::kBeforeRowBlocks),
        indptr_(in_smem_ ? reinterpret_cast<int*>(smem.steps) : call.merge_indptr) {}

  PLAIT_DEVICE int num_lists() const { return num_lists_; }

  PLAIT_DEVICE void clear() const {
#pragma unroll 1
    for (int i = threadIdx.x; i <= num_lists_; i += blockDim.x) indptr_[i] = 0;
  }

  // indptr[list + 1]: how many sources a list has. By the last threads first: the first ones write
  // items.
  PLAIT_DEVICE void count() const {
#pragma unroll 1
    for (int i = blockDim.x - 1 - threadIdx.x; i < call_.num_ctas; i += blockDim.x) {
      const Part part = part_of(i, false);
      if (!part.is_last) continue;
#pragma unroll 1
      for (int t = 0; t < part.num_tokens; ++t) {
        indptr_[part.first_list + t * part.list_stride + 1] = part.index + 1;
      }
    }
  }

  // indptr[list + 1]: where a list ends. Each warp has a span of lists, each of its threads 4 that
  // follow each other, 128 at a time.
  PLAIT_DEVICE void add_up() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const int span = ceil_div(num_lists_, 128 * num_warps) * 128;
    const int begin = warp * span + 4 * lane, end = min((warp + 1) * span, num_lists_);
    Addends own{};
#pragma unroll 2
    for (int first = begin; first < end; first += 128) {
      int counts[4];
      own.value += load_counts(first, end, counts);
    }
    const CtaSums sums = cta_sums(smem.of_warps[0], own, ceil_div(num_lists_, span) * 32);
    int ended = __shfl_sync(~0u, static_cast<int>(sums.before), 0);
#pragma unroll 1
    for (int first = begin; first - 4 * lane < end; first += 128) {
      int counts[4];
      const int own_count = load_counts(first, end, counts);
      int sum = own_count;
      if (__any_sync(~0u, sum > 0)) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int other = __shfl_up_sync(~0u, sum, step);
          if (lane >= step) sum += other;
        }
      }
      int list_end = ended + sum - own_count;
      ended = __shfl_sync(~0u, ended + sum, 31);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        list_end += counts[j];
        if (first + j >= end) continue;
        indptr_[first + j + 1] = list_end;
        if (in_smem_) call_.merge_indptr[first + j + 1] = list_end;
      }
    }
    if (threadIdx.x == 0) call_.merge_indptr[0] = 0;
  }

  PLAIT_DEVICE void write_sources() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * call_.num_ctas; i += blockDim.x) {
      const Part part = part_of(i / 2, i % 2 != 0);
#pragma unroll 1
      for (int t = 0; t < part.num_tokens; ++t) {
        call_.merge_sources[indptr_[part.first_list + t * part.list_stride] + part.index] =
            part.first_source + t * call_.group_size;
      }
    }
  }

 private:
  PLAIT_DEVICE int load_counts(int first, int end, int (&counts)[4]) const {
    int sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) counts[j] = first + j < end ? indptr_[first + j + 1] : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += counts[j];
    return sum;
  }

  const PlanLengthsCall& call_;
  const int num_lists_;
  const bool in_smem_;
  int* const indptr_;  // [num_lists + 1]
};

}  // namespace plait
