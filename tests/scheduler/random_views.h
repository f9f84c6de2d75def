// Random batches for tests of the planner: ragged lengths with the awkward ones over-represented,
// one level or two, every kind of visibility, targets of very different machines.
#pragma once
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "plait/plan.h"

namespace plait::testing {

using Random = std::mt19937;

inline int pick(Random& random, const std::vector<int>& values) {
  return values[random() % values.size()];
}

inline std::vector<int> iota(int n) {
  std::vector<int> values(n);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// Appends the tokens of one request: causal, aligned bottom right.
inline void add_tokens(BsrView& view, int request, int q_len, int kv_len) {
  for (int i = 0; i < q_len; ++i) {
    view.token_request.push_back(request);
    view.token_position.push_back(kv_len - q_len + i);
  }
}

inline BsrView flat_view(const std::vector<int>& q_len, const std::vector<int>& kv_len) {
  BsrView view;
  view.num_requests = static_cast<int>(q_len.size());
  i64 first_block = 0;
  for (int r = 0; r < view.num_requests; ++r) {
    view.row_blocks.push_back({.first_block = first_block,
                               .first_token = static_cast<int>(view.token_position.size()),
                               .num_tokens = q_len[r],
                               .kv_len = kv_len[r],
                               .kv_pos_begin = 0,
                               .level = 0});
    first_block += kv_len[r];
    add_tokens(view, r, q_len[r], kv_len[r]);
  }
  return view;
}

inline BsrView random_flat_view(Random& random) {
  const int n = pick(random, {0, 1, 2, 3, 5, 9});
  std::vector<int> q_len(n), kv_len(n);
  for (int r = 0; r < n; ++r) {
    q_len[r] = pick(random, {0, 1, 1, 1, 2, 3, 7, 16, 17, 31, 33, 61});
    kv_len[r] = pick(random, {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 509, 997});
  }
  return flat_view(q_len, kv_len);
}

// Requests under shared prefix nodes, whose tokens are scattered over the batch, then a suffix
// each; some requests are under no node, some have no suffix, some are in no row block at all.
inline BsrView random_two_level_view(Random& random) {
  const int n = pick(random, {1, 2, 5, 8}), num_nodes = pick(random, {1, 2, 3});
  std::vector<int> node(n), q_len(n), suffix(n), first_token(n), prefix(num_nodes);
  for (int& length : prefix) length = pick(random, {0, 1, 63, 64, 65, 128, 257, 509});
  BsrView view;
  view.num_requests = n;
  view.num_levels = 2;
  for (int r = 0; r < n; ++r) {
    node[r] = static_cast<int>(random() % (num_nodes + 1)) - 1;
    q_len[r] = pick(random, {0, 1, 1, 1, 2, 5, 17});
    suffix[r] = pick(random, {0, 1, 16, 63, 65, 130, 311});
    first_token[r] = static_cast<int>(view.token_position.size());
    add_tokens(view, r, q_len[r], (node[r] < 0 ? 0 : prefix[node[r]]) + suffix[r]);
  }
  const auto add_block = [&](const std::vector<int>& requests, int kv_len, int kv_pos_begin,
                             int level) {
    const int first = static_cast<int>(view.row_map.size());
    for (const int r : requests) {
      for (int i = 0; i < q_len[r]; ++i) view.row_map.push_back(first_token[r] + i);
    }
    view.row_blocks.push_back({.first_block = 0,
                               .first_token = first,
                               .num_tokens = static_cast<int>(view.row_map.size()) - first,
                               .kv_len = kv_len,
                               .kv_pos_begin = kv_pos_begin,
                               .level = level});
  };
  for (int j = 0; j < num_nodes; ++j) {
    std::vector<int> requests;
    for (int r = 0; r < n; ++r) {
      if (node[r] == j) requests.push_back(r);
    }
    std::shuffle(requests.begin(), requests.end(), random);
    add_block(requests, prefix[j], 0, 0);
  }
  std::vector<int> order = iota(n);
  std::shuffle(order.begin(), order.end(), random);
  for (const int r : order) {
    if (suffix[r] == 0 && random() % 2 == 0) continue;
    add_block({r}, suffix[r], node[r] < 0 ? 0 : prefix[node[r]], 1);
  }
  return view;
}

inline Visibility random_visibility(Random& random) {
  Visibility v;
  v.causal = random() % 2;
  if (random() % 2) v.window_left = pick(random, {0, 1, 15, 64, 100, 300, 1 << 30});
  if (random() % 2) v.sink_tokens = pick(random, {1, 4, 64, 70, 200});
  return v;
}

inline PlanTarget random_target(Random& random, const BsrView& view) {
  PlanTarget target;
  target.num_ctas = pick(random, {1, 2, 7, 33, 132});
  target.tile_kv = pick(random, {16, 32, 64, 128});
  target.group_size = pick(random, {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 32, 128});
  target.num_kv_heads = pick(random, {1, 2, 3, 8});
  const std::vector<std::vector<int>> shapes = {{128, 64}, {64}, {128, 16}, {16}, {8, 1}};
  const std::vector<int>& tile_q = shapes[random() % shapes.size()];
  target.num_shapes = static_cast<int>(tile_q.size());
  for (int i = 0; i < target.num_shapes; ++i) {
    target.shapes[i] = {.tile_q = tile_q[i],
                        .key_split = 1,
                        .fixed_us = 0.01f * static_cast<float>(random() % 100),
                        .us_per_key = 0.001f * static_cast<float>(1 + random() % 50)};
  }
  target.merge_us = 0.1f * static_cast<float>(random() % 20);
  target.min_split_keys = pick(random, {0, 1, 64, 100, 256});
  target.num_sms = pick(random, {0, 1, 4, 20, 70});
  target.queue_percent = pick(random, {0, 5, 15, 60, 100});
  target.min_queued_keys = pick(random, {0, 1, 64, 200});
  target.min_keys_for_queue = pick(random, {0, 300});
  target.cache_keys = pick(random, {0, 1, 300, 5000, 1 << 20});
  // Flat formats: two partial tiles a CTA; each further level may leave one state of every row.
  const int all_rows =
      static_cast<int>(view.token_position.size()) * target.group_size * target.num_kv_heads;
  target.max_partial_rows =
      2 * target.num_ctas * tile_q[0] + (view.num_levels > 1 ? view.num_levels * all_rows : 0);
  return target;
}

}  // namespace plait::testing
