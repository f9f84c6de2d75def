// The plain data between deciding and executing: what a Plan holds and what every executor (CUDA
// kernels, CPU backend) reads. Compiled by the host compiler and by NVRTC, hence no headers.
// Offsets and counts only; addresses appear in PlanView, the form an executor reads.
#pragma once

namespace plait {

using i64 = long long;

enum class Dtype { kFloat32, kBfloat16, kFloat16, kE4m3, kE5m2 };

// Levels of a composed format: each has its own list of row blocks and its own block table.
inline constexpr int kMaxLevels = 8;

// Query tokens that share one list of keys. A level's row blocks cover each token at most once.
// (Aligned, as items are: kernels read them 16 bytes at a time.)
struct alignas(16) RowBlock {
  i64 first_block;  // where the block list starts in the level's BlockTable; affine: row of K and V
  int first_token;  // tokens first_token ... + num_tokens - 1: entries of Plan::row_map where the
  int num_tokens;   //   plan has one, else rows of q
  int kv_len;       // keys in the list
  int kv_pos_begin;  // absolute position of key 0 of the list
  int level;         // index into PlanView::tables
  int padding = 0;
  bool operator==(const RowBlock&) const = default;
};

// One tile of packed rows x kv heads x keys, executed by one CTA (CPU: by one thread).
// Packed row r of a row block is token r / group_size, head r % group_size within the group.
struct alignas(16) WorkItem {
  int row_block;
  int shape;                       // index into KernelConfig::shapes
  int first_row, num_rows;         // packed rows of the block
  int kv_head_begin, num_heads;    // kv heads, one after the other
  int kv_begin, kv_end;            // keys, as list positions; kv_begin is a multiple of tile_kv,
                                   //   but in a window of kv_align (plan.h)
  int partial_row;                 // -1: rows are final. Else head h, row r of this item is partial
                                   //   row partial_row + (h - kv_head_begin) * num_rows + r
  int min_position, max_position;  // absolute positions over the query tokens of these rows
  int mask_begin = 0x7fffffff;     // least TokenMask::begin of these rows; without a mask: none
  bool operator==(const WorkItem&) const = default;
};

// Which queries see which keys, as data: known to the planner, the tile iterator and the mask.
struct Visibility {
  int causal = 0;        // key position <= query position
  int window_left = -1;  // key position >= query position - window_left; -1: no window
  int sink_tokens = 0;   // keys at positions < sink_tokens are inside any window
  bool operator==(const Visibility&) const = default;
};

// Custom mask bits of one query token: bit p % 32 of word first_word + p / 32 - begin / 32 says
// whether it sees the key at absolute position p, for begin <= p < end. It sees all keys before
// `begin`, as far as Visibility lets it; `end` is where its request's keys end. Bits before begin
// in the first word are 1, those from `end` on in the last one are 0.
struct TokenMask {
  i64 first_word;
  int begin, end;
  bool operator==(const TokenMask&) const = default;
};

// Where a level's block lists lie. Entry i of the list of row block b is
//   indices[first + i * stride_block], first = list_begin ? list_begin[b.first_block] * stride_list
//                                                        : b.first_block.
struct BlockTable {
  const void* indices = nullptr;     // null: affine, there are no blocks
  const void* list_begin = nullptr;  // CSR indptr or request map that only the device knows
  i64 stride_block = 1, stride_list = 1;
  int index_bytes = 4, list_begin_bytes = 4;  // 4 or 8
};

// Where a CTA begins: its items, and all about the first of them in one place that follows from
// the CTA's index, so that no pointers are followed before the first block of keys is looked up.
struct CtaStart {
  int item_begin, item_end;  // of PlanView::items; behind them a CTA draws from the queue
  BlockTable table;          // of the first item's row block; zeros where there are no items
  WorkItem item;
  RowBlock block;
};
static_assert(sizeof(CtaStart) == 128);  // a line of the L2 cache

// What an executor reads of a Plan: the same arrays, in its own memory.
struct PlanView {
  int num_tokens;
  int queue_begin, queue_end;  // items of no CTA, which those that are free draw (tile/draw.cuh)
  int lists_per_head;          // merge lists of a token and kv head
  const RowBlock* row_blocks;
  const WorkItem* items;      // in CTA order, then the queue; which are whose: CtaStart
  const int* token_request;   // [num_tokens], by row of q
  const int* token_position;  // [num_tokens], by row of q
  const int* row_map;         // block token -> row of q; null: identity
  // Merge lists: of row of q `token` and kv head h, or, where a tile holds no whole group, of each
  // part of it that a tile holds, list (token * num_kv_heads + h) * lists_per_head + part.
  const int* merge_indptr;   // [lists + 1]; null: nothing is split
  const int* merge_sources;  // in the order of the sum: partial row of the part's first head, with
                             //   those of its others behind it
  const TokenMask* token_mask;  // [num_tokens], by row of q; null: no custom mask
  const unsigned* mask_words;
  BlockTable tables[kMaxLevels];
};

}  // namespace plait
