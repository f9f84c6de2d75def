// The index arrays of a batch as Python gives them. Owns the borrowed arguments of one call.
#pragma once
#include <list>
#include <string>

#include "plait/kv_format.h"
#include "tensor_arg.h"

namespace plait::python {

class BatchArg {
 public:
  // tables: dict of the names of KvTables to tensors; None: not given. Throws ValueError for a name
  // that is none of them.
  KvTables tables(nb::dict tables, const std::string& where);
  // levels: a list of (node_indptr, node_requests, tables), or ComposedLevels, which the caller
  // keeps alive. queries: by name, what a batch says of single queries: packed_custom_mask,
  // custom_mask, mask_indptr, first_masked_key, q_positions.
  Batch batch(nb::handle qo_indptr, nb::dict tables, nb::handle levels, nb::dict queries);

 private:
  const TensorView& take(nb::handle object, const std::string& name);
  std::list<TensorArg> args_;  // a list: views point into their argument
};

}  // namespace plait::python
