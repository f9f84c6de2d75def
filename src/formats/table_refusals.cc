#include "formats/table_refusals.h"

#include <initializer_list>
#include <utility>

namespace plait {

void refuse_given(const TensorView& tensor, const ArrayName& name, const char* why) {
  if (tensor.defined()) refuse(name.text(), " is given, but ", why);
}

void refuse_unread_tables(const KvTables& tables, const KvFormat& format, const char* where,
                          int level) {
  using Named = std::pair<const char*, const TensorView*>;
  const auto refuse_each = [&](const char* why, std::initializer_list<Named> arrays) {
    for (const auto& [name, tensor] : arrays) refuse_given(*tensor, {where, name, level}, why);
  };
  const Named request_map{"request_map", &tables.request_map};
  const Named page_indptr{"kv_page_indptr", &tables.kv_page_indptr};
  const Named page_indices{"kv_page_indices", &tables.kv_page_indices};
  const Named last_page_len{"kv_last_page_len", &tables.kv_last_page_len};
  if (format.kind == KvFormat::kRagged) {
    refuse_each("it has no meaning for ragged K and V", {page_indptr,
                                                         page_indices,
                                                         last_page_len,
                                                         {"block_table", &tables.block_table},
                                                         request_map});
    return;
  }
  refuse_each("it has no meaning for paged K and V",
              {{"kv_indptr", &tables.kv_indptr}, {"kv_begin", &tables.kv_begin}});
  if (tables.block_table.defined()) {
    refuse_each("it has no meaning beside block_table", {page_indptr, page_indices, last_page_len});
  } else {
    refuse_each("it has no meaning without block_table", {request_map});
  }
}

void check_block_table(const TensorView& tensor, const ArrayName& name, const Device& device) {
  if (tensor.ndim != 2) {
    refuse(name.text(), " is ", describe(tensor), "; it must be 2-D: [rows, max blocks]");
  }
  check_index_tensor(tensor, name, device);
}

}  // namespace plait
