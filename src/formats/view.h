// A KV format becomes the one block-sparse view that everything else knows: row blocks for the
// planner, block tables for the executors. Host tables are checked and copied (only the entries
// that are read), so the caller's arrays may go away; device tables are borrowed.
#pragma once
#include <vector>

#include "plait/attention.h"

namespace plait {

struct LevelTable {
  bool affine = false;
  bool on_device = false;
  std::vector<int> indices;      // !on_device: block lists one after the other, by RowBlock::first_block
  BlockTable device_table;       // on_device: the caller's arrays (list_begin may be host-known: null)
};

struct FormatView {
  BsrView view;
  std::vector<LevelTable> tables;       // one a level
  // The largest block (affine: row of K and V) that host tables name, for the check in run();
  // -1: none known. `max_block_place` names it for the error: "kv_page_indices[17]".
  long long max_block = -1;
  std::string max_block_place;
  int num_query_tokens = 0;
};

// Checks `batch` against format and bounds and fills `out`, using its memory again. Throws
// ArgumentError naming array, place and value; `out` is then unspecified.
void make_view(const KvFormat& format, const Bounds& bounds, const Batch& batch,
               const Device& device, FormatView& out);

}  // namespace plait
