// Names the index arrays of a batch, so that errors can.
#include "batch_arg.h"

#include "plait/compose_radix.h"

namespace plait::python {

const TensorView& BatchArg::take(nb::handle object, const std::string& name) {
  return args_.emplace_back(object, name.c_str()).view;
}

KvTables BatchArg::tables(nb::dict tables, const std::string& where) {
  KvTables out;
  const struct {
    const char* name;
    TensorView* view;
  } fields[] = {{"kv_len", &out.kv_len},
                {"kv_indptr", &out.kv_indptr},
                {"kv_begin", &out.kv_begin},
                {"kv_page_indptr", &out.kv_page_indptr},
                {"kv_page_indices", &out.kv_page_indices},
                {"kv_last_page_len", &out.kv_last_page_len},
                {"block_table", &out.block_table},
                {"request_map", &out.request_map}};
  for (auto [key, value] : tables) {
    const std::string name = nb::cast<std::string>(key);
    bool known = false;
    for (const auto& field : fields) {
      if (name != field.name) continue;
      *field.view = take(value, where + name);
      known = true;
    }
    check(known, where, name,
          " is no table; taken are kv_len, kv_indptr, kv_begin, kv_page_indptr, "
          "kv_page_indices, kv_last_page_len, block_table, request_map");
  }
  return out;
}

Batch BatchArg::batch(nb::handle qo_indptr, nb::dict kv, nb::handle levels, nb::dict queries) {
  Batch batch;
  batch.qo_indptr = take(qo_indptr, "qo_indptr");
  batch.kv = tables(kv, "");
  if (nb::isinstance<ComposedLevels>(levels)) {
    const auto& composed = nb::cast<const ComposedLevels&>(levels);
    batch.levels = composed.levels();
    batch.nodes = composed.nodes();
  } else {
    size_t i = 0;
    for (nb::handle entry : levels) {
      const std::string where = concat("levels[", i++, "].");
      nb::tuple level = nb::cast<nb::tuple>(entry);
      batch.levels.push_back({tables(nb::cast<nb::dict>(level[2]), where),
                              take(level[0], where + "node_indptr"),
                              take(level[1], where + "node_requests")});
    }
  }
  const auto query = [&](const char* name, TensorView& to) {
    if (queries.contains(name)) to = take(queries[name], name);
  };
  query("packed_custom_mask", batch.mask.packed);
  query("custom_mask", batch.mask.bools);
  query("mask_indptr", batch.mask.indptr);
  query("first_masked_key", batch.mask.first_masked_key);
  query("q_positions", batch.q_positions);
  return batch;
}

}  // namespace plait::python
