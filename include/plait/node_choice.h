// What was decided of one node of a radix tree, and why. A plan keeps these for explain().
#pragma once

namespace plait {

struct NodeChoice {
  enum Why {
    kPays,         // shared: reading its keys once saves more than writing and joining states costs
    kDoesNotPay,   // flat: it does not
    kTooDeep,      // flat: other nodes above or below it save more, and levels are few
    kCannotJoin,   // shared: its last page is not full, or (ragged) its keys are not in front of
                   //   those below it, so that no list can hold both
    kGiven,        // levels that nobody weighed
    kInsideChunk,  // flat: no chunk of invariant mode ends in it
  };
  int node = 0, parent = -1;  // -1: at the root. Of block hashes: in the order of their finding
  int level = -1;             // -1: flat, its keys are read with those below it
  int num_requests = 0;       // under it: with queries, but fewer than fill a tile by themselves
  int num_rows = 0;           // packed rows of these
  int num_tiles = 0, tile_q = 0;  // that the rows take, and the rows that the first of them holds
  int kv_len = 0;                 // its own keys; in invariant mode, up to the last whole chunk
  int why = kPays;
  int padding = 0;
  long long keys_shared = 0;    // shared: its own and those of flat nodes right above it
  long long keys_not_read = 0;  // that requests one by one would see beyond what is read once
  // Modelled time of reading its keys and those of flat nodes right above it, over all CTAs: by
  // what is below it, or shared, joins included; the other nodes being as they are.
  long long flat_ns = 0, shared_ns = 0;
  bool operator==(const NodeChoice&) const = default;
};
static_assert(sizeof(NodeChoice) == 72);

}  // namespace plait
