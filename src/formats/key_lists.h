// KeyLists: the KvTables of one level, checked and ready to be read list by list. A list is the
// keys of a request (composed formats: of a node). Used by make_view and compose_radix.
#pragma once
#include "formats/index_array.h"
#include "formats/view.h"

namespace plait {

class KeyLists {
 public:
  // `level` is -1 for a format with one level. Throws ArgumentError for arrays that are missing, of
  // the wrong shape or dtype, or have no meaning beside the others. where: the function that was
  // called.
  KeyLists(const KvFormat& format, const KvTables& tables, long long num_lists,
           const char* list_word, int level, const Device& device, const char* where = "plan");

  // Keys of list i, checked: 0 ... max_keys (which errors call `limit`), with as many pages as they
  // need.
  int kv_len(long long i, int max_keys, const char* limit = "bounds.keys") const;
  int num_pages(int kv_len) const {
    return affine() ? 0 : kv_len / page_size_ + (kv_len % page_size_ != 0);
  }

  bool affine() const { return kind_ == kBegin || kind_ == kIndptr; }
  bool copied() const { return !affine() && pages_on_host_; }  // host tables
  // RowBlock::first_block of list i where nothing is copied: a row of K and V, or a place in the
  // device table.
  long long first_block(long long i) const;
  BlockTable device_table() const;

  // Copies n entries of list i from `first` on to `out` as int32 and returns the largest. Throws
  // for entries that are no page id.
  int copy_pages(long long i, int first, int n, int* out) const;
  // "kv_page_indices[17]": the entry j of list i, or (affine) what names the list's last row.
  std::string page_name(long long i, long long j) const;
  std::string last_row_name(long long i) const;

 private:
  void take_ragged(const KvTables& tables, long long num_lists);
  void take_csr(const KvTables& tables, long long num_lists);
  void take_padded(const KvTables& tables, long long num_lists);
  void check_agrees(long long i, long long len, const IndexArray& other) const;
  long long row(long long i) const;  // of block_table
  long long csr_pages(long long i) const;
  const char* page_entry(long long i, long long* stride_bytes, bool* wide) const;
  ArrayName name(const char* array) const { return {where_, array, level_}; }

  enum Kind { kBegin, kIndptr, kCsr, kPadded } kind_;
  int page_size_ = 1, level_ = -1;
  const char* list_word_;  // "request" or "node"
  const char* where_;
  Device device_;
  bool pages_on_host_ = true;
  IndexArray kv_len_;
  IndexArray begin_;    // kBegin
  IndexArray indptr_;   // kIndptr, kCsr
  IndexArray indices_;  // kCsr
  IndexArray last_page_len_;
  IndexArray request_map_;
  TensorView block_table_;
};

}  // namespace plait
