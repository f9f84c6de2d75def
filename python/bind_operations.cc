// The operations beside attention: merging states, writing new tokens into a cache.
#include "batch_arg.h"
#include "bindings.h"
#include "plait/attention.h"

namespace plait::python {
namespace nb = nanobind;
using namespace nb::literals;

void bind_operations(nb::module_& m) {
  m.def(
      "merge_states",
      [](nb::handle v, nb::handle lse, nb::handle out, nb::handle out_lse, nb::handle stream,
         bool lse_base2) {
        TensorArg v_arg(v, "v"), lse_arg(lse, "lse");
        TensorArg out_arg(out, "out", true), out_lse_arg(out_lse, "out_lse", true);
        Stream stream_handle = stream_of(stream, v_arg.view.device());
        nb::gil_scoped_release unlocked;
        merge_states(v_arg.view, lse_arg.view, out_arg.view, out_lse_arg.view, stream_handle,
                     lse_base2);
      },
      "v"_a, "lse"_a, "out"_a, "out_lse"_a, "stream"_a.none(), "lse_base2"_a);
  m.def(
      "merge_state",
      [](nb::handle v_a, nb::handle lse_a, nb::handle v_b, nb::handle lse_b, nb::handle out,
         nb::handle out_lse, nb::handle stream, bool lse_base2) {
        TensorArg v_a_arg(v_a, "v_a"), lse_a_arg(lse_a, "lse_a");
        TensorArg v_b_arg(v_b, "v_b"), lse_b_arg(lse_b, "lse_b");
        TensorArg out_arg(out, "out", true), out_lse_arg(out_lse, "out_lse", true);
        Stream stream_handle = stream_of(stream, v_a_arg.view.device());
        nb::gil_scoped_release unlocked;
        merge_state(v_a_arg.view, lse_a_arg.view, v_b_arg.view, lse_b_arg.view, out_arg.view,
                    out_lse_arg.view, stream_handle, lse_base2);
      },
      "v_a"_a, "lse_a"_a, "v_b"_a, "lse_b"_a, "out"_a, "out_lse"_a, "stream"_a.none(),
      "lse_base2"_a);
  m.def(
      "append_kv",
      [](const KvFormat& kv, nb::handle k_new, nb::handle v_new, nb::handle k_cache,
         nb::handle v_cache, nb::handle slot_mapping, nb::handle batch_indices,
         nb::handle positions, nb::dict tables, const std::optional<std::string>& kv_dtype,
         float k_scale, float v_scale, nb::handle stream) {
        TensorArg k_new_arg(k_new, "k_new"), v_new_arg(v_new, "v_new");
        TensorArg k_arg(k_cache, "k_cache", true), v_arg(v_cache, "v_cache", true);
        TensorArg slots(slot_mapping, "slot_mapping"), rows(batch_indices, "batch_indices");
        TensorArg positions_arg(positions, "positions");
        BatchArg table_args;
        AppendArgs args{kv,         k_new_arg.view,     v_new_arg.view,
                        k_arg.view, v_arg.view,         slots.view,
                        rows.view,  positions_arg.view, table_args.tables(tables, "")};
        if (kv_dtype) args.kv_dtype = parse_dtype(*kv_dtype);
        args.k_scale = k_scale;
        args.v_scale = v_scale;
        Stream stream_handle = stream_of(stream, k_arg.view.device());
        nb::gil_scoped_release unlocked;
        append_kv(args, stream_handle);
      },
      "kv"_a, "k_new"_a, "v_new"_a, "k_cache"_a, "v_cache"_a.none(), "slot_mapping"_a.none(),
      "batch_indices"_a.none(), "positions"_a.none(), "tables"_a, "kv_dtype"_a.none(), "k_scale"_a,
      "v_scale"_a, "stream"_a.none());
}

}  // namespace plait::python
