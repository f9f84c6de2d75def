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

PLAIT_HD int kv_len_of(const DeviceLengths& d, int request) {
  i64 len = 0;
  if (d.kv_len.data != nullptr) {
    len = d.kv_len[request];
    if (d.page_size > 0 && d.kv_indptr.data != nullptr) {  // no more than its pages hold
      const i64 pages = d.kv_indptr[request + 1] - d.kv_indptr[request];
      const i64 most = clamped(pages, 0, d.max_kv_len / d.page_size + 1) * i64{d.page_size};
      if (len > most) len = most;
    }
  } else {
    len = d.kv_indptr[request + 1] - d.kv_indptr[request];
    if (d.page_size > 0) {
      const int pages = clamped(len, 0, d.max_kv_len / d.page_size + 1);
      const int last = clamped(d.kv_last_page_len[request], 0, d.page_size);
      len = pages == 0 ? 0 : (pages - 1) * i64{d.page_size} + last;
    }
  }
  return clamped(len, 0, d.max_kv_len);
}

// The row block of a request; num_tokens 0: it has none.
PLAIT_HD RowBlock row_block_of(const DeviceLengths& d, int request) {
  RowBlock block{};
  block.first_token = clamped(d.qo_indptr[request], 0, d.max_query_tokens);
  const int most = min(d.max_q_len, d.max_query_tokens - block.first_token);
  block.num_tokens = clamped(d.qo_indptr[request + 1] - block.first_token, 0, most);
  block.kv_len = kv_len_of(d, request);
  block.first_block = d.page_size > 0              ? request * d.stride_list
                      : d.kv_begin.data != nullptr ? d.kv_begin[request]
                                                   : d.kv_indptr[request];
  return block;
}

// Tile `i` of a block whose last query is at its last key, without its cost. tile_q: by shape.
PLAIT_HD RowTile row_tile_of(const RowBlock& block, int row_block, int i, const int* tile_q,
                             int num_shapes, int group_size, const Visibility& visible,
                             const CutRules& rules) {
  RowTile tile{};
  tile.row_block = row_block;
  tile.first_row = first_row_of(i, tile_q[0], group_size);
  tile.num_rows = rows_from(tile.first_row, block.num_tokens * group_size, tile_q[0], group_size);
  tile.shape = shape_for(tile_q, num_shapes, tile.num_rows);
  const int first_position = block.kv_len - block.num_tokens;
  tile.min_position = first_position + tile.first_row / group_size;
  tile.max_position = first_position + (tile.first_row + tile.num_rows - 1) / group_size;
  find_keys(visible, block, rules, tile);
  return tile;
}

}  // namespace plait
