// compose_radix: the levels of a composed format from what requests have in common, given as a
// radix tree or as block hashes. A pure host function. The cost model weighs reading a node's keys
// once for all requests under it (cascade inference) against what that takes: a level whose rows
// leave partial states that are joined. Nodes that do not pay are flattened into what is below
// them; what nobody shares is in the last level, a list a request, and so is everything of
// requests that fill row tiles by themselves (prefill), which have nothing to gain.
// Source: FlashInfer (Ye et al., 2025, arXiv:2501.01005), "composable formats"; Hydragen (Juravsky
// et al., 2024, arXiv:2402.05099); radix trees over prefixes: SGLang (Zheng et al., 2023,
// arXiv:2312.07104).
#pragma once
#include <vector>

#include "plait/kv_format.h"
#include "plait/plan.h"

namespace plait {

// Nodes in any order; a request's keys are those of the nodes from the root down to its own. Nodes
// and requests may be without keys. All arrays are on the host.
struct RadixTree {
  TensorView node_parent;   // [nodes]: another node, or -1 at the root
  KvTables nodes;           // one list a node: its own keys
  TensorView request_node;  // [n]: the node that a request ends with; -1: it has no keys
};

// Requests whose first block ids are equal have equal keys in these blocks (vLLM's block hashes,
// the hash_ids of Mooncake's traces). Of equal keys those of the first request are read, whether or
// not the pages are the same. All arrays are on the host.
struct BlockHashes {
  TensorView hash_indptr;  // [n + 1], from 0: ids of each request
  TensorView hash_ids;     // [hash_indptr[n]]: one a block, from the first key on
  TensorView hashed_len;   // optional [n]: keys that the ids stand for, where the last block is not
                           //   full; 0 ... ids * block_tokens. Keys behind kv_len are ignored
  int block_tokens = 0;    // keys a block; of a block and a page the larger need be no multiple
  KvTables requests;       // one list a request: all its keys
};

// Levels and the arrays they point to.
class ComposedLevels {
 public:
  // KvFormat::num_levels of them, for Batch::levels; valid as long as this object.
  std::vector<KvLevel> levels() const;
  // Every node over two requests or more, and every one that must be shared: for Batch::nodes.
  const std::vector<NodeChoice>& nodes() const { return nodes_; }

  struct Level {
    std::vector<int> node_indptr, node_requests;  // none in the last level: node i is request i
    std::vector<int> kv_len;
    std::vector<int> kv_page_indptr, kv_page_indices;  // paged
    std::vector<long long> kv_begin;                   // ragged
  };
  ComposedLevels(bool paged, std::vector<Level> levels, std::vector<NodeChoice> nodes);

 private:
  bool paged_;
  std::vector<Level> levels_;
  std::vector<NodeChoice> nodes_;
  std::vector<int64_t> sizes_;  // shapes of all arrays
};

// What the choice depends on beside the requests. Of an Attention: config().kv, target() and
// config().variant.visible.
struct RadixOptions {
  KvFormat format;     // num_levels: how many levels there are, with the last
  PlanTarget target;   // what tiles, keys and joins cost
  Visibility visible;  // keys that a window hides cost nothing
  // That are used, with the last: 2 ... num_levels; 0: num_levels. Where a tree is deeper, the
  // nodes are shared that save most.
  int max_levels = 0;
};

// qo_indptr [n + 1]: queries of each request. In invariant mode (target.chunk_keys) levels end at
// whole chunks: what requests have in common is shared up to the last one. Throws ArgumentError
// naming array, place and value: for what plan() refuses of tables, parents that are no node or
// form a ring, nodes that take more levels than there are because they can be joined with nothing;
// in invariant mode, for such nodes that end inside a chunk.
ComposedLevels compose_radix(const RadixTree& tree, const TensorView& qo_indptr,
                             const RadixOptions& options);
ComposedLevels compose_radix(const BlockHashes& hashes, const TensorView& qo_indptr,
                             const RadixOptions& options);

}  // namespace plait
