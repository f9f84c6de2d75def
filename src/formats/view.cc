// make_view: one step's lengths and tables become row blocks and block tables, level by level.
#include "formats/view.h"

#include <algorithm>

#include "formats/key_lists.h"
#include "formats/mask.h"

namespace plait {
namespace {

// The queries: checks qo_indptr and returns it ready to read.
IndexArray take_queries(const Bounds& bounds, const Batch& batch, const Device& device) {
  const IndexArray qo_indptr(batch.qo_indptr, {"plan", "qo_indptr"}, device);
  if (!qo_indptr.given()) refuse("plan: qo_indptr is missing");
  if (qo_indptr.size() < 1) {
    refuse("plan: qo_indptr has no entries; it must have one more than there are requests");
  }
  qo_indptr.require_host(qo_indptr.size(), "");
  const long long n = qo_indptr.size() - 1;
  if (n > bounds.requests) {
    refuse("plan: qo_indptr has ", n + 1, " entries, so ", n, " requests; bounds.requests is ",
           bounds.requests);
  }
  if (qo_indptr[0] != 0) refuse("plan: qo_indptr[0] is ", qo_indptr[0], "; it must be 0");
  const long long max_q_len = bounds.longest_q();
  long long begin = 0;
  for (long long r = 0; r < n; ++r) {
    const long long end = qo_indptr[r + 1];
    if (end < begin) [[unlikely]] {
      refuse(qo_indptr.at(r + 1), " is ", end, ", less than the ", begin, " before it (request ", r,
             ")");
    }
    if (end > bounds.query_tokens) [[unlikely]] {
      refuse(qo_indptr.at(r + 1), " is ", end, "; bounds.query_tokens is ", bounds.query_tokens);
    }
    if (end - begin > max_q_len) [[unlikely]] {
      refuse(qo_indptr.at(r + 1), " - qo_indptr[", r, "] is ", end - begin,
             "; bounds.max_q_len is ", max_q_len);
    }
    begin = end;
  }
  return qo_indptr;
}

// The requests under each node of a level.
struct Nodes {
  IndexArray indptr, requests;  // not given: node i is request i
  long long count = 0;
};

Nodes take_nodes(const KvLevel& level, long long num_requests, int level_idx,
                 const Device& device) {
  Nodes nodes;
  const ArrayName indptr_name{"plan", "node_indptr", level_idx};
  const ArrayName requests_name{"plan", "node_requests", level_idx};
  nodes.indptr = IndexArray(level.node_indptr, indptr_name, device);
  nodes.requests = IndexArray(level.node_requests, requests_name, device);
  if (!nodes.indptr.given()) {
    if (nodes.requests.given()) {
      refuse(requests_name.text(), " is given without node_indptr");
    }
    nodes.count = num_requests;
    return nodes;
  }
  const IndexArray& indptr = nodes.indptr;
  if (indptr.size() < 1) refuse(indptr_name.text(), " has no entries; it must start with 0");
  indptr.require_host(indptr.size(), "");
  nodes.count = indptr.size() - 1;
  if (indptr[0] != 0) refuse(indptr.at(0), " is ", indptr[0], "; it must be 0");
  for (long long i = 0; i < nodes.count; ++i) {
    if (indptr[i + 1] < indptr[i]) {
      refuse(indptr.at(i + 1), " is ", indptr[i + 1], ", less than the ", indptr[i], " before it");
    }
  }
  if (!nodes.requests.given() && indptr[nodes.count] == 0) return nodes;
  nodes.requests.require_host(indptr[nodes.count], "the last entry of node_indptr");
  for (long long i = 0; i < nodes.requests.size(); ++i) {
    const long long r = nodes.requests[i];
    if (r < 0 || r >= num_requests) {
      refuse(nodes.requests.at(i), " is ", r, "; the batch has ", num_requests, " requests");
    }
  }
  return nodes;
}

// Where the largest block so far was found; its name is written once, at the end.
struct LargestBlock {
  int level = -1;
  long long list = 0, first_block = 0;
};

class ViewBuilder {
 public:
  ViewBuilder(const KvFormat& format, const Bounds& bounds, const Device& device,
              const IndexArray& qo_indptr, FormatView& out)
      : format_(format),
        bounds_(bounds),
        device_(device),
        qo_indptr_(qo_indptr),
        num_requests_(qo_indptr.size() - 1),
        max_pages_(max_host_pages(format, bounds)),
        out_(out) {
    out.view.row_blocks.clear();
    out.view.row_map.clear();
    out.view.num_levels = format.num_levels;
    out.view.num_requests = static_cast<int>(num_requests_);
    out.num_query_tokens = static_cast<int>(qo_indptr[num_requests_]);
    out.max_block = -1;
    out.max_block_place.clear();
    out.tables.resize(format.num_levels);
    out.block_list.clear();
    out.request_kv_len.assign(num_requests_, 0);
    out.request_level.assign(format.num_levels > 1 ? num_requests_ : 0, 0);
  }

