// The lengths of a batch as they lie on the device: what plan() of a flat format checks of them
// (src/formats/device_lengths.cc), and what kernels/plan_lengths.cuh reads. Values are unknown to
// the host, so they are forced within the bounds here: a wrong one gives a wrong result, but no
// write beyond the plan's memory.
#pragma once
#include "host_device/cut.h"
#include "host_device/kv_address.h"

namespace plait {

// An index array on the device.
struct IndexView {
  const void* data = nullptr;  // null: not given
  i64 stride = 1;              // in elements
  int bytes = 4;               // 4 or 8
  int padding = 0;
  PLAIT_HD i64 operator[](i64 i) const { return load_index(data, bytes, i * stride); }

  // The same in two steps, so that many may be under way: what is loaded is not yet looked at. 0
  // where the array is not given.
  struct Loaded {
    unsigned low, high;  // little endian
  };
  PLAIT_HD Loaded load(int i) const {
    if (data == nullptr) return {};
    const void* const entry = static_cast<const char*>(data) + i * (stride * bytes);
    const unsigned* const words = static_cast<const unsigned*>(entry);
    return {words[0], bytes == 8 ? words[1] : 0};
  }
  PLAIT_HD i64 value(const Loaded& loaded) const {
    const auto wide = static_cast<i64>(loaded.high) << 32 | loaded.low;
    return bytes == 8 ? wide : static_cast<int>(loaded.low);
  }
};

struct DeviceLengths {
  IndexView qo_indptr;         // [num_requests + 1]
  IndexView kv_len;            // [num_requests]; or from kv_indptr:
  IndexView kv_indptr;         // [num_requests + 1], of rows (ragged) or of pages (beside kv_len
                               //   too)
  IndexView kv_last_page_len;  // [num_requests], beside that of pages
  IndexView kv_begin;          // [num_requests], ragged: beside kv_len
  BlockTable table;            // paged
  i64 stride_list = 0;         // paged: RowBlock::first_block of request i is i * stride_list
  int num_requests = 0, page_size = 0;  // page_size 0: ragged
  int max_query_tokens = 0, max_q_len = 0, max_kv_len = 0;
};

PLAIT_HD int clamped(i64 value, int low, int high) {
  return value < low ? low : value > high ? high : static_cast<int>(value);
}

// What the arrays say of a request; 0 where they are not given. All of it is loaded before any of
// it is looked at: a load takes the device longer than all that is made of it.
struct LengthsOfRequest {
  i64 qo_begin, qo_end, kv_len, kv_begin, kv_end, last_page_len, first_row;
};
PLAIT_HD LengthsOfRequest load_lengths(const DeviceLengths& d, int request) {
  const IndexView::Loaded qo_begin = d.qo_indptr.load(request);
  const IndexView::Loaded qo_end = d.qo_indptr.load(request + 1);
  const IndexView::Loaded kv_len = d.kv_len.load(request);
  const IndexView::Loaded kv_begin = d.kv_indptr.load(request);
  const IndexView::Loaded kv_end = d.kv_indptr.load(request + 1);
  const IndexView::Loaded last_page_len = d.kv_last_page_len.load(request);
  const IndexView::Loaded first_row = d.kv_begin.load(request);
  return {d.qo_indptr.value(qo_begin), d.qo_indptr.value(qo_end),
          d.kv_len.value(kv_len),      d.kv_indptr.value(kv_begin),
          d.kv_indptr.value(kv_end),   d.kv_last_page_len.value(last_page_len),
          d.kv_begin.value(first_row)};
}

PLAIT_HD int kv_len_of(const DeviceLengths& d, const LengthsOfRequest& of) {
  const i64 listed = of.kv_end - of.kv_begin;  // rows or pages
  if (d.page_size == 0 || d.kv_indptr.data == nullptr) {
    return clamped(d.kv_len.data != nullptr ? of.kv_len : listed, 0, d.max_kv_len);
  }
  const int pages = clamped(listed, 0, d.max_kv_len / d.page_size + 1);
  const i64 most = pages * i64{d.page_size};
  const int last = clamped(of.last_page_len, 0, d.page_size);
  const i64 len = d.kv_len.data != nullptr ? of.kv_len : most - d.page_size + last;
  return clamped(len < most ? len : most, 0, d.max_kv_len);  // no more than its pages hold
}

// The row block of a request; num_tokens 0: it has none.
PLAIT_HD RowBlock row_block_of(const DeviceLengths& d, int request) {
  const LengthsOfRequest of = load_lengths(d, request);
  RowBlock block{};
  block.first_token = clamped(of.qo_begin, 0, d.max_query_tokens);
  const int most = min(d.max_q_len, d.max_query_tokens - block.first_token);
  block.num_tokens = clamped(of.qo_end - block.first_token, 0, most);
  block.kv_len = kv_len_of(d, of);
  block.first_block = d.page_size > 0              ? request * d.stride_list
                      : d.kv_begin.data != nullptr ? of.first_row
                                                   : of.kv_begin;
  return block;
}

// Tile `i` of a block whose last query is at its last key, without its cost. tile_q: by shape.
PLAIT_HD RowTile row_tile_of(const RowBlock& block, int row_block, int i, const int* tile_q,
                             int num_shapes, int group_size, const Visibility& visible,
                             const CutRules& rules) {
  RowTile tile{};
  tile.row_block = row_block;
  const int first_position = block.kv_len - block.num_tokens, rows = block.num_tokens * group_size;
  if (rows <= tile_q[0]) {  // nothing to divide
    tile.num_rows = rows;
    tile.min_position = first_position;
    tile.max_position = block.kv_len - 1;
  } else {
    tile.first_row = first_row_of(i, tile_q[0], group_size);
    tile.num_rows = rows_from(tile.first_row, rows, tile_q[0], group_size);
    tile.min_position = first_position + tile.first_row / group_size;
    tile.max_position = first_position + (tile.first_row + tile.num_rows - 1) / group_size;
  }
  tile.shape = shape_for(tile_q, num_shapes, tile.num_rows);
  find_keys(visible, block, rules, tile);
  return tile;
}

}  // namespace plait
