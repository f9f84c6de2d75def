// The KV layouts a caller may have, the batch a plan is made for, and what must hold of each. A
// format says how tables and caches are shaped; a Batch brings one step's lengths and tables.
// plan() turns both into the block-sparse view of plan_data.h without copying any K or V.
#pragma once
#include <vector>

#include "plait/node_choice.h"
#include "plait/tensor.h"

namespace plait {

struct KvFormat {
  enum Kind {
    kRagged,  // K, V: [kv tokens, num_kv_heads, dim], requests anywhere in it, gaps allowed
    kPaged,   // K, V: pages
  };
  Kind kind = kRagged;
  int page_size = 1;  // kPaged: tokens a page, >= 1
  bool hnd = false;   // kPaged: pages are [head, page_size, dim] rather than [page_size, head, dim]
  int num_levels = 1;  // > 1: composed, Batch::levels has as many entries; all share one K and V
  bool operator==(const KvFormat&) const = default;
};
KvFormat ragged_kv();
KvFormat paged_kv(int page_size, bool hnd = false);
KvFormat composed_kv(KvFormat format, int num_levels);

// The keys of every request (or, in a composed format, of every node of a level). Index arrays are
// int32 or int64, of any stride. Lengths are on the host; tables may be on the device. Or all are,
// qo_indptr too, of a format with one level: then "host" below is the device, plan() takes the
// lengths as they are when its kernel runs, forced within the bounds, and where keys lie unchecked;
// kv_len is not given beside kv_last_page_len or a ragged kv_indptr, since nobody could compare
// them.
// plan() copies what it needs of host arrays and refuses every malformed entry that is read, by
// array, place and value; arrays without a meaning beside the others are refused too, and lengths
// given twice must agree. Tables on the device are borrowed until the next plan(), and page ids in
// them go unchecked. Tables of requests without queries are not read
// (on the device, lengths are).
struct KvTables {
  TensorView kv_len;  // [n] host. Not needed beside kv_indptr or kv_last_page_len
  // kRagged: one of
  TensorView kv_indptr;  // [n + 1] host, from 0: rows of K and V of each request
  TensorView kv_begin;   // [n] host: first row; needs kv_len; gaps and overlaps allowed
  // kPaged: one of
  TensorView kv_page_indptr;    // [n + 1], from 0; host, or device (then kv_len is needed). A
                                //   request may own more pages than its kv_len takes
  TensorView kv_page_indices;   //   [pages] host or device
  TensorView kv_last_page_len;  //   [n] host, 1 ... page_size (0 where there are no pages)
  TensorView block_table;       // [rows, max blocks] host or device; entries past the end unread
  TensorView request_map;       //   optional [n] host or device: row of block_table of request i
};

// One level of a composed format: nodes, each a list of keys that all queries of its requests see.
// A request's keys are those of its nodes, level after level.
struct KvLevel {
  KvTables tables;           // one list a node
  TensorView node_indptr;    // [nodes + 1] host; not given: node i is request i
  TensorView node_requests;  // [node_indptr[-1]] host: the requests under each node, each at
                             //   most once a level, all with as many keys in the levels before
};

// Mask bits for the variant custom_mask(): which of a request's last keys each of its queries sees.
// The same for all heads; causal and window hide further keys. Of request i the mask has q_len rows
// of kv_len - first_masked_key[i] keys (kv_len: over all levels); every query sees all keys before.
// One of `packed` and `bools`, on the host (copied) or on the device (read by the stream of
// plan()).
struct MaskTables {
  TensorView packed;            // [bytes] uint8: bits of a request row after row, the first key
                                //   in the lowest bit; each request begins in a new byte
  TensorView bools;             // [elements] bool, row after row; of a batch of one request also
                                //   [q_len, masked keys]
  TensorView indptr;            // optional [n + 1] host: where the bytes or bools of each request
                                //   begin. Not given: one after the other
  TensorView first_masked_key;  // optional [n] host, 0 ... kv_len. Not given: 0, all keys
};

struct Batch {
  TensorView qo_indptr;         // [n + 1] host (or device: KvTables), starting at 0, not decreasing
  KvTables kv;                  // of a format with one level
  std::vector<KvLevel> levels;  // of a composed format
  std::vector<NodeChoice> nodes{};  // optional: what compose_radix() says of the levels, which the
                                    //   plan keeps for explain()
  MaskTables mask{};            // of the variant custom_mask()
  TensorView q_positions{};     // optional [query tokens] host: absolute positions, as of drafts
                                //   in a tree. Not given: the last query is at the last key.
                                //   Visibility and functors see them; keys lie at list positions
};

}  // namespace plait
