// Workspace and Attention: plan once a step, run once a layer. The GIL is released while planning,
// compiling and running.
#include "batch_arg.h"
#include "bindings.h"
#include "plait/attention.h"

namespace plait::python {
namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Outputs are given; Python allocates them in the caller's framework.
void run(Attention& attention, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
         nb::handle lse, float sm_scale, float k_scale, float v_scale, nb::handle stream,
         nb::handle variant_args) {
  TensorArg q_arg(q, "q"), k_arg(k, "k"), v_arg(v, "v");
  TensorArg out_arg(out, "out", true), lse_arg(lse, "lse", true);
  RunArgs args{q_arg.view, k_arg.view, v_arg.view, out_arg.view, lse_arg.view, sm_scale,
               k_scale,    v_scale,    {}};
  std::list<TensorArg> tensors;
  if (!variant_args.is_none()) {
    for (auto [key, value] : nb::cast<nb::dict>(variant_args)) {
      VariantArg arg{nb::cast<std::string>(key), 0, {}};
      if (!nb::try_cast(value, arg.number)) {
        check(!value.is_none(), "run: variant argument ", arg.name,
              " is None; give a number or a tensor");
        arg.tensor = tensors.emplace_back(value, arg.name.c_str()).view;
      }
      args.variant_args.push_back(arg);
    }
  }
  Stream stream_handle = stream_of(stream, attention.config().device);
  nb::gil_scoped_release unlocked;
  attention.run(args, stream_handle);
}

void plan(Attention& attention, nb::handle qo_indptr, nb::dict tables, nb::object levels,
          nb::dict queries, nb::handle stream) {
  BatchArg arg;
  const Batch batch = arg.batch(qo_indptr, tables, levels, queries);
  Stream stream_handle = stream_of(stream, attention.config().device);
  nb::gil_scoped_release unlocked;
  attention.plan(batch, stream_handle);
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<Workspace>(m, "Workspace")
      .def(
          "__init__",
          [](Workspace* self, std::pair<int, int> device, long long bytes) {
            new (self) Workspace(Device{device.first, device.second}, bytes);
          },
          "device"_a, "bytes"_a)
      .def(
          "__init__",
          [](Workspace* self, nb::handle buffer) {
            new (self) Workspace(TensorArg(buffer, "buffer", true).view);
          },
          "buffer"_a)
      .def_prop_ro("bytes", &Workspace::bytes)
      .def_prop_ro("device", [](const Workspace& w) { return to_string(w.device()); });

  nb::class_<Attention>(m, "Attention")
      .def(
          "__init__",
          [](Attention* self, const AttentionConfig& config, std::shared_ptr<Workspace> workspace) {
            nb::gil_scoped_release unlocked;
            new (self) Attention(config, std::move(workspace));
          },
          "config"_a, "workspace"_a.none())
      .def_prop_ro("kernel_name", &Attention::kernel_name)
      .def_prop_ro("workspace", &Attention::workspace)
      .def_prop_ro("num_ctas", [](const Attention& a) { return a.target().num_ctas; })
      .def_prop_ro("target", [](const Attention& a) { return target_options(a.target()); })
      .def("plan", &plan, "qo_indptr"_a, "tables"_a, "levels"_a, "queries"_a, "stream"_a.none())
      .def_prop_ro("planned_on_device", &Attention::planned_on_device)
      .def_prop_ro("planned_in_capture", &Attention::planned_in_capture)
      .def("current_plan", [](const Attention& a) { return Plan(a.current_plan()); })
      .def("run", &run, "q"_a, "k"_a, "v"_a.none(), "out"_a, "lse"_a.none(), "sm_scale"_a,
           "k_scale"_a, "v_scale"_a, "stream"_a.none(), "variant_args"_a.none());
}

}  // namespace plait::python
