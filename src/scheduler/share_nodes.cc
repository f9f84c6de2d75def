#include "scheduler/share_nodes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "scheduler/scheduler.h"

namespace plait::scheduler {
namespace {

// The row tiles that read a list of keys together, as row_tiles.cc will cut them. Microseconds of
// one kv head.
struct Reader {
  int num_tiles = 0, tile_q = 0;
  double fixed_us = 0, us_per_key = 0;
  int min_position = std::numeric_limits<int>::max(), max_position = 0;  // of its queries
  // For explain(): where its list ends, and whether its rows have keys behind that.
  int end = 0;
  bool keys_below = false;
};

void add_tiles(Reader& reader, const CostModel& model, int shape, int count) {
  reader.num_tiles += count;
  reader.fixed_us += 1e-6 * model.shapes[shape].fixed_ps * count;
  reader.us_per_key += 1e-6 * model.shapes[shape].key_ps * count;
}

Reader reader_of(const CostModel& model, int num_rows, int min_position, int max_position) {
  Reader reader;
  reader.min_position = min_position;
  reader.max_position = max_position;
  const int group = model.group_size, most = rows_per_tile(model.tile_q[0], group);
  const int unit = group > model.tile_q[0] ? group : num_rows;  // what no tile reaches beyond
  const int units = num_rows == 0 ? 0 : num_rows / unit;
  const auto shape = [&](int rows) { return shape_for(model.tile_q, model.num_shapes, rows); };
  if (unit / most * units > 0) add_tiles(reader, model, shape(most), unit / most * units);
  if (unit % most * units > 0) add_tiles(reader, model, shape(unit % most), units);
  reader.tile_q = num_rows == 0 ? 0 : model.tile_q[shape(std::min(unit, most))];
  return reader;
}

// Keys of [begin, end) that queries at these positions see, by whole KV tiles.
int seen(const Visibility& visible, const CostModel& model, int begin, int end, int min_position,
         int max_position) {
  RowTile tile{};
  tile.min_position = min_position;
  tile.max_position = max_position;
  RowBlock block{};
  block.kv_len = end - begin;
  block.kv_pos_begin = begin;
  find_keys(visible, block, model.rules, tile);
  return tile.seen();
}

// What one row block costs over keys [begin, end), all kv heads: the price of every decision here.
// joined: its rows have keys elsewhere too, so that its tiles leave partial states.
double block_us(const Visibility& visible, const CostModel& model, const Reader& reader, int begin,
                int end, bool joined) {
  if (reader.num_tiles == 0 || begin >= end) return 0;
  const int num_keys = seen(visible, model, begin, end, reader.min_position, reader.max_position);
  if (num_keys == 0) return 0;
  const double merge_us = joined ? 1e-6 * model.rules.merge_ps * reader.num_tiles : 0;
  return model.rules.num_kv_heads * (reader.fixed_us + num_keys * reader.us_per_key + merge_us);
}

constexpr double kImpossible = 1e300;

class Chooser {
 public:
  Chooser(const PrefixTree& tree, const RadixOptions& options, int max_levels)
      : tree_(tree),
        options_(options),
        model_(cost_model(options.target)),
        num_nodes_(static_cast<int>(tree.parent.size())),
        num_requests_(static_cast<int>(tree.q_len.size())),
        max_levels_(max_levels),
        paged_(options.format.kind == KvFormat::kPaged) {}

  ShareChoice choose() {
    find_unjoinable();
    find_apart();
    gather_rows();
    choose_nodes();
    weigh_choices();
    count_keys_not_read();
    std::vector<NodeChoice> nodes = describe();
    return {std::move(level_), std::move(base_), std::move(apart_), std::move(nodes)};
  }

 private:
  // Nodes whose keys no list can hold together with those below them.
  void find_unjoinable() {
    unjoinable_.assign(num_nodes_, 0);
    if (tree_.lists_of_requests) return;
    for (const int node : tree_.order) {
      const int above = tree_.parent[node];
      if (above < 0) continue;
      const bool follows = paged_ ? tree_.kv_len[above] % options_.format.page_size == 0
                                  : first_row(node) == first_row(above) + tree_.kv_len[above];
      if (!follows) unjoinable_[above] = 1;
    }
  }
  i64 first_row(int node) const {  // ragged
    return tree_.lists.first_block(tree_.list[node]) + tree_.list_begin[node];
  }
  // The node of the caller's tree that it is, or is the rest of.
  int given(int node) const {
    return node < tree_.num_given ? node : tree_.rest_of[node - tree_.num_given];
  }
  bool ends_inside_chunk(int node) const {
    return model_.chunk_keys > 0 && tree_.kv_end[node] % model_.chunk_keys != 0;
  }

