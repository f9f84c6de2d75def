// A small batch with everything awkward about it, for tests of the plain kernel, and the meaning of
// attention over it in float64: written from the view's definition (plan_data.h), with nothing of
// the kernels in it but the storage types.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "host_device/config.h"
#include "host_device/convert.h"
#include "plait/plan.h"

namespace plait::test {

struct Shape {
  int num_kv_heads = 2, group_size = 3, head_dim_qk = 24, head_dim_vo = 40;
  bool affine = false;
  int page_size = 3;
};

// Storage T filled with floats in [-1, 1), seen as double.
template <class T>
struct Values {
  std::vector<T> data;
  explicit Values(std::size_t size) : data(size) {}
  void randomise(std::mt19937& random) {
    for (T& x : data) {
      x = from_float<T>(static_cast<float>(random() % 65536) / 32768.0f - 1.0f);
    }
  }
  double operator[](std::size_t i) const { return to_float(data[i]); }
};

// One list of keys: K and V rows (slots of the cache) in order.
struct KeyList {
  std::vector<int> slots;
};

template <class T, class Kv = T>
struct Case {
  Shape shape;
  Visibility visible;
  float sm_scale = 0.3f, k_scale = 1, v_scale = 1;
  BsrView view;
  std::vector<int> pages;     // !affine: block lists one after the other
  bool device_lists = false;  // they are found as on the device: through list_begin, strided, int64
  std::vector<KeyList> lists;  // of each row block
  // Of every list, also those that no row block has: the shared one (if any), then by request.
  std::vector<int> page_indptr{0}, first_row, list_len;
  int num_slots = 0;      // of the cache: pages * page_size, or rows
  Values<T> q{0};         // [tokens, qo heads, qk]
  Values<Kv> k{0}, v{0};  // [slots, kv heads, qk | vo]

