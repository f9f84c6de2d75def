#include "formats/key_lists.h"

#include <climits>

#include "formats/table_refusals.h"

namespace plait {
namespace {

// Every form of the message ends in what the caller may do about it.
constexpr char kOneEach[] = "one entry a request or node";
constexpr char kIndptrSize[] = "one more than there are requests or nodes";

struct Extremes {
  long long low = 0, high = -1;
};

// Copies n indices as int32 and finds their range; the two dense cases vectorise.
template <class Int>
Extremes copy_dense(const Int* in, int n, int* out) {
  Int low = 0, high = -1;
  for (int i = 0; i < n; ++i) {
    const Int x = in[i];
    low = x < low ? x : low;
    high = x > high ? x : high;
    out[i] = static_cast<int>(x);
  }
  return {low, high};
}

constexpr long long kMaxRow = 1LL << 48;  // so that sums of rows cannot overflow

long long load(const char* p, bool wide) {
  return wide ? *reinterpret_cast<const int64_t*>(p) : *reinterpret_cast<const int32_t*>(p);
}

}  // namespace

KeyLists::KeyLists(const KvFormat& format, const KvTables& tables, long long num_lists,
                   const char* list_word, int level, const Device& device, const char* where)
    : page_size_(format.page_size),
      level_(level),
      list_word_(list_word),
      where_(where),
      device_(device) {
  refuse_unread_tables(tables, format, where, level);
  kv_len_ = IndexArray(tables.kv_len, name("kv_len"), device);
  if (kv_len_.given()) kv_len_.require_host(num_lists, kOneEach);
  if (format.kind == KvFormat::kRagged) {
    take_ragged(tables, num_lists);
  } else if (tables.block_table.defined()) {
    take_padded(tables, num_lists);
  } else {
    take_csr(tables, num_lists);
  }
}

void KeyLists::take_ragged(const KvTables& tables, long long num_lists) {
  if (tables.kv_indptr.defined()) {
    refuse_given(tables.kv_begin, name("kv_begin"), "it has no meaning beside kv_indptr");
    kind_ = kIndptr;
    indptr_ = IndexArray(tables.kv_indptr, name("kv_indptr"), device_);
    indptr_.require_host(num_lists + 1, kIndptrSize);
    if (indptr_[0] != 0) {
      refuse(indptr_.at(0), " is ", indptr_[0],
             "; it must be 0 (for rows that start elsewhere give "
             "kv_begin and kv_len)");
    }
    return;
  }
  kind_ = kBegin;
  begin_ = IndexArray(tables.kv_begin, name("kv_begin"), device_);
  if (!begin_.given()) {
    refuse(name("kv_indptr").text(),
           " is missing; ragged K and V need kv_indptr, or kv_begin and "
           "kv_len");
  }
  begin_.require_host(num_lists, kOneEach);
  if (!kv_len_.given()) refuse(kv_len_.name().text(), " is missing; kv_begin needs it");
}

void KeyLists::take_csr(const KvTables& tables, long long num_lists) {
  kind_ = kCsr;
  indptr_ = IndexArray(tables.kv_page_indptr, name("kv_page_indptr"), device_);
  indices_ = IndexArray(tables.kv_page_indices, name("kv_page_indices"), device_);
  last_page_len_ = IndexArray(tables.kv_last_page_len, name("kv_last_page_len"), device_);
  if (!indptr_.given()) {
    refuse(name("kv_page_indptr").text(),
           " is missing; paged K and V need kv_page_indptr and "
           "kv_page_indices, or block_table");
  }
  if (!indices_.given()) refuse(name("kv_page_indices").text(), " is missing");
  indptr_.require_size(num_lists + 1, kIndptrSize);
  pages_on_host_ = indices_.on_host();
  if (!indptr_.on_host()) {
    if (pages_on_host_) {
      refuse(indptr_.name().text(), " is on ", to_string(device_),
             ", but kv_page_indices is on the "
             "cpu; give kv_page_indptr on the cpu too");
    }
    if (last_page_len_.given()) {
      refuse(last_page_len_.name().text(),
             " is given, but lengths cannot be computed from a "
             "kv_page_indptr on the device; pass kv_len on the host instead");
    }
    if (!kv_len_.given()) {
      refuse(name("kv_len").text(),
             " is missing; a kv_page_indptr on the device needs it (on the "
             "host)");
    }
    return;
  }
  if (last_page_len_.given()) {
    last_page_len_.require_host(num_lists, kOneEach);
  } else if (!kv_len_.given()) {
    refuse(name("kv_len").text(), " is missing; give kv_len or kv_last_page_len");
  }
  if (indptr_[0] != 0) refuse(indptr_.at(0), " is ", indptr_[0], "; it must be 0");
}

void KeyLists::take_padded(const KvTables& tables, long long num_lists) {
  kind_ = kPadded;
  block_table_ = tables.block_table;
  check_block_table(block_table_, name("block_table"), device_);
  pages_on_host_ = block_table_.on_cpu();
  if (!kv_len_.given()) refuse(name("kv_len").text(), " is missing; block_table needs it");
  request_map_ = IndexArray(tables.request_map, name("request_map"), device_);
  if (!request_map_.given()) {
    if (block_table_.shape[0] < num_lists) {
      refuse(name("block_table").text(), " has ", block_table_.shape[0], " rows, but there are ",
             num_lists, " ", list_word_, "s; give a row for each, or request_map");
    }
    return;
  }
  request_map_.require_size(num_lists, kOneEach);
  if (pages_on_host_ && !request_map_.on_host()) {
    refuse(request_map_.name().text(), " is on ", to_string(device_),
           ", but block_table is on the "
           "cpu; give request_map on the cpu too");
  }
}

long long KeyLists::csr_pages(long long i) const {
  const long long begin = indptr_[i], end = indptr_[i + 1];
  if (end < begin) [[unlikely]] {
    refuse(indptr_.at(i + 1), " is ", end, ", less than the ", begin, " before it (", list_word_,
           " ", i, ")");
  }
  if (end > indices_.size()) [[unlikely]] {
    refuse(indptr_.at(i + 1), " is ", end, ", but kv_page_indices has ", indices_.size(),
           " entries (", list_word_, " ", i, ")");
  }
  return end - begin;
}

void KeyLists::check_agrees(long long i, long long len, const IndexArray& other) const {
  if (kv_len_.given() && kv_len_[i] != len) [[unlikely]] {
    refuse(kv_len_.at(i), " is ", kv_len_[i], ", but ", other.name().in_level(), " gives ",
           list_word_, " ", i, " ", len, " keys; give one of the two");
  }
}

int KeyLists::kv_len(long long i, int max_keys, const char* limit) const {
  long long len = 0, capacity = LLONG_MAX;  // in pages
  switch (kind_) {
    case kIndptr: {
      const long long begin = indptr_[i], end = indptr_[i + 1];
      if (end < begin) [[unlikely]] {
        refuse(indptr_.at(i + 1), " is ", end, ", less than the ", begin, " before it (",
               list_word_, " ", i, ")");
      }
      if (end > kMaxRow) [[unlikely]] {
        refuse(indptr_.at(i + 1), " is ", end, "; rows of K and V are 0 ... ", kMaxRow);
      }
      len = end - begin;
      check_agrees(i, len, indptr_);
      break;
    }
    case kBegin:
      len = kv_len_[i];
      if (begin_[i] < 0 || begin_[i] > kMaxRow) [[unlikely]] {
        refuse(begin_.at(i), " is ", begin_[i], "; rows of K and V are 0 ... ", kMaxRow);
      }
      break;
    case kCsr:
      if (indptr_.on_host()) capacity = csr_pages(i);
      if (!last_page_len_.given()) {
        len = kv_len_[i];
      } else if (const long long last = last_page_len_[i]; capacity == 0) {
        if (last != 0) [[unlikely]] {
          refuse(last_page_len_.at(i), " is ", last, "; it must be 0, as ", list_word_, " ", i,
                 " has no pages");
        }
        check_agrees(i, len, last_page_len_);
      } else {
        if (last < 1 || last > page_size_) [[unlikely]] {
          refuse(last_page_len_.at(i), " is ", last, "; it must be 1 ... ", page_size_,
                 " (page_size), as ", list_word_, " ", i, " has ", capacity, " pages");
        }
        len = capacity > INT_MAX ? capacity : (capacity - 1) * page_size_ + last;
        check_agrees(i, len, last_page_len_);
      }
      break;
    case kPadded:
      capacity = block_table_.shape[1];
      len = kv_len_[i];
      break;
  }
  if (len < 0 || len > max_keys) [[unlikely]] {
    const std::string what =
        kind_ == kIndptr  ? concat(indptr_.at(i + 1), " - ", indptr_.name().in_level(), "[", i, "]")
        : kv_len_.given() ? kv_len_.at(i)
                          : concat(indptr_.name().text(), ": kv_len of ", list_word_, " ", i);
    refuse(what, " is ", len, "; lengths are 0 ... ", max_keys, " (", limit, ")");
  }
  if (capacity != LLONG_MAX && num_pages(static_cast<int>(len)) > capacity) [[unlikely]] {
    refuse(kv_len_.at(i), " is ", len, ", which takes ", num_pages(static_cast<int>(len)),
           " pages of ", page_size_, ", but ",
           kind_ == kCsr ? indptr_.name().in_level() : name("block_table").in_level(), " gives ",
           list_word_, " ", i, " only ", capacity);
  }
  return static_cast<int>(len);
}

long long KeyLists::row(long long i) const {
  if (!request_map_.given()) return i;
  const long long row = request_map_[i];
  if (row < 0 || row >= block_table_.shape[0]) [[unlikely]] {
    refuse(request_map_.at(i), " is ", row, ", but block_table has ", block_table_.shape[0],
           " rows");
  }
  return row;
}

long long KeyLists::first_block(long long i) const {
  switch (kind_) {
    case kBegin:
      return begin_[i];
    case kIndptr:
      return indptr_[i];
    case kCsr:
      return indptr_.on_host() ? indptr_[i] * indices_.stride() : i * indptr_.stride();
    case kPadded:
      if (request_map_.given() && !request_map_.on_host()) return i * request_map_.stride();
      return row(i) * block_table_.stride(0);
  }
  return 0;
}

BlockTable KeyLists::device_table() const {
  BlockTable table;
  if (affine() || copied()) return table;
  if (kind_ == kCsr) {
    table.indices = indices_.data();
    table.index_bytes = indices_.index_bytes();
    table.stride_block = table.stride_list = indices_.stride();
    if (!indptr_.on_host()) {
      table.list_begin = indptr_.data();
      table.list_begin_bytes = indptr_.index_bytes();
    }
    return table;
  }
  table.indices = block_table_.bytes();
  table.index_bytes = block_table_.dtype_bits / 8;
  table.stride_list = block_table_.stride(0);
  table.stride_block = block_table_.stride(1);
  if (request_map_.given() && !request_map_.on_host()) {
    table.list_begin = request_map_.data();
    table.list_begin_bytes = request_map_.index_bytes();
  }
  return table;
}

const char* KeyLists::page_entry(long long i, long long* stride_bytes, bool* wide) const {
  if (kind_ == kCsr) {
    *wide = indices_.index_bytes() == 8;
    *stride_bytes = indices_.stride() * indices_.index_bytes();
    return indices_.data() + indptr_[i] * *stride_bytes;
  }
  const int bytes = block_table_.dtype_bits / 8;
  *wide = bytes == 8;
  *stride_bytes = block_table_.stride(1) * bytes;
  return block_table_.bytes() + row(i) * block_table_.stride(0) * bytes;
}

int KeyLists::copy_pages(long long i, int first, int n, int* out) const {
  if (n == 0) return -1;
  long long stride;
  bool wide;
  const char* in = page_entry(i, &stride, &wide);
  in += first * stride;
  Extremes range;
  if (!wide && stride == 4) {
    range = copy_dense(reinterpret_cast<const int32_t*>(in), n, out);
  } else if (wide && stride == 8) {
    range = copy_dense(reinterpret_cast<const int64_t*>(in), n, out);
  } else {
    for (int j = 0; j < n; ++j) {
      const long long x = load(in + j * stride, wide);
      range = {x < range.low ? x : range.low, x > range.high ? x : range.high};
      out[j] = static_cast<int>(x);
    }
  }
  if (range.low < 0 || range.high > INT_MAX) [[unlikely]] {
    for (int j = 0; j < n; ++j) {
      const long long x = load(in + j * stride, wide);
      if (x >= 0 && x <= INT_MAX) continue;
      refuse(where_, ": ", page_name(i, first + j), " is ", x, "; page ids are ",
             x < 0 ? ">= 0" : "less than 2^31", " (", list_word_, " ", i, ")");
    }
  }
  return static_cast<int>(range.high);
}

std::string KeyLists::page_name(long long i, long long j) const {
  if (kind_ == kCsr) return concat(indices_.name().in_level(), "[", indptr_[i] + j, "]");
  return concat(name("block_table").in_level(), "[", row(i), ", ", j, "]");
}

std::string KeyLists::last_row_name(long long i) const {
  if (kind_ == kIndptr) return concat(indptr_.name().in_level(), "[", i + 1, "] - 1");
  return concat(begin_.name().in_level(), "[", i, "] + ", kv_len_.name().in_level(), "[", i,
                "] - 1");
}

}  // namespace plait