  // Each request is a list of its own.
  void add_requests(const KvTables& tables, int level_idx) {
    const bool composed = format_.num_levels > 1;
    const KeyLists lists(format_, tables, num_requests_, "request", composed ? level_idx : -1,
                         device_);
    const size_t first_row_block = out_.view.row_blocks.size();
    long long num_pages = 0;
    for (long long r = 0; r < num_requests_; ++r) {
      const int kv_len = lists.kv_len(r, bounds_.keys);
      const int kv_pos_begin = out_.request_kv_len[r];
      add_keys(r, kv_len);
      if (composed) out_.request_level[r] = level_idx + 1;
      const int first_token = static_cast<int>(qo_indptr_[r]);
      const int num_tokens = static_cast<int>(qo_indptr_[r + 1]) - first_token;
      if (num_tokens == 0) continue;
      add_row_block(lists, r, level_idx, first_token, num_tokens, kv_len, kv_pos_begin, num_pages);
    }
    fill_table(lists, level_idx, first_row_block, num_pages);
  }

  // Each node is a list; its queries are those of its requests.
  void add_nodes(const KvLevel& level, int level_idx) {
    Nodes& nodes = nodes_[level_idx];
    nodes = take_nodes(level, num_requests_, level_idx, device_);
    if (!nodes.indptr.given()) return add_requests(level.tables, level_idx);
    const KeyLists lists(format_, level.tables, nodes.count, "node", level_idx, device_);
    const size_t first_row_block = out_.view.row_blocks.size();
    long long num_pages = 0;
    for (long long node = 0; node < nodes.count; ++node) {
      const int kv_len = lists.kv_len(node, bounds_.keys);
      int kv_pos_begin = 0, first_token = 0, num_tokens = 0;
      long long first_request = -1;
      for (long long i = nodes.indptr[node]; i < nodes.indptr[node + 1]; ++i) {
        const long long r = nodes.requests[i];
        int& covered = out_.request_level[r];
        if (covered == level_idx + 1) {
          refuse(nodes.requests.at(i), " is ", r,
                 " again; a level takes each request at most once");
        }
        covered = level_idx + 1;
        if (first_request < 0) {
          first_request = r;
          kv_pos_begin = out_.request_kv_len[r];
        } else if (out_.request_kv_len[r] != kv_pos_begin) {
          refuse(nodes.requests.at(i), " is ", r, ", which has ", out_.request_kv_len[r],
                 " keys in the levels before, but request ", first_request, " under the same node ",
                 node, " has ", kv_pos_begin, "; they must be equal");
        }
        add_keys(r, kv_len);
        const int begin = static_cast<int>(qo_indptr_[r]),
                  end = static_cast<int>(qo_indptr_[r + 1]);
        if (begin == end) continue;
        if (num_tokens == 0) first_token = begin;
        needs_row_map_ |= begin != first_token + num_tokens;
        num_tokens += end - begin;
      }
      if (num_tokens == 0) continue;
      add_row_block(lists, node, level_idx, first_token, num_tokens, kv_len, kv_pos_begin,
                    num_pages);
    }
    fill_table(lists, level_idx, first_row_block, num_pages);
  }

