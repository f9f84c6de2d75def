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
  std::vector<int>
      indices;              // !on_device: block lists one after the other, by RowBlock::first_block
  BlockTable device_table;  // on_device: the caller's arrays (list_begin may be host-known: null)
};

// The custom mask of a batch. Host masks become words at once; those on the device are left to
// kernels/pack_mask.cuh, which wants to know where each token's row begins.
struct MaskView {
  std::vector<TokenMask> tokens;  // by row of q; empty: no mask
  long long num_words = 0;
  std::vector<unsigned> words;            // of a host mask
  const unsigned char* source = nullptr;  // of a device mask
  bool source_is_bools = false;
  std::vector<long long> token_source;  // first bit (bool) of the token's row
};

struct FormatView {
  BsrView view;
  MaskView mask;
  std::vector<LevelTable> tables;  // one a level
  // The largest block (affine: row of K and V) that host tables name, for the check in run();
  // -1: none known. `max_block_place` names it for the error: "kv_page_indices[17]".
  long long max_block = -1;
  std::string max_block_place;
  int num_query_tokens = 0;
  // By request: keys over all levels, and 1 + the last level that covers it (composed only).
  std::vector<int> request_kv_len, request_level;
  std::vector<int> block_list;  // by row block: the request or node whose list it has; -1: no list
};

// How many entries the `indices` of all levels together hold at most, within `bounds`: what an
// executor reserves for host tables. 0 for ragged formats.
long long max_host_pages(const KvFormat& format, const Bounds& bounds);

// Checks `batch` against format and bounds and fills `out`, using its memory again. Throws
// ArgumentError naming array, place and value; `out` is then unspecified. Row blocks without tokens
// are left out, and their tables are not read; a level has at most bounds.requests row blocks.
// Tokens that no level covers are in one more row block without keys each, in the last level.
void make_view(const KvFormat& format, const Bounds& bounds, const Batch& batch,
               const Device& device, FormatView& out);

}  // namespace plait
