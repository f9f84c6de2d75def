// Memory on a GPU without a framework: what `--device cuda` uses where torch is not installed.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "plait/cuda_memory.h"
#include "plait/tensor.h"

namespace plait::python {

// A contiguous tensor in memory of its own.
class DeviceArray {
 public:
  DeviceArray(std::vector<int64_t> shape, uint8_t dtype_code, uint8_t dtype_bits, const Device& device);
  TensorView view();  // valid as long as the array
  long long bytes() const { return bytes_; }

 private:
  std::vector<int64_t> shape_;
  uint8_t dtype_code_, dtype_bits_;
  Device device_;
  long long bytes_ = 0;
  std::shared_ptr<void> memory_;
};

}  // namespace plait::python
