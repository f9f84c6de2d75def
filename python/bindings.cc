// The extension module plait._plait: the C++ API as it is, tensors by DLPack. python/plait/ puts
// names, defaults and documentation on it.
#include "bindings.h"

NB_MODULE(_plait, m) {
  nanobind::set_leak_warnings(false);  // what modules hold outlives the last collection
  m.doc() = "plait's C++ API; use the package plait";
  plait::python::bind_config(m);
  plait::python::bind_plan(m);
  plait::python::bind_attention(m);
  plait::python::bind_compose(m);
  plait::python::bind_operations(m);
  plait::python::bind_device(m);
  plait::python::bind_tools(m);
}
