#include "formats/radix_tree.h"

#include <algorithm>
#include <numeric>

namespace plait {
namespace {

constexpr char kWhere[] = "compose_radix";
constexpr int kMaxKeys = 1 << 30;  // so that sums of two stay within int
constexpr char kLimit[] = "2^30";

IndexArray host_array(const TensorView& tensor, const char* name) {
  IndexArray array(tensor, {kWhere, name}, Device{});
  if (!array.given()) refuse(kWhere, ": ", name, " is missing");
  return array;
}

// Lengths between the entries of an indptr.
std::vector<int> lengths_of(const TensorView& tensor, const char* name) {
  const IndexArray indptr = host_array(tensor, name);
  if (indptr.size() < 1) {
    refuse(kWhere, ": ", name,
           " has no entries; it must have one more than there are "
           "requests");
  }
  if (indptr[0] != 0) refuse(indptr.at(0), " is ", indptr[0], "; it must be 0");
  std::vector<int> lengths(indptr.size() - 1);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const long long length = indptr[i + 1] - indptr[i];
    if (length < 0 || indptr[i + 1] > kMaxKeys) {
      refuse(indptr.at(i + 1), " is ", indptr[i + 1], " after ", indptr[i],
             "; entries do not decrease and are at most ", kLimit);
    }
    lengths[i] = static_cast<int>(length);
  }
  return lengths;
}

// Parents before children. Throws where a chain of parents does not end.
std::vector<int> parents_first(const IndexArray& parent) {
  const int n = static_cast<int>(parent.size());
  std::vector<int> order, path;
  std::vector<char> seen(n, 0);  // 1: on the path, 2: in the order
  order.reserve(n);
  for (int node = 0; node < n; ++node) {
    int at = node;
    for (; at != -1 && seen[at] == 0; at = static_cast<int>(parent[at])) {
      if (parent[at] < -1 || parent[at] >= n) {
        refuse(parent.at(at), " is ", parent[at], "; it must be -1 (at the root) or one of the ", n,
               " nodes");
      }
      seen[at] = 1;
      path.push_back(at);
    }
    if (at != -1 && seen[at] == 1) {
      refuse(parent.at(path.back()), " is ", at, ", but node ", at, " is under node ", path.back(),
             "; a chain of parents must end at -1");
    }
    for (; !path.empty(); path.pop_back()) {
      seen[path.back()] = 2;
      order.push_back(path.back());
    }
  }
  return order;
}

void check_requests(const char* name, size_t found, size_t wanted, size_t num_requests) {
  if (found == wanted) return;
  refuse(kWhere, ": ", name, " has ", found, " entries; it must have ", wanted,
         ", as qo_indptr has ", num_requests, " requests");
}

}  // namespace

PrefixTree read_tree(const RadixTree& given, const TensorView& qo_indptr, const KvFormat& format) {
  const IndexArray parent = host_array(given.node_parent, "node_parent");
  const IndexArray request_node = host_array(given.request_node, "request_node");
  const size_t n = parent.size();
  PrefixTree tree{.order = {},
                  .parent = std::vector<int>(n),
                  .kv_len = std::vector<int>(n),
                  .kv_end = std::vector<int>(n),
                  .list = std::vector<int>(n),
                  .list_begin = std::vector<int>(n),
                  .num_given = static_cast<int>(n),
                  .rest_of = {},
                  .request_node = {},
                  .request_kv_len = {},
                  .q_len = lengths_of(qo_indptr, "qo_indptr"),
                  .lists = KeyLists(format, given.nodes, n, "node", -1, Device{}, kWhere),
                  .lists_of_requests = false};
  check_requests("request_node", request_node.size(), tree.q_len.size(), tree.q_len.size());
  const auto with_keys = [&tree](long long node) {  // parents are done: one step suffices
    return node < 0 || tree.kv_len[node] > 0 ? static_cast<int>(node) : tree.parent[node];
  };
  for (const int node : parents_first(parent)) {
    tree.kv_len[node] = tree.lists.kv_len(node, kMaxKeys, kLimit);
    tree.list[node] = node;
    const int above = with_keys(parent[node]);
    tree.parent[node] = above;
    const int begin = above < 0 ? 0 : tree.kv_end[above];
    if (tree.kv_len[node] > kMaxKeys - begin) {
      refuse(kWhere, ": node ", node, " ends at key ", i64{begin} + tree.kv_len[node],
             "; a request has at most ", kLimit, " keys");
    }
    tree.kv_end[node] = begin + tree.kv_len[node];
    if (tree.kv_len[node] > 0) tree.order.push_back(node);
  }
  for (size_t r = 0; r < tree.q_len.size(); ++r) {
    const long long node = request_node[r];
    if (node < -1 || node >= static_cast<long long>(n)) {
      refuse(request_node.at(r), " is ", node, "; it must be one of the ", n,
             " nodes, or -1 for a request without keys");
    }
    tree.request_node.push_back(with_keys(node));
    const int last = tree.request_node.back();
    tree.request_kv_len.push_back(last < 0 ? 0 : tree.kv_end[last]);
  }
  return tree;
}

namespace {

// Requests with equal blocks before `position`, in a node or at the root.
struct Group {
  int begin, end;  // of a list of requests
  int position;
  int node;
};

}  // namespace

