// Work items of the runs between cuts, for kernels/plan_lengths.cuh.
#pragma once
#include "planner/list.cuh"

namespace plait {

PLAIT_DEVICE ListRun run_of(int cta) {
  return {smem.cuts[cta], smem.cuts[cta + 1], smem.rules.num_kv_heads};
}
// Whether a run begins with a part of a head, or is one. Others may end with one.
PLAIT_DEVICE bool begins_with_part(const ListRun& run) {
  return run.has_rest() || (run.in_one_head() && run.size() > 0);
}

// PlannerSmem::part_begin: parts of heads, and their partial rows.
constexpr int kPartialRowBits = 20;
PLAIT_DEVICE int one_part(int num_rows) { return (1 << kPartialRowBits) + num_rows; }
PLAIT_DEVICE int num_parts(int begin) { return begin >> kPartialRowBits; }
PLAIT_DEVICE int num_partial_rows(int begin) { return begin & ((1 << kPartialRowBits) - 1); }

// 16 bytes at a time: neighbouring threads write to different lines, and each store takes as long
// as it has lines.
PLAIT_DEVICE void write_start(CtaStart& to, const CtaStart& start) {
  struct alignas(16) Line {
    uint4 words[sizeof(CtaStart) / 16];
  };
  reinterpret_cast<Line&>(to) = __builtin_bit_cast(Line, start);
}

// Where each CTA's items and parts begin.
PLAIT_DEVICE void number_items(const PlanLengthsCall& call, Found& found) {
  const int num_ctas = call.num_ctas, num_threads = blockDim.x;
  i64 sum = 0;  // items << 32 | parts << kPartialRowBits | partial rows
  int first_cut = 0, turn = 0;
#pragma unroll 1
  for (int first = 0; first < num_ctas; first += num_threads) {
    const int cta = first + threadIdx.x;
    Addends own{};
    if (cta < num_ctas) {
      const ListRun run = run_of(cta);
      // A part is of the head of one of the two cuts; where it is all of the run, of the head of
      // both, of which the first may be the head's beginning.
      int parts = 0;
      if (begins_with_part(run)) {
        parts = one_part(smem.rows_or_first_cut[run.from.key > 0 ? cta : cta + 1]);
      }
      if (run.has_first_keys()) parts += one_part(smem.rows_or_first_cut[cta + 1]);
      own.value = i64{run.size()} << 32 | parts;
      if (run.size() == 0) write_start(call.starts[cta], CtaStart{});
      if (run.from.key > 0) {
        const CutPoint& before = smem.cuts[cta - 1];
        const bool in_same_head =
            before.key > 0 && before.tile == run.from.tile && before.head == run.from.head;
        if (!in_same_head) own.most = cta;
      }
    }
    const CtaSums sums = cta_sums(smem.of_warps[turn ^= 1], own, num_ctas - first);
    const i64 before = sum + sums.before;
    if (cta < num_ctas) {
      smem.item_begin[cta] = static_cast<int>(before >> 32);
      smem.part_begin[cta] = static_cast<int>(before & 0x7fffffff);
      smem.rows_or_first_cut[cta] = static_cast<unsigned short>(max(first_cut, sums.most_yet));
    }
    sum += sums.total;
    first_cut = max(first_cut, sums.most);
  }
  const int parts = static_cast<int>(sum & 0x7fffffff);
  found.num_items = static_cast<int>(sum >> 32);
  found.num_partial_rows = num_partial_rows(parts);
  if (threadIdx.x == 0) {
    smem.item_begin[num_ctas] = found.num_items;
    smem.part_begin[num_ctas] = parts;
  }
}

// Partial row of a part of a head, of the run of `cta`: behind what was cut before, or before what
// is cut.
PLAIT_DEVICE int partial_row_of(int cta, bool first_keys, int num_rows) {
  return first_keys ? num_partial_rows(smem.part_begin[cta + 1]) - num_rows
                    : num_partial_rows(smem.part_begin[cta]);
}

// In the order of their CTAs, of which each begins with the head that its end cuts, if any.
PLAIT_DEVICE void write_items(const PlanLengthsCall& call, const Found& found) {
#pragma unroll 1
  for (int i = threadIdx.x; i < found.num_items; i += blockDim.x) {
    const int cta = first_above(smem.item_begin + 1, call.num_ctas, i);
    const int begin = smem.item_begin[cta], end = smem.item_begin[cta + 1];
    const ListRun run = run_of(cta);
    const ListPiece piece = piece_of(run, i - begin);
    const RowTile tile = list_tile(piece.at.tile);
    WorkItem item = make_item(tile, piece.at.head, piece.num_heads, piece.at.key,
                              piece.key_end < 0 ? tile.seen() : piece.key_end, piece.is_part);
    const bool first_keys = run.has_first_keys() && i == end - 1;
    if (piece.is_part) item.partial_row = partial_row_of(cta, first_keys, tile.num_rows);
    const int to = !run.has_first_keys() ? i : first_keys ? begin : i + 1;
    call.items[to] = item;
    if (to == begin) {
      write_start(call.starts[cta],
                  {begin, end, call.lengths.table, item, call.row_blocks[tile.row_block]});
    }
  }
}

}  // namespace plait