  int num_tokens() const { return static_cast<int>(view.token_request.size()); }
  int num_qo_heads() const { return shape.num_kv_heads * shape.group_size; }
};

// Requests of the given query and key lengths. `shared_keys` > 0: a level more, in front, whose one
// row block holds the tokens of all requests (through a row map, in reverse order of requests).
template <class T, class Kv = T>
Case<T, Kv> make_case(const Shape& shape, const Visibility& visible, const std::vector<int>& q_lens,
                      const std::vector<int>& kv_lens, int shared_keys, unsigned seed) {
  std::mt19937 random(seed);
  Case<T, Kv> c;
  c.shape = shape;
  c.visible = visible;
  BsrView& view = c.view;
  view.num_requests = static_cast<int>(q_lens.size());
  view.num_levels = shared_keys > 0 ? 2 : 1;
  std::vector<int> first_token;
  for (int r = 0; r < view.num_requests; ++r) {
    first_token.push_back(c.num_tokens());
    for (int i = 0; i < q_lens[r]; ++i) {
      view.token_request.push_back(r);
      view.token_position.push_back(shared_keys + kv_lens[r] - q_lens[r] + i);
    }
  }
  const auto list_lens = [&] {
    std::vector<int> lens;
    if (shared_keys > 0) lens.push_back(shared_keys);
    lens.insert(lens.end(), kv_lens.begin(), kv_lens.end());
    return lens;
  }();
  // Cache: a shuffled page for each, with spare pages that nobody owns between them.
  std::vector<int> free_pages;
  const int page_size = shape.affine ? 1 : shape.page_size;
  int pages_wanted = 5;
  for (const int len : list_lens) pages_wanted += (len + page_size - 1) / page_size + 2;
  for (int i = 0; i < pages_wanted; ++i) free_pages.push_back(i);
  if (!shape.affine) std::shuffle(free_pages.begin(), free_pages.end(), random);
  c.num_slots = pages_wanted * page_size;
  std::size_t next_page = 3;
  const auto add_list = [&](int len, int level, int token, int tokens, int position) {
    RowBlock block{};
    block.first_block = shape.affine ? free_pages[next_page] : static_cast<i64>(c.pages.size());
    block.first_token = token;
    block.num_tokens = tokens;
    block.kv_len = len;
    block.kv_pos_begin = position;
    block.level = level;
    KeyList list;
    for (int i = 0; i < len; i += page_size) {
      const int page = free_pages[next_page++];
      c.pages.push_back(page);
      for (int j = i; j < i + page_size && j < len; ++j) {
        list.slots.push_back(page * page_size + j - i);
      }
    }
    next_page += 1;
    c.page_indptr.push_back(static_cast<int>(c.pages.size()));
    c.first_row.push_back(static_cast<int>(block.first_block));
    c.list_len.push_back(len);
    if (tokens == 0) return;
    view.row_blocks.push_back(block);
    c.lists.push_back(list);
  };
  if (shared_keys > 0) {
    for (int r = view.num_requests - 1; r >= 0; --r) {
      for (int i = 0; i < q_lens[r]; ++i) view.row_map.push_back(first_token[r] + i);
    }
    add_list(shared_keys, 0, 0, c.num_tokens(), 0);
    for (int i = 0; i < c.num_tokens(); ++i) view.row_map.push_back(i);
  }
  for (int r = 0; r < view.num_requests; ++r) {
    const int base = shared_keys > 0 ? c.num_tokens() : 0;
    add_list(kv_lens[r], view.num_levels - 1, base + first_token[r], q_lens[r], shared_keys);
  }

  const std::size_t slots = c.num_slots, heads = shape.num_kv_heads;
  c.q = Values<T>(static_cast<std::size_t>(c.num_tokens()) * c.num_qo_heads() * shape.head_dim_qk);
  c.k = Values<Kv>(slots * heads * shape.head_dim_qk);
  c.v = Values<Kv>(slots * heads * shape.head_dim_vo);
  c.q.randomise(random);
  c.k.randomise(random);
  c.v.randomise(random);
  // NaN wherever no list has a key.
  std::vector<bool> owned(slots);
  for (const KeyList& list : c.lists) {
    for (const int slot : list.slots) owned[slot] = true;
  }
  const Kv nan = from_float<Kv>(std::numeric_limits<float>::quiet_NaN());
  for (std::size_t s = 0; s < slots; ++s) {
    if (owned[s]) continue;
    std::fill_n(c.k.data.begin() + s * heads * shape.head_dim_qk, heads * shape.head_dim_qk, nan);
    std::fill_n(c.v.data.begin() + s * heads * shape.head_dim_vo, heads * shape.head_dim_vo, nan);
  }
  return c;
}

// What the reference does to rows, logits and outputs; the identity by default.
struct PlainMeaning {
  bool use_softmax = true;
  double logit(double x, int /*q_pos*/, int /*k_pos*/, int /*qo_head*/) const { return x; }
  bool sees(int /*q_pos*/, int /*k_pos*/) const { return true; }
  void query(std::vector<double>&, int /*position*/) const {}
  void key(std::vector<double>&, int /*position*/) const {}
  void value(std::vector<double>&) const {}
  double output(double x, int /*dim*/) const { return x; }
};

struct Expected {
  std::vector<double> out;  // [tokens, qo heads, vo]
  std::vector<double> lse;  // [tokens, qo heads]
};

template <class T, class Kv, class Meaning>
Expected reference(const Case<T, Kv>& c, const Meaning& meaning) {
  const Shape& s = c.shape;
  const int heads = c.num_qo_heads(), dqk = s.head_dim_qk, dvo = s.head_dim_vo;
  Expected e;
  e.out.assign(static_cast<std::size_t>(c.num_tokens()) * heads * dvo, 0.0);
  e.lse.assign(static_cast<std::size_t>(c.num_tokens()) * heads,
               -std::numeric_limits<double>::infinity());
  for (int token = 0; token < c.num_tokens(); ++token) {
    for (int h = 0; h < heads; ++h) {
      const int kv_head = h / s.group_size, q_pos = c.view.token_position[token];
      std::vector<double> q(dqk);
      for (int i = 0; i < dqk; ++i)
        q[i] = c.q[(static_cast<std::size_t>(token) * heads + h) * dqk + i];
      meaning.query(q, q_pos);
      std::vector<double> logits;
      std::vector<std::vector<double>> values;
      for (std::size_t b = 0; b < c.view.row_blocks.size(); ++b) {
        const RowBlock& block = c.view.row_blocks[b];
        bool inside = false;
        for (int i = 0; i < block.num_tokens; ++i) {
          const int row = block.first_token + i;
          inside |= (c.view.row_map.empty() ? row : c.view.row_map[row]) == token;
        }
        if (!inside) continue;
        for (int j = 0; j < block.kv_len; ++j) {
          const int k_pos = block.kv_pos_begin + j;
          const Visibility& v = c.visible;
          const bool in_window =
              v.window_left < 0 || k_pos >= q_pos - v.window_left || k_pos < v.sink_tokens;
          if ((v.causal && k_pos > q_pos) || !in_window || !meaning.sees(q_pos, k_pos)) continue;
          const std::size_t row =
              static_cast<std::size_t>(c.lists[b].slots[j]) * s.num_kv_heads + kv_head;
          std::vector<double> k(dqk), x(dvo);
          for (int i = 0; i < dqk; ++i) k[i] = c.k[row * dqk + i] * c.k_scale;
          for (int i = 0; i < dvo; ++i) x[i] = c.v[row * dvo + i] * c.v_scale;
          meaning.key(k, k_pos);
          meaning.value(x);
          double dot = 0;
          for (int i = 0; i < dqk; ++i) dot += q[i] * k[i];
          logits.push_back(meaning.logit(c.sm_scale * dot, q_pos, k_pos, h));
          values.push_back(x);
        }
      }
      double* out = e.out.data() + (static_cast<std::size_t>(token) * heads + h) * dvo;
      double max_logit = -std::numeric_limits<double>::infinity(), sum = 0;
      for (const double x : logits) max_logit = std::max(max_logit, x);
      for (std::size_t j = 0; j < logits.size(); ++j) {
        const double w = meaning.use_softmax ? std::exp(logits[j] - max_logit) : logits[j];
        sum += w;
        for (int i = 0; i < dvo; ++i) out[i] += w * values[j][i];
      }
      const bool empty = meaning.use_softmax && logits.empty();
      for (int i = 0; i < dvo && !empty; ++i) {
        out[i] = meaning.output(meaning.use_softmax ? out[i] / sum : out[i], i);
      }
      if (!empty) e.lse[static_cast<std::size_t>(token) * heads + h] = max_logit + std::log(sum);
    }
  }
  return e;
}

}  // namespace plait::test
