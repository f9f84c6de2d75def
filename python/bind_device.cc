// GPU memory and timing for programs without a framework.
#include <functional>

#include "bindings.h"
#include "device_array.h"
#include "plait/cuda_bench.h"
#include "tensor_arg.h"

namespace plait::python {
namespace nb = nanobind;
using namespace nb::literals;

namespace {

Device to_device(std::pair<int, int> device) { return {device.first, device.second}; }

// Python work that gets its stream as an integer.
std::function<void(Stream)> with_stream(nb::callable work) {
  return [work](Stream stream) {
    nb::gil_scoped_acquire locked;
    work(reinterpret_cast<uint64_t>(stream));
  };
}

// DLPack's DLManagedTensor, which a capsule "dltensor" hands over.
struct ManagedTensor {
  TensorView tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};
struct Exported {  // what the receiver keeps alive
  ManagedTensor managed;
  DeviceArray array;
};

nb::object to_dlpack(DeviceArray& array, nb::handle stream) {
  // The receiver reads on its own stream: wait for ours. -1: it does not want that.
  if (stream.is_none() || nb::cast<int64_t>(stream) != -1) synchronize(array.device());
  auto* exported = new Exported{{}, array};
  exported->managed = {exported->array.view(), exported,
                       [](ManagedTensor* self) { delete static_cast<Exported*>(self->manager); }};
  return nb::steal(PyCapsule_New(&exported->managed, "dltensor", [](PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // taken: the receiver deletes it
    auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
  }));
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<DeviceArray>(m, "DeviceArray")
      .def(
          "__init__",
          [](DeviceArray* self, std::vector<int64_t> shape, const std::string& dtype,
             std::pair<int, int> device) {
            new (self) DeviceArray(std::move(shape), dtype, to_device(device));
          },
          "shape"_a, "dtype"_a, "device"_a)
      .def(
          "__init__",  // rows of another one, whose memory they share
          [](DeviceArray* self, const DeviceArray& whole, int64_t begin, int64_t end) {
            new (self) DeviceArray(whole.rows(begin, end));
          },
          "whole"_a, "begin"_a, "end"_a)
      .def(
          "__init__",  // the same memory in another shape
          [](DeviceArray* self, const DeviceArray& whole, std::vector<int64_t> shape) {
            new (self) DeviceArray(whole.reshape(std::move(shape)));
          },
          "whole"_a, "shape"_a)
      .def_prop_ro("shape", [](const DeviceArray& a) { return nb::tuple(nb::cast(a.shape())); })
      .def_prop_ro("dtype", &DeviceArray::dtype)
      .def_prop_ro("device", [](const DeviceArray& a) { return to_string(a.device()); })
      .def_prop_ro("nbytes", &DeviceArray::bytes)
      .def(
          "copy_from",
          [](DeviceArray& a, nb::handle array, nb::handle stream) {
            TensorArg arg(array, "array");
            Stream on = stream_of(stream, a.device());
            nb::gil_scoped_release unlocked;
            a.copy_from(arg.view, on);
          },
          "array"_a, "stream"_a.none())
      .def(
          "copy_to",
          [](const DeviceArray& a, nb::handle array, nb::handle stream) {
            TensorArg arg(array, "array",
                          true);  // made by device_array.py: contiguous, of our size
            Stream on = stream_of(stream, a.device());
            nb::gil_scoped_release unlocked;
            a.copy_to(arg.view.bytes(), on);
          },
          "array"_a, "stream"_a.none())
      .def(
          "fill_bytes",
          [](DeviceArray& a, int value, nb::handle stream) {
            fill_bytes(a.device(), a.data(), value, a.bytes(), stream_of(stream, a.device()));
          },
          "value"_a, "stream"_a.none())
      .def("__dlpack__", &to_dlpack, "stream"_a.none())
      .def("__dlpack_device__",
           [](const DeviceArray& a) { return std::make_pair(a.device().type, a.device().id); });
  m.def(
      "synchronize", [](std::pair<int, int> device) { synchronize(to_device(device)); }, "device"_a,
      nb::call_guard<nb::gil_scoped_release>());

  nb::class_<MemoryReader>(m, "MemoryReader")
      .def(
          "__init__",
          [](MemoryReader* self, std::pair<int, int> device, long long bytes) {
            new (self) MemoryReader(to_device(device), bytes);
          },
          "device"_a, "bytes"_a)
      .def_prop_ro("bytes", &MemoryReader::bytes)
      .def(
          "__call__",
          [](const MemoryReader& reader, uint64_t stream) {
            reader(reinterpret_cast<Stream>(stream));
          },
          "stream"_a);
  nb::class_<CudaTimingOptions>(m, "CudaTimingOptions")
      .def(nb::init<>())
      .def_rw("cold_l2", &CudaTimingOptions::cold_l2)
      .def_rw("calls_a_graph", &CudaTimingOptions::calls_a_graph)
      .def_rw("min_graphs", &CudaTimingOptions::min_graphs)
      .def_rw("warm_seconds", &CudaTimingOptions::warm_seconds)
      .def_rw("min_seconds", &CudaTimingOptions::min_seconds);
  nb::class_<CudaTiming>(m, "CudaTiming")
      .def_ro("median_us", &CudaTiming::median_us)
      .def_ro("min_us", &CudaTiming::min_us)
      .def_ro("max_us", &CudaTiming::max_us)
      .def_ro("reads_us", &CudaTiming::reads_us)
      .def_ro("num_graphs", &CudaTiming::num_graphs);
  // Other Python threads run while graphs do; `work` and the launches are called with the GIL.
  m.def(
      "time_on_gpu",
      [](std::pair<int, int> device, nb::callable work, const CudaTimingOptions& options) {
        const auto call = with_stream(std::move(work));
        nb::gil_scoped_release unlocked;
        return time_on_gpu(to_device(device), call, options);
      },
      "device"_a, "work"_a, "options"_a);
  m.def(
      "time_graphs",
      [](std::pair<int, int> device, nb::callable both, nb::callable reads,
         const CudaTimingOptions& options) {
        const auto launch_both = with_stream(std::move(both));
        const auto launch_reads = with_stream(std::move(reads));
        nb::gil_scoped_release unlocked;
        return time_graphs(to_device(device), launch_both, launch_reads, options);
      },
      "device"_a, "both"_a, "reads"_a, "options"_a);
  m.def(
      "describe_gpu", [](std::pair<int, int> device) { return describe_gpu(to_device(device)); },
      "device"_a);
}

}  // namespace plait::python