  // Composed formats, after the last level.
  void finish_levels() {
    add_uncovered();
    if (needs_row_map_) build_row_map();
  }

  void fill_tokens() {
    BsrView& view = out_.view;
    view.token_request.resize(out_.num_query_tokens);
    view.token_position.resize(out_.num_query_tokens);
    int* request = view.token_request.data();
    int* position = view.token_position.data();
    int begin = 0;
    for (int r = 0; r < num_requests_; ++r) {
      const int end = static_cast<int>(qo_indptr_[r + 1]);
      const int offset = out_.request_kv_len[r] - end;  // bottom right: the last query is last key
      for (int t = begin; t < end; ++t) {
        request[t] = r;
        position[t] = offset + t;
      }
      begin = end;
    }
  }

 private:
  void add_keys(long long r, int kv_len) {
    int& total = out_.request_kv_len[r];
    if (kv_len > bounds_.keys - total) [[unlikely]] {
      refuse("plan: request ", r, " has ", static_cast<long long>(total) + kv_len,
             " keys over its levels; bounds.keys is ", bounds_.keys);
    }
    total += kv_len;
  }

  void add_row_block(const KeyLists& lists, long long list, int level_idx, int first_token,
                     int num_tokens, int kv_len, int kv_pos_begin, long long& num_pages) {
    RowBlock block{};
    block.first_token = first_token;
    block.num_tokens = num_tokens;
    block.kv_len = kv_len;
    block.kv_pos_begin = kv_pos_begin;
    block.level = level_idx;
    if (lists.copied()) {
      block.first_block = num_pages;
      num_pages += lists.num_pages(kv_len);
    } else {
      block.first_block = lists.first_block(list);
      if (lists.affine() && kv_len > 0 && block.first_block + kv_len - 1 > out_.max_block) {
        out_.max_block = block.first_block + kv_len - 1;
        largest_ = {level_idx, list, block.first_block};
      }
    }
    out_.view.row_blocks.push_back(block);
    out_.block_list.push_back(static_cast<int>(list));
  }

  // Copies the level's host lists, those of its row blocks alone.
  void fill_table(const KeyLists& lists, int level_idx, size_t first_row_block,
                  long long num_pages) {
    LevelTable& table = out_.tables[level_idx];
    table.affine = lists.affine();
    table.on_device = !lists.affine() && !lists.copied();
    table.device_table = lists.device_table();
    total_pages_ += num_pages;
    if (lists.copied() && total_pages_ > max_pages_) {
      refuse("plan: the host page tables have ", total_pages_, " entries; bounds.total_pages is ",
             max_pages_);
    }
    table.indices.resize(num_pages);  // not cleared before: what is there is not zeroed again
    if (lists.copied()) {
      const std::vector<RowBlock>& blocks = out_.view.row_blocks;
      for (size_t b = first_row_block; b < blocks.size(); ++b) {
        const long long list = out_.block_list[b], first_block = blocks[b].first_block;
        const int n = lists.num_pages(blocks[b].kv_len);
        const int largest = lists.copy_pages(list, 0, n, table.indices.data() + first_block);
        if (largest > out_.max_block) {
          out_.max_block = largest;
          largest_ = {level_idx, list, first_block};
        }
      }
    }
    if (largest_.level == level_idx) name_largest(lists);
  }

  void name_largest(const KeyLists& lists) {
    if (lists.affine()) {
      out_.max_block_place = lists.last_row_name(largest_.list);
      return;
    }
    const auto first = out_.tables[largest_.level].indices.begin() + largest_.first_block;
    const auto place = std::find(first, out_.tables[largest_.level].indices.end(),
                                 static_cast<int>(out_.max_block));
    out_.max_block_place = lists.page_name(largest_.list, place - first);
  }