  // Requests that fill tiles by themselves would read a node's keys as often as without it, and be
  // joined. They have all keys in the last level, if one list can hold them.
  void find_apart() {
    std::vector<char> stuck(num_nodes_, 0);
    for (const int node : tree_.order) {
      const int above = tree_.parent[node];
      stuck[node] = above >= 0 && (stuck[above] != 0 || unjoinable_[above] != 0);
    }
    const int most = rows_per_tile(model_.tile_q[0], model_.group_size);
    apart_.assign(num_requests_, 0);
    for (int r = 0; r < num_requests_; ++r) {
      const int node = tree_.request_node[r];
      apart_[r] = i64{tree_.q_len[r]} * model_.group_size >= most && (node < 0 || stuck[node] == 0);
    }
  }

  // The rows under every node, and the nodes that there is a choice of: those over two requests,
  // and those that must be shared. The keys of other nodes are their one request's own.
  void gather_rows() {
    num_queries_.assign(num_nodes_, 0);
    num_rows_.assign(num_nodes_, 0);
    rows_.assign(num_nodes_, {});
    keys_below_.assign(num_nodes_, 0);
    depth_.assign(num_nodes_, 0);
    requests_of_.assign(num_nodes_, {});
    own_.assign(num_requests_, {});
    for (int r = 0; r < num_requests_; ++r) {
      const int node = tree_.request_node[r], kv_len = tree_.request_kv_len[r];
      if (node < 0 || tree_.q_len[r] == 0 || apart_[r] != 0) continue;
      const i64 num_rows = i64{tree_.q_len[r]} * model_.group_size;
      own_[r] = reader_of(model_, static_cast<int>(num_rows), kv_len - tree_.q_len[r], kv_len - 1);
      ++num_queries_[node];
      num_rows_[node] += num_rows;
      rows_[node].min_position = std::min(rows_[node].min_position, own_[r].min_position);
      rows_[node].max_position = std::max(rows_[node].max_position, own_[r].max_position);
      keys_below_[node] |= kv_len > tree_.kv_end[node];
    }
    for (const int node : tree_.order) {
      if (tree_.parent[node] >= 0) depth_[node] = depth_[tree_.parent[node]] + 1;
    }
    for (auto it = tree_.order.rbegin(); it != tree_.order.rend(); ++it) {  // children first
      const int node = *it, above = tree_.parent[node];
      if (num_queries_[node] == 0) unjoinable_[node] = 0;  // its list is not read
      check(num_rows_[node] <= 1 << 30, "compose_radix: node ", node, " is over ", num_rows_[node],
            " query rows (tokens x heads of a group); at most ", 1 << 30, " are taken");
      const int min_position = rows_[node].min_position, max_position = rows_[node].max_position;
      if (num_queries_[node] > 0) {
        rows_[node] =
            reader_of(model_, static_cast<int>(num_rows_[node]), min_position, max_position);
      }
      if (above < 0) continue;
      num_queries_[above] += num_queries_[node];
      num_rows_[above] += num_rows_[node];
      rows_[above].min_position = std::min(rows_[above].min_position, min_position);
      rows_[above].max_position = std::max(rows_[above].max_position, max_position);
      keys_below_[above] |= num_queries_[node] > 0;
    }
    std::vector<char> has_choice(num_nodes_, 0);
    for (auto it = tree_.order.rbegin(); it != tree_.order.rend(); ++it) {
      const int node = *it, above = tree_.parent[node];
      has_choice[node] |= num_queries_[node] > 1 || unjoinable_[node] != 0;
      if (above >= 0) has_choice[above] |= has_choice[node];
    }
    for (const int node : tree_.order) {
      if (has_choice[node]) choices_.push_back(node);
    }
    for (int r = 0; r < num_requests_; ++r) {
      int node = tree_.request_node[r];
      while (node >= 0 && !has_choice[node]) node = tree_.parent[node];
      if (node >= 0 && own_[r].num_tiles > 0) requests_of_[node].push_back(r);
    }
  }