PrefixTree read_hashes(const BlockHashes& given, const TensorView& qo_indptr,
                       const KvFormat& format) {
  std::vector<int> q_len = lengths_of(qo_indptr, "qo_indptr");
  const std::vector<int> num_ids = lengths_of(given.hash_indptr, "hash_indptr");
  check_requests("hash_indptr", num_ids.size() + 1, q_len.size() + 1, q_len.size());
  const int n = static_cast<int>(q_len.size());
  const int block = given.block_tokens;
  if (block < 1) refuse(kWhere, ": block_tokens is ", block, "; it must be >= 1");
  const IndexArray ids = host_array(given.hash_ids, "hash_ids");
  i64 total_ids = 0;
  std::vector<i64> first_id(n);
  for (int r = 0; r < n; ++r) {
    first_id[r] = total_ids;
    total_ids += num_ids[r];
  }
  ids.require_size(total_ids, "the last entry of hash_indptr");
  const IndexArray hashed_len(given.hashed_len, {kWhere, "hashed_len"}, Device{});
  if (hashed_len.given()) hashed_len.require_host(n, "one a request");

  PrefixTree tree{.order = {},
                  .parent = {},
                  .kv_len = {},
                  .kv_end = {},
                  .list = {},
                  .list_begin = {},
                  .num_given = 0,
                  .rest_of = {},
                  .request_node = std::vector<int>(n, -1),
                  .request_kv_len = std::vector<int>(n),
                  .q_len = std::move(q_len),
                  .lists = KeyLists(format, given.requests, n, "request", -1, Device{}, kWhere),
                  .lists_of_requests = true};
  std::vector<int> known(n), requests(n);  // keys that hashes stand for
  for (int r = 0; r < n; ++r) {
    tree.request_kv_len[r] = tree.lists.kv_len(r, kMaxKeys, kLimit);
    i64 most = i64{num_ids[r]} * block;
    if (hashed_len.given()) {
      if (hashed_len[r] < 0 || hashed_len[r] > most) {
        refuse(hashed_len.at(r), " is ", hashed_len[r], "; ", num_ids[r], " blocks of ", block,
               " keys stand for 0 ... ", most);
      }
      most = hashed_len[r];
    }
    known[r] = static_cast<int>(std::min<i64>(most, tree.request_kv_len[r]));
    requests[r] = r;
  }

  std::vector<Group> groups{{0, n, 0, -1}};
  while (!groups.empty()) {
    const Group group = groups.back();
    groups.pop_back();
    const auto begin = requests.begin() + group.begin, end = requests.begin() + group.end;
    if (end - begin < 2) {
      if (begin != end) tree.request_node[*begin] = group.node;
      continue;
    }
    // As far as all go on, and alike.
    int least = kMaxKeys;
    for (auto r = begin; r != end; ++r) least = std::min(least, known[*r]);
    const auto id = [&](int r, int position) { return ids[first_id[r] + position / block]; };
    int position = group.position;
    while (position < least && std::all_of(begin + 1, end, [&](int r) {
             return id(r, position) == id(*begin, position);
           })) {
      position = static_cast<int>(std::min<i64>((i64{position} / block + 1) * block, least));
    }
    const int kv_begin = group.node < 0 ? 0 : tree.kv_end[group.node];
    const int kv_end = position / format.page_size * format.page_size;  // whole pages
    int node = group.node;
    if (kv_end > kv_begin) {
      node = static_cast<int>(tree.order.size());
      tree.order.push_back(node);
      tree.parent.push_back(group.node);
      tree.kv_len.push_back(kv_end - kv_begin);
      tree.kv_end.push_back(kv_end);
      tree.list.push_back(*begin);
      tree.list_begin.push_back(0);
      ++tree.num_given;
    }
    // Those that end here, then those that go on, by what follows. Equal ones keep their order.
    const auto going_on = std::stable_partition(begin, end, [&](int r) {
      if (known[r] > position) return false;
      tree.request_node[r] = node;
      return true;
    });
    std::stable_sort(going_on, end,
                     [&](int a, int b) { return id(a, position) < id(b, position); });
    const size_t first_group = groups.size();
    for (auto r = going_on; r != end;) {
      const auto first = r;
      while (r != end && id(*r, position) == id(*first, position)) ++r;
      groups.push_back({static_cast<int>(first - requests.begin()),
                        static_cast<int>(r - requests.begin()), position, node});
    }
    std::reverse(groups.begin() + first_group, groups.end());
  }
  return tree;
}

void cut_at_chunks(PrefixTree& tree, int chunk_keys, const KvFormat& format) {
  const int page_size = format.kind == KvFormat::kPaged ? format.page_size : 1;
  const int unit = std::lcm(chunk_keys, page_size);
  std::vector<int> order;
  std::vector<int> rest(tree.parent.size(), -1);
  for (const int node : tree.order) {
    if (const int above = tree.parent[node]; above >= 0 && rest[above] >= 0) {
      tree.parent[node] = rest[above];
    }
    order.push_back(node);
    const int begin = tree.kv_end[node] - tree.kv_len[node];
    const int cut = tree.kv_end[node] / unit * unit;
    if (cut <= begin || cut == tree.kv_end[node] || (cut - begin) % page_size != 0) continue;
    rest[node] = static_cast<int>(tree.parent.size());
    order.push_back(rest[node]);
    tree.rest_of.push_back(node);
    tree.parent.push_back(node);
    tree.kv_len.push_back(tree.kv_end[node] - cut);
    tree.kv_end.push_back(tree.kv_end[node]);
    tree.list.push_back(tree.list[node]);
    tree.list_begin.push_back(tree.lists_of_requests ? 0 : cut - begin);
    tree.kv_len[node] = cut - begin;
    tree.kv_end[node] = cut;
  }
  tree.order = std::move(order);
  for (int& node : tree.request_node) {
    if (node >= 0 && rest[node] >= 0) node = rest[node];
  }
}

}  // namespace plait
