// compose_radix: the lists of the levels, of the nodes that are chosen to be shared.
#include "plait/compose_radix.h"

#include <limits>

#include "formats/radix_tree.h"
#include "scheduler/share_nodes.h"

namespace plait {
namespace {

class LevelWriter {
 public:
  LevelWriter(const PrefixTree& tree, const KvFormat& format, const scheduler::ShareChoice& choice)
      : tree_(tree), format_(format), choice_(choice), paged_(format.kind == KvFormat::kPaged) {}

  std::vector<ComposedLevels::Level> write() {
    std::vector<ComposedLevels::Level> levels(format_.num_levels);
    std::vector<std::vector<int>> members(tree_.parent.size());
    for (int r = 0; r < static_cast<int>(tree_.q_len.size()); ++r) {
      for (int at = choice_.apart[r] ? -1 : tree_.request_node[r]; at >= 0; at = tree_.parent[at]) {
        if (choice_.level[at] >= 0) members[at].push_back(r);
      }
    }
    for (ComposedLevels::Level& level : levels) {
      if (paged_) level.kv_page_indptr.push_back(0);
      if (&level != &levels.back()) level.node_indptr.push_back(0);
    }
    for (const int node : tree_.order) {
      if (choice_.level[node] < 0) continue;
      ComposedLevels::Level& level = levels[choice_.level[node]];
      append_list(node, tree_.list[node], choice_.base[node], tree_.kv_end[node], level);
      level.node_requests.insert(level.node_requests.end(), members[node].begin(),
                                 members[node].end());
      level.node_indptr.push_back(static_cast<int>(level.node_requests.size()));
    }
    for (int r = 0; r < static_cast<int>(tree_.q_len.size()); ++r) {
      const int node = tree_.request_node[r];
      const int begin = node < 0 || choice_.apart[r] ? 0
                        : choice_.level[node] >= 0   ? tree_.kv_end[node]
                                                     : choice_.base[node];
      append_list(node, r, begin, tree_.request_kv_len[r], levels.back());
    }
    return levels;
  }

 private:
  // Keys from `begin` to the end of `node` (radix tree) or of a request's own list.
  void append_list(int node, int list, int begin, int end, ComposedLevels::Level& to) {
    to.kv_len.push_back(end - begin);
    const int page_size = format_.page_size;
    run_.clear();  // the nodes whose lists are one behind the other
    if (!tree_.lists_of_requests) {
      for (int at = node; at >= 0 && tree_.kv_end[at] > begin; at = tree_.parent[at]) {
        run_.push_back(at);
      }
    }
    if (!paged_) {
      i64 first = 0;
      if (end > begin && tree_.lists_of_requests) first = tree_.lists.first_block(list) + begin;
      if (!run_.empty()) {
        first = tree_.lists.first_block(tree_.list[run_.back()]) + tree_.list_begin[run_.back()];
      }
      to.kv_begin.push_back(first);
      return;
    }
    std::vector<int>& pages = to.kv_page_indices;
    const auto append = [&](int from, int first, int num_pages) {
      const size_t size = pages.size();
      check(size + num_pages <= std::numeric_limits<int>::max(),
            "compose_radix: a level has 2^31 pages or more");
      pages.resize(size + num_pages);
      tree_.lists.copy_pages(from, first, num_pages, pages.data() + size);
    };
    if (tree_.lists_of_requests && end > begin) {
      append(list, begin / page_size, tree_.lists.num_pages(end) - begin / page_size);
    }
    for (auto it = run_.rbegin(); it != run_.rend(); ++it) {
      append(tree_.list[*it], tree_.list_begin[*it] / page_size,
             tree_.lists.num_pages(tree_.kv_len[*it]));
    }
    to.kv_page_indptr.push_back(static_cast<int>(pages.size()));
  }

  const PrefixTree& tree_;
  const KvFormat& format_;
  const scheduler::ShareChoice& choice_;
  const bool paged_;
  std::vector<int> run_;
};

ComposedLevels compose(PrefixTree tree, const RadixOptions& options) {
  const int num_levels = options.format.num_levels;
  check(num_levels >= 2, "compose_radix: the format has ", num_levels,
        " level; make it, and the Attention, with composed_kv(format, num_levels) of 2 ... ",
        kMaxLevels, ": the last is for what nobody shares");
  const int max_levels = options.max_levels == 0 ? num_levels : options.max_levels;
  check(max_levels >= 2 && max_levels <= num_levels, "compose_radix: max_levels is ",
        options.max_levels, "; it must be 2 ... ", num_levels,
        ", the levels of the format, or 0 for all");
  if (options.target.chunk_keys > 0) cut_at_chunks(tree, options.target.chunk_keys, options.format);
  scheduler::ShareChoice choice = scheduler::choose_shared_nodes(tree, options, max_levels);
  std::vector<ComposedLevels::Level> levels = LevelWriter(tree, options.format, choice).write();
  return ComposedLevels(options.format.kind == KvFormat::kPaged, std::move(levels),
                        std::move(choice.nodes));
}

}  // namespace

ComposedLevels::ComposedLevels(bool paged, std::vector<Level> levels, std::vector<NodeChoice> nodes)
    : paged_(paged), levels_(std::move(levels)), nodes_(std::move(nodes)) {
  for (const Level& level : levels_) {
    for (const size_t size :
         {level.node_indptr.size(), level.node_requests.size(), level.kv_len.size(),
          level.kv_page_indptr.size(), level.kv_page_indices.size(), level.kv_begin.size()}) {
      sizes_.push_back(static_cast<int64_t>(size));
    }
  }
}

std::vector<KvLevel> ComposedLevels::levels() const {
  std::vector<KvLevel> out;
  auto size = const_cast<int64_t*>(sizes_.data());
  static const int64_t kNothing = 0;  // an array of no entries still has an address
  const auto view = [&size](const auto& values, bool given) {
    TensorView tensor;
    int64_t* const shape = size++;
    if (!given) return tensor;
    tensor.data = values.empty()
                      ? const_cast<int64_t*>(&kNothing)
                      : static_cast<void*>(
                            const_cast<std::remove_cvref_t<decltype(values[0])>*>(values.data()));
    tensor.ndim = 1;
    tensor.dtype_bits = sizeof(values[0]) * 8;
    tensor.shape = shape;
    return tensor;
  };
  for (const Level& from : levels_) {
    const bool has_nodes = &from != &levels_.back();
    KvLevel to;
    to.node_indptr = view(from.node_indptr, has_nodes);
    to.node_requests = view(from.node_requests, has_nodes);
    to.tables.kv_len = view(from.kv_len, true);
    to.tables.kv_page_indptr = view(from.kv_page_indptr, paged_);
    to.tables.kv_page_indices = view(from.kv_page_indices, paged_);
    to.tables.kv_begin = view(from.kv_begin, !paged_);
    out.push_back(to);
  }
  return out;
}

ComposedLevels compose_radix(const RadixTree& tree, const TensorView& qo_indptr,
                             const RadixOptions& options) {
  return compose(read_tree(tree, qo_indptr, options.format), options);
}

ComposedLevels compose_radix(const BlockHashes& hashes, const TensorView& qo_indptr,
                             const RadixOptions& options) {
  return compose(read_hashes(hashes, qo_indptr, options.format), options);
}

}  // namespace plait