  // The nodes to share: of all choices with no more on any path than there are levels for, the
  // cheapest by block_us. A node's keys are in the list of the next shared node below, or of a
  // request; so what a subtree costs depends on what is above by the nearest shared node alone.
  // cost[(i, k)] of a node: of the subtree under it, where that is the i-th node from the root (0:
  // there is none) and k levels are left.
  void choose_nodes() {
    const int num_k = max_levels_;                       // k: 0 ... max_levels - 1
    std::vector<std::vector<double>> below(num_nodes_);  // of what is under a node; last i: it
    std::vector<std::vector<unsigned char>> share(num_nodes_);  // bit k of [i]
    static_assert(kMaxLevels <= 8);
    std::vector<int> ends;  // of the nodes above, from the root; 0 in front
    for (auto it = choices_.rbegin(); it != choices_.rend(); ++it) {
      const int node = *it, above = tree_.parent[node], num_above = depth_[node];
      ends.assign(num_above + 2, 0);
      for (int at = node, i = num_above + 1; at >= 0; at = tree_.parent[at]) {
        ends[i--] = tree_.kv_end[at];
      }
      std::vector<double> sums = std::move(below[node]);
      sums.resize((num_above + 2) * num_k, 0.0);
      for (const int r : requests_of_[node]) {
        for (int i = 0; i < num_above + 2; ++i) {
          const double us = cost_us(own_[r], ends[i], tree_.request_kv_len[r], i > 0);
          for (int k = 0; k < num_k; ++k) sums[i * num_k + k] += us;
        }
      }
      share[node].assign(num_above + 1, 0);
      if (above >= 0) below[above].resize((num_above + 1) * num_k, 0.0);
      const bool must = unjoinable_[node] != 0;
      if (must && ends_inside_chunk(node)) {
        refuse(
            "compose_radix: node ", given(node), " ends at key ", tree_.kv_end[node],
            paged_ ? ", inside a page" : ", and its keys are not in front of those below it",
            ", so that it takes a level of its own; in invariant mode levels end at multiples of ",
            model_.chunk_keys, " keys");
      }
      const bool may = must || (num_queries_[node] > 1 && !ends_inside_chunk(node));
      for (int i = 0; i < num_above + 1; ++i) {
        const double once_us =
            may ? cost_us(rows_[node], ends[i], tree_.kv_end[node], i > 0 || keys_below_[node]) : 0;
        for (int k = 0; k < num_k; ++k) {
          double best = must ? kImpossible : sums[i * num_k + k];
          if (may && k > 0) {
            const double us = once_us + sums[(num_above + 1) * num_k + k - 1];
            if (must || us < best) {
              best = us;
              share[node][i] |= 1 << k;
            }
          }
          if (above >= 0) {
            below[above][i * num_k + k] += best;
          } else if (k == num_k - 1 && best >= kImpossible) {
            refuse_unjoinable();
          }
        }
      }
    }
    level_.assign(num_nodes_, -1);
    base_.assign(num_nodes_, 0);
    std::vector<int> nearest(num_nodes_, 0), used(num_nodes_, 0);
    for (const int node : tree_.order) {
      if (const int above = tree_.parent[node]; above >= 0) {
        const bool shared = level_[above] >= 0;
        nearest[node] = shared ? depth_[above] + 1 : nearest[above];
        used[node] = used[above] + shared;
        base_[node] = shared ? tree_.kv_end[above] : base_[above];
      }
      if (share[node].empty()) continue;
      if (share[node][nearest[node]] >> (num_k - 1 - used[node]) & 1) level_[node] = used[node];
    }
  }

  double cost_us(const Reader& reader, int begin, int end, bool joined) const {
    return block_us(options_.visible, model_, reader, begin, end, joined);
  }

  // For explain(): what each node's list costs shared, and read by all that is below it, where the
  // other nodes are as they were chosen.
  void weigh_choices() {
    weighed_.assign(num_nodes_, {0, 0});
    std::vector<std::vector<Reader>> readers(num_nodes_);  // what would read the node's keys
    for (auto it = choices_.rbegin(); it != choices_.rend(); ++it) {
      const int node = *it, above = tree_.parent[node];
      const int begin = base_[node], end = tree_.kv_end[node];
      std::vector<Reader>& from = readers[node];
      for (const int r : requests_of_[node]) {
        from.push_back(own_[r]);
        from.back().end = tree_.request_kv_len[r];
      }
      Weighed& weighed = weighed_[node];
      weighed.shared_us = cost_us(rows_[node], begin, end, begin > 0 || keys_below_[node]);
      for (const Reader& reader : from) {
        weighed.flat_us += cost_us(reader, begin, reader.end, begin > 0 || reader.keys_below);
        weighed.shared_us += cost_us(reader, end, reader.end, true);
        // Without what it costs either way.
        const double own_us = cost_us(reader, end, reader.end, begin > 0 || reader.keys_below);
        weighed.flat_us -= own_us;
        weighed.shared_us -= own_us;
      }
      if (above < 0 || num_queries_[node] == 0) continue;
      if (level_[node] >= 0) {
        from.assign(1, rows_[node]);
        from[0].end = end;
        from[0].keys_below = keys_below_[node] != 0;
      }
      std::vector<Reader>& to = readers[above];
      if (to.size() < from.size()) to.swap(from);
      to.insert(to.end(), from.begin(), from.end());
      from = {};
    }
  }

