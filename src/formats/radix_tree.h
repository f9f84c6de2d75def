// PrefixTree: which requests have which keys in common, read from a radix tree or from block hashes
// and checked. Used by compose_radix alone.
#pragma once
#include <vector>

#include "formats/key_lists.h"
#include "plait/compose_radix.h"

namespace plait {

struct PrefixTree {
  // By node. Nodes without keys are in neither `order` nor parent and request_node.
  std::vector<int> order;       // parents first
  std::vector<int> parent;      // -1: at the root
  std::vector<int> kv_len;      // its own keys
  std::vector<int> kv_end;      // absolute position behind them
  std::vector<int> list;        // where they are, in `lists`
  std::vector<int> list_begin;  // of lists of nodes: its first key there; else 0
  // Nodes from num_given on are the rests behind the last whole chunk (cut_at_chunks()) of others.
  int num_given = 0;
  std::vector<int> rest_of;  // by node - num_given
  // By request.
  std::vector<int> request_node;    // the last node of its keys; -1: it shares none
  std::vector<int> request_kv_len;  // all keys
  std::vector<int> q_len;

  KeyLists lists;
  // Lists are of requests, a node's from the root down (block hashes); else of nodes, each with the
  // node's own keys, and requests have no list beside (radix tree).
  bool lists_of_requests;
};

// Invariant mode shares whole chunks alone: a node that ends inside one of chunk_keys keys becomes
// two, of which the first ends where a chunk does; unless no chunk does in it, or not in front of a
// page.
void cut_at_chunks(PrefixTree& tree, int chunk_keys, const KvFormat& format);

// Throw ArgumentError naming array, place and value.
PrefixTree read_tree(const RadixTree& tree, const TensorView& qo_indptr, const KvFormat& format);
PrefixTree read_hashes(const BlockHashes& hashes, const TensorView& qo_indptr,
                       const KvFormat& format);

}  // namespace plait
