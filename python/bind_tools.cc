// What the command line asks of the library beside attention: what was found on this machine, the
// kernels that plait ships, the cache.
#include "bindings.h"
#include "plait/bench.h"
#include "plait/jit.h"

namespace plait::python {
namespace nb = nanobind;
using namespace nb::literals;

void bind_tools(nb::module_& m) {
  nb::class_<NvrtcInfo>(m, "NvrtcInfo")
      .def_ro("found", &NvrtcInfo::found)
      .def_ro("path", &NvrtcInfo::path)
      .def_ro("major", &NvrtcInfo::major)
      .def_ro("minor", &NvrtcInfo::minor)
      .def_ro("newer_than_driver", &NvrtcInfo::newer_than_driver)
      .def_ro("looked_in", &NvrtcInfo::looked_in);
  nb::class_<HostCompilerInfo>(m, "HostCompilerInfo")
      .def_ro("found", &HostCompilerInfo::found)
      .def_ro("command", &HostCompilerInfo::command)
      .def_ro("version", &HostCompilerInfo::version)
      .def_ro("looked_for", &HostCompilerInfo::looked_for);
  nb::class_<GpuRow>(m, "GpuRow")
      .def_ro("name", &GpuRow::name)
      .def_ro("arch", &GpuRow::arch)
      .def_ro("num_multiprocessors", &GpuRow::num_multiprocessors)
      .def_ro("memory_bytes", &GpuRow::memory_bytes);
  nb::class_<DriverInfo>(m, "DriverInfo")
      .def_ro("found", &DriverInfo::found)
      .def_ro("why_not", &DriverInfo::why_not)
      .def_ro("major", &DriverInfo::major)
      .def_ro("minor", &DriverInfo::minor)
      .def_ro("gpus", &DriverInfo::gpus);
  nb::class_<EnvironmentVariable>(m, "EnvironmentVariable")
      .def_ro("name", &EnvironmentVariable::name)
      .def_ro("meaning", &EnvironmentVariable::meaning)
      .def_ro("fallback", &EnvironmentVariable::fallback)
      .def_ro("value", &EnvironmentVariable::value);
  nb::class_<CompiledKernel>(m, "CompiledKernel")
      .def_ro("kernel", &CompiledKernel::kernel)
      .def_ro("arch", &CompiledKernel::arch)
      .def_ro("seconds", &CompiledKernel::seconds)
      .def_ro("registers", &CompiledKernel::registers)
      .def_ro("spill_bytes", &CompiledKernel::spill_bytes)
      .def_ro("smem_bytes", &CompiledKernel::smem_bytes)
      .def_ro("error", &CompiledKernel::error);
  nb::class_<TileRow>(m, "TileRow")
      .def_ro("kernel", &TileRow::kernel)
      .def_ro("tile_q", &TileRow::tile_q)
      .def_ro("num_warps", &TileRow::num_warps)
      .def_ro("ctas_per_sm", &TileRow::ctas_per_sm)
      .def_ro("smem_bytes", &TileRow::smem_bytes)
      .def_ro("registers", &TileRow::registers)
      .def_ro("wanted_registers", &TileRow::wanted_registers)
      .def_ro("spill_bytes", &TileRow::spill_bytes)
      .def_ro("clocks_per_key", &TileRow::clocks_per_key)
      .def_ro("chosen", &TileRow::chosen);
  nb::class_<BenchRow>(m, "BenchRow")
      .def_ro("case_name", &BenchRow::case_name)
      .def_ro("metric", &BenchRow::metric)
      .def_ro("value", &BenchRow::value)
      .def_ro("unit", &BenchRow::unit);
  m.def("bench_plan", &bench_plan, nb::call_guard<nb::gil_scoped_release>());
  m.def("bench_balance", &bench_balance, nb::call_guard<nb::gil_scoped_release>());
  m.def("copy_bandwidth", &copy_bandwidth, nb::call_guard<nb::gil_scoped_release>());
  m.def("add_nvrtc_search_dirs", &add_nvrtc_search_dirs, "dirs"_a);
  m.def("nvrtc_info", &nvrtc_info);
  m.def("host_compiler_info", &host_compiler_info);
  m.def("driver_info", &driver_info);
  m.def("environment_variables", &environment_variables);
  m.def("cache_dir", &cache_dir);
  m.def("cache_dir_reason", &cache_dir_reason);
  m.def("clear_cache", &clear_cache);
  m.def("shipped_architectures", &shipped_architectures);
  m.def("tile_table", &tile_table, "arch"_a, "head_dim_qk"_a, "head_dim_vo"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("compile_shipped", &compile_shipped, "arch"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace plait::python
