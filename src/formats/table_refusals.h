// What is refused of the arrays of KvTables whoever reads them: plan() on the host and on the
// device (key_lists.cc, device_lengths.cc), and append_kv.
#pragma once
#include "formats/index_array.h"
#include "plait/kv_format.h"

namespace plait {

// "plan: kv_begin is given, but `why`", if it is given.
void refuse_given(const TensorView& tensor, const ArrayName& name, const char* why);

// Arrays that nobody would read: those of another kind of tables than `format` and the arrays
// beside them make these. What must be given is the reader's to say.
void refuse_unread_tables(const KvTables& tables, const KvFormat& format, const char* where,
                          int level = -1);

// A block_table is 2-D: [rows, max blocks], and an index tensor.
void check_block_table(const TensorView& tensor, const ArrayName& name, const Device& device);

}  // namespace plait