  double saved_us(int node) const { return weighed_[node].flat_us - weighed_[node].shared_us; }

  [[noreturn]] void refuse_unjoinable() const {
    std::vector<int> depth(num_nodes_, 0);
    int deepest = tree_.order.front();
    for (const int node : tree_.order) {
      const int above = tree_.parent[node];
      depth[node] = (above < 0 ? 0 : depth[above]) + unjoinable_[node];
      if (depth[node] > depth[deepest]) deepest = node;
    }
    const int levels = depth[deepest] + 1;
    refuse("compose_radix: ", depth[deepest], " nodes on the way to node ", deepest,
           paged_ ? " end inside a page" : " have keys that are not in front of those below",
           ", so that each takes a level: with that of the requests ", levels, "; max_levels is ",
           max_levels_, ". ",
           levels <= kMaxLevels ? concat("Take ", levels, " levels (composed_kv, max_levels), or ")
                                : std::string(),
           paged_ ? concat("end nodes at whole pages (page_size ", options_.format.page_size, ")")
                  : "put the keys of a path one after the other");
  }

  // What requests would see of shared nodes' lists each by itself, beyond what is read once.
  void count_keys_not_read() {
    const auto seen_of = [&](int node, int min_position, int max_position) {
      return i64{seen(options_.visible, model_, base_[node], tree_.kv_end[node], min_position,
                      max_position)};
    };
    not_read_.assign(num_nodes_, 0);
    for (int r = 0; r < num_requests_; ++r) {
      if (own_[r].num_tiles == 0) continue;
      for (int at = tree_.request_node[r]; at >= 0; at = tree_.parent[at]) {
        if (level_[at] < 0) continue;
        not_read_[at] += seen_of(at, own_[r].min_position, own_[r].max_position);
      }
    }
    for (const int node : choices_) {
      if (level_[node] < 0) continue;
      not_read_[node] -= seen_of(node, rows_[node].min_position, rows_[node].max_position);
      not_read_[node] = std::max<i64>(not_read_[node], 0);
    }
  }

  std::vector<NodeChoice> describe() const {
    std::vector<NodeChoice> choices;
    for (const int node : choices_) {
      const bool shared = level_[node] >= 0;
      if ((num_queries_[node] < 2 && !shared) || node >= tree_.num_given) continue;
      NodeChoice c;
      c.node = node;
      c.parent = tree_.parent[node] < 0 ? -1 : given(tree_.parent[node]);
      c.level = level_[node];
      c.num_requests = num_queries_[node];
      c.num_rows = static_cast<int>(num_rows_[node]);
      c.num_tiles = rows_[node].num_tiles;
      c.tile_q = rows_[node].tile_q;
      c.kv_len = tree_.kv_len[node];
      c.why = ends_inside_chunk(node)  ? NodeChoice::kInsideChunk
              : saved_us(node) > 0     ? (shared ? NodeChoice::kPays : NodeChoice::kTooDeep)
              : unjoinable_[node] != 0 ? NodeChoice::kCannotJoin
                                       : NodeChoice::kDoesNotPay;
      c.keys_shared = shared ? tree_.kv_end[node] - base_[node] : 0;
      c.keys_not_read = shared ? not_read_[node] : 0;
      c.flat_ns = std::llround(1e3 * weighed_[node].flat_us);
      c.shared_ns = std::llround(1e3 * weighed_[node].shared_us);
      choices.push_back(c);
    }
    return choices;
  }

  const PrefixTree& tree_;
  const RadixOptions& options_;
  const CostModel model_;
  const int num_nodes_, num_requests_, max_levels_;
  const bool paged_;
  std::vector<char> apart_;  // by request
  // By node.
  std::vector<char> unjoinable_;
  std::vector<int> num_queries_;               // requests with queries under it that are not apart
  std::vector<i64> num_rows_;                  // packed
  std::vector<Reader> rows_;                   // all rows under it as one row block
  std::vector<char> keys_below_;               // whether any of these rows has keys behind it
  std::vector<int> depth_;                     // nodes above it
  std::vector<int> choices_;                   // parents first
  std::vector<std::vector<int>> requests_of_;  // whose last choice it is, with queries, not apart
  std::vector<Reader> own_;                    // by request
  struct Weighed {
    double flat_us, shared_us;
  };
  std::vector<Weighed> weighed_;
  std::vector<int> level_;  // -1: flat
  std::vector<int> base_;   // where its list begins: behind the shared node above it
  std::vector<i64> not_read_;
};

}  // namespace

ShareChoice choose_shared_nodes(const PrefixTree& tree, const RadixOptions& options,
                                int max_levels) {
  return Chooser(tree, options, max_levels).choose();
}

}  // namespace plait::scheduler
