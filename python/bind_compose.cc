// compose_radix, from a radix tree or from block hashes; its levels as arrays, for those who look.
#include "batch_arg.h"
#include "bindings.h"
#include "plait/attention.h"
#include "plait/compose_radix.h"

namespace plait::python {
namespace nb = nanobind;
using namespace nb::literals;

namespace {

RadixOptions options_of(const Attention& attention, int max_levels) {
  return {attention.config().kv, attention.target(), attention.config().variant.visible,
          max_levels};
}

ComposedLevels compose_tree(const Attention& attention, nb::handle qo_indptr,
                            nb::handle node_parent, nb::handle request_node, nb::dict tables,
                            int max_levels) {
  BatchArg arg;
  TensorArg queries(qo_indptr, "qo_indptr"), parent(node_parent, "node_parent");
  TensorArg node(request_node, "request_node");
  const RadixTree tree{parent.view, arg.tables(tables, ""), node.view};
  nb::gil_scoped_release unlocked;
  return compose_radix(tree, queries.view, options_of(attention, max_levels));
}

ComposedLevels compose_hashes(const Attention& attention, nb::handle qo_indptr,
                              nb::handle hash_indptr, nb::handle hash_ids, nb::handle hashed_len,
                              int block_tokens, nb::dict tables, int max_levels) {
  BatchArg arg;
  TensorArg queries(qo_indptr, "qo_indptr"), indptr(hash_indptr, "hash_indptr");
  TensorArg ids(hash_ids, "hash_ids"), hashed(hashed_len, "hashed_len");
  const BlockHashes hashes{indptr.view, ids.view, hashed.view, block_tokens,
                           arg.tables(tables, "")};
  nb::gil_scoped_release unlocked;
  return compose_radix(hashes, queries.view, options_of(attention, max_levels));
}

// A level as plait.Level takes it: (node_indptr, node_requests, tables), arrays as (bytes, width).
nb::list levels_of(const ComposedLevels& composed) {
  const auto bytes = [](const TensorView& view) -> nb::object {
    if (!view.defined()) return nb::none();
    const int width = view.dtype_bits / 8;
    return nb::make_tuple(nb::bytes(view.data, view.shape[0] * width), width);
  };
  nb::list out;
  for (const KvLevel& level : composed.levels()) {
    nb::dict tables;
    tables["kv_len"] = bytes(level.tables.kv_len);
    tables["kv_page_indptr"] = bytes(level.tables.kv_page_indptr);
    tables["kv_page_indices"] = bytes(level.tables.kv_page_indices);
    tables["kv_begin"] = bytes(level.tables.kv_begin);
    out.append(nb::make_tuple(bytes(level.node_indptr), bytes(level.node_requests), tables));
  }
  return out;
}

}  // namespace

void bind_compose(nb::module_& m) {
  nb::class_<ComposedLevels>(m, "ComposedLevels")
      .def_prop_ro("levels", &levels_of)
      .def_prop_ro("nodes", [](const ComposedLevels& composed) {
        return nb::bytes(composed.nodes().data(), composed.nodes().size() * sizeof(NodeChoice));
      });
  m.def("compose_tree", &compose_tree, "attention"_a, "qo_indptr"_a, "node_parent"_a.none(),
        "request_node"_a.none(), "tables"_a, "max_levels"_a);
  m.def("compose_hashes", &compose_hashes, "attention"_a, "qo_indptr"_a, "hash_indptr"_a,
        "hash_ids"_a, "hashed_len"_a.none(), "block_tokens"_a, "tables"_a, "max_levels"_a);
}

}  // namespace plait::python
