// How Python objects become the library's arguments: a tensor of any framework as a TensorView, and
// a stream. Everything here is done under the GIL; the views are then read without it.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>  // without it nb::cast<std::string> compiles, and throws

#include "plait/attention.h"
#include "plait/error.h"
#include "plait/tensor.h"

namespace plait::python {

namespace nb = nanobind;

// A tensor argument for the time of one call. Three ways in, the fast ones first:
//   DLPack's C exchange table on the type (torch):   borrowed, 20 ns;
//   __array_struct__ (NumPy):                        borrowed, 0.1 us;
//   __dlpack__ or the buffer protocol (any other):   nanobind keeps the memory alive.
// The caller's frame holds the object itself. Not copyable: `view` points into it.
class TensorArg {
 public:
  TensorArg() = default;  // not given
  // None: not given. Throws TypeError naming `name` for what is no tensor, and ValueError for a
  // scalar and for a read-only one where `writable` is asked for.
  TensorArg(nb::handle object, const char* name, bool writable = false);
  TensorArg(const TensorArg&) = delete;
  TensorArg& operator=(const TensorArg&) = delete;

  TensorView view;

 private:
  static constexpr int kMaxNdim = 8;
  void read(nb::handle object, const char* name, bool writable);
  bool from_exchange_api(nb::handle object);
  bool from_array_struct(nb::handle object, const char* name, bool writable);

  nb::object keeper_;          // NumPy's description
  nb::ndarray<nb::ro> array_;  // the slow way
  int64_t strides_[kMaxNdim];  // NumPy counts them in bytes
};

// stream=: an integer handle, an object with `cuda_stream` (torch) or `__cuda_stream__`, or None:
// torch's current stream of `device` where torch has initialised CUDA, else the default stream.
// Throws ValueError for a stream on the CPU.
Stream stream_of(nb::handle stream, const Device& device);

}  // namespace plait::python
