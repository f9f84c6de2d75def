#include "formats/mask.h"

#include "host_device/mask_bits.h"

namespace plait {
namespace {

constexpr ArrayName kPacked{"plan", "packed_custom_mask"}, kBools{"plan", "custom_mask"};

// The caller's bits or bools as one dense array.
struct MaskSource {
  const unsigned char* data = nullptr;
  bool bools = false, on_host = true;
  long long size = 0;  // bytes or bools
  ArrayName name = kPacked;
  const TensorView* tensor = nullptr;

  // Bytes or bools of `rows` rows of `keys` keys.
  long long size_of(long long rows, long long keys) const {
    return bools ? rows * keys : (rows * keys + 7) / 8;
  }
  const char* unit() const { return bools ? " bools" : " bytes"; }
};

MaskSource take_source(const MaskTables& tables, const Device& device) {
  MaskSource source;
  source.bools = tables.bools.defined() || tables.bools.data != nullptr;
  const TensorView& tensor = source.bools ? tables.bools : tables.packed;
  source.name = source.bools ? kBools : kPacked;
  source.tensor = &tensor;
  const std::string name = source.name.text();
  const bool right_dtype = tensor.dtype_lanes == 1 && tensor.dtype_bits == 8 &&
                           tensor.dtype_code == (source.bools ? 6 : 1);
  if (!right_dtype) {
    refuse(name, " is ", describe(tensor), "; it must be ",
           source.bools ? "bool (packed bits are packed_custom_mask)"
                        : "uint8 (bools are custom_mask)");
  }
  if (!tensor.on_cpu() && tensor.device() != device) {
    refuse(name, " is on ", to_string(tensor.device()), ", but the work is on ", to_string(device),
           "; give it there or on the cpu");
  }
  source.size = 1;
  for (int i = 0; i < tensor.ndim; ++i) source.size *= tensor.shape[i];
  int64_t dense = 1;
  for (int i = tensor.ndim - 1; i >= 0 && source.size > 0; --i) {
    if (tensor.shape[i] > 1 && tensor.stride(i) != dense) {
      refuse(name, " has stride ", tensor.stride(i), " in dimension ", i,
             "; it must be contiguous, ", dense);
    }
    dense *= tensor.shape[i];
  }
  source.data = reinterpret_cast<const unsigned char*>(tensor.bytes());
  source.on_host = tensor.on_cpu();
  if (source.size > 0 && tensor.data == nullptr) {
    refuse(name, " is ", describe(tensor), " but its pointer is null");
  }
  return source;
}

// 1-D; of one request bools may be [q_len, keys], which a transposed mask is not.
void check_shape(const MaskSource& source, long long num_requests, long long q_len,
                 long long keys) {
  const TensorView& tensor = *source.tensor;
  if (tensor.ndim == 1) return;
  if (source.bools && tensor.ndim == 2 && num_requests == 1) {
    if (tensor.shape[0] == q_len && tensor.shape[1] == keys) return;
    refuse(source.name.text(), " is [", tensor.shape[0], ", ", tensor.shape[1],
           "]; the request has ", q_len, " queries and ", keys, " masked keys, so it must be [",
           q_len, ", ", keys, "]");
  }
  refuse(source.name.text(), " is ", describe(tensor), "; it must be 1-D, request after request",
         source.bools ? " (of one request also [q_len, masked keys])" : "");
}

}  // namespace

void take_mask(const MaskTables& tables, const IndexArray& qo_indptr, const Device& device,
               FormatView& out) {
  MaskView& mask = out.mask;
  mask.tokens.clear();
  mask.words.clear();
  mask.token_source.clear();
  mask.num_words = 0;
  mask.source = nullptr;
  out.view.request_mask_begin.clear();

  const IndexArray indptr(tables.indptr, {"plan", "mask_indptr"}, device);
  const IndexArray first_key(tables.first_masked_key, {"plan", "first_masked_key"}, device);
  const auto given = [](const TensorView& t) { return t.defined() || t.data != nullptr; };
  if (!given(tables.packed) && !given(tables.bools)) {
    if (indptr.given() || first_key.given()) {
      refuse((indptr.given() ? indptr : first_key).name().text(),
             " is given without packed_custom_mask or custom_mask");
    }
    return;
  }
  if (given(tables.packed) && given(tables.bools)) {
    refuse("plan: custom_mask and packed_custom_mask are both given; give one");
  }
  const MaskSource source = take_source(tables, device);
  const long long n = qo_indptr.size() - 1;
  if (indptr.given()) indptr.require_host(n + 1, "one more than there are requests");
  if (first_key.given()) first_key.require_host(n, "one a request");

  mask.tokens.reserve(out.num_query_tokens);
  // Nothing is read of a mask without elements, which has no address either.
  const bool packs_on_device = !source.on_host && source.size > 0;
  if (packs_on_device) {
    mask.source = source.data;
    mask.source_is_bools = source.bools;
    mask.token_source.reserve(out.num_query_tokens);
  }
  long long at = 0;  // of the request, in bytes or bools
  for (long long r = 0; r < n; ++r) {
    const int kv_len = out.request_kv_len[r];
    const long long q_len = qo_indptr[r + 1] - qo_indptr[r];
    const long long begin = first_key.given() ? first_key[r] : 0;
    if (begin < 0 || begin > kv_len) {
      refuse(first_key.at(r), " is ", begin, "; request ", r, " has ", kv_len,
             " keys, so it must be 0 ... ", kv_len);
    }
    const long long keys = kv_len - begin;
    check_shape(source, n, q_len, keys);
    const long long wanted = source.size_of(q_len, keys);
    if (indptr.given()) {
      at = indptr[r];
      if (at < 0 || indptr[r + 1] - at != wanted) {
        refuse(indptr.at(r), " and [", r + 1, "] are ", at, " and ", indptr[r + 1],
               ", but request ", r, " has ", q_len, " queries and ", keys, " masked keys: ", wanted,
               source.unit());
      }
    }
    if (at + wanted > source.size) {
      refuse(source.name.text(), " has ", source.size, source.unit(), ", but request ", r, " with ",
             q_len, " queries and ", keys, " masked keys needs it to have ", at + wanted);
    }
    const long long first = source.bools ? at : at * 8;
    for (long long i = 0; i < q_len; ++i) {
      mask.tokens.push_back({mask.num_words, static_cast<int>(begin), kv_len});
      mask.num_words += mask_row_words(static_cast<int>(begin), kv_len);
      if (packs_on_device) mask.token_source.push_back(first + i * keys);
    }
    if (!packs_on_device) {
      mask.words.reserve(mask.num_words);
      for (long long i = 0; i < q_len; ++i) {
        const int b = static_cast<int>(begin);
        const int first_word = b >> 5, end_word = first_word + mask_row_words(b, kv_len);
        for (int word = first_word; word < end_word; ++word) {
          mask.words.push_back(
              source.bools ? pack_mask_bools(source.data, first + i * keys, b, kv_len, word)
                           : pack_mask_bits(source.data, first + i * keys, b, kv_len, word));
        }
      }
    }
    out.view.request_mask_begin.push_back(static_cast<int>(begin));
    at += wanted;
  }
  const long long end = indptr.given() ? indptr[n] : at;
  if (end != source.size) {
    refuse(source.name.text(), " has ", source.size, source.unit(), ", but ",
           indptr.given() ? "mask_indptr ends at " : "the requests' masks are ", end);
  }
}

void take_positions(const TensorView& q_positions, const Device& device,
                    std::vector<int>& token_position) {
  const IndexArray positions(q_positions, {"plan", "q_positions"}, device);
  if (!positions.given()) return;
  positions.require_host(static_cast<long long>(token_position.size()), "one a query token");
  constexpr long long kMost = 1 << 30;  // the planner's: sums of two stay within int
  for (long long i = 0; i < positions.size(); ++i) {
    const long long position = positions[i];
    if (position < -kMost || position >= kMost) {
      refuse(positions.at(i), " is ", position, "; it must be ", -kMost, " ... ", kMost - 1);
    }
    token_position[i] = static_cast<int>(position);
  }
}

}  // namespace plait