  // Tokens of requests that are in no level: attention over no keys, a row block each request.
  void add_uncovered() {
    for (long long r = 0; r < num_requests_; ++r) {
      const int first_token = static_cast<int>(qo_indptr_[r]);
      const int num_tokens = static_cast<int>(qo_indptr_[r + 1]) - first_token;
      if (out_.request_level[r] != 0 || num_tokens == 0) continue;
      RowBlock block{};
      block.first_token = first_token;
      block.num_tokens = num_tokens;
      block.level = format_.num_levels - 1;
      out_.view.row_blocks.push_back(block);
      out_.block_list.push_back(-1);
    }
  }

  // Some node's tokens are not neighbours: all row blocks name theirs through a map.
  void build_row_map() {
    std::vector<int>& map = out_.view.row_map;
    const auto append = [&map](long long begin, long long end) {
      for (long long row = begin; row < end; ++row) map.push_back(static_cast<int>(row));
    };
    for (size_t b = 0; b < out_.view.row_blocks.size(); ++b) {
      RowBlock& block = out_.view.row_blocks[b];
      const Nodes& nodes = nodes_[block.level];
      const int map_begin = static_cast<int>(map.size()), list = out_.block_list[b];
      if (list < 0 || !nodes.indptr.given()) {
        append(block.first_token, block.first_token + block.num_tokens);
      } else {
        for (long long i = nodes.indptr[list]; i < nodes.indptr[list + 1]; ++i) {
          const long long r = nodes.requests[i];
          append(qo_indptr_[r], qo_indptr_[r + 1]);
        }
      }
      block.first_token = map_begin;
    }
  }

  const KvFormat& format_;
  const Bounds& bounds_;
  const Device& device_;
  const IndexArray& qo_indptr_;
  const long long num_requests_, max_pages_;
  FormatView& out_;
  LargestBlock largest_;
  long long total_pages_ = 0;
  bool needs_row_map_ = false;
  Nodes nodes_[kMaxLevels];
};

bool any_given(const KvTables& t) {
  for (const TensorView* tensor :
       {&t.kv_len, &t.kv_indptr, &t.kv_begin, &t.kv_page_indptr, &t.kv_page_indices,
        &t.kv_last_page_len, &t.block_table, &t.request_map}) {
    if (tensor->defined()) return true;
  }
  return false;
}

}  // namespace

long long max_host_pages(const KvFormat& format, const Bounds& bounds) {
  if (format.kind == KvFormat::kRagged) return 0;
  if (bounds.total_pages > 0) return bounds.total_pages;
  const long long pages =
      (static_cast<long long>(bounds.keys) + format.page_size - 1) / format.page_size;
  return bounds.requests * (pages + format.num_levels - 1);
}

void make_view(const KvFormat& format, const Bounds& bounds, const Batch& batch,
               const Device& device, FormatView& out) {
  const IndexArray qo_indptr = take_queries(bounds, batch, device);
  ViewBuilder builder(format, bounds, device, qo_indptr, out);
  if (format.num_levels == 1) {
    if (!batch.levels.empty()) {
      refuse("plan: levels are given, but the format has one level; give the tables themselves");
    }
    if (!batch.nodes.empty()) refuse("plan: nodes are given, but the format has one level");
    builder.add_requests(batch.kv, 0);
  } else {
    if (any_given(batch.kv)) {
      refuse("plan: a composed format takes its tables in levels, one set a level");
    }
    if (batch.levels.size() != static_cast<size_t>(format.num_levels)) {
      refuse("plan: levels has ", batch.levels.size(), " entries; the format has ",
             format.num_levels, " levels; make the Attention with as many, or give empty ones",
             " (compose_radix gives as many as the format has)");
    }
    for (int i = 0; i < format.num_levels; ++i) builder.add_nodes(batch.levels[i], i);
    builder.finish_levels();
  }
  builder.fill_tokens();
  take_positions(batch.q_positions, device, out.view.token_position);
  take_mask(batch.mask, qo_indptr, device, out);
}

}  // namespace plait
