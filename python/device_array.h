// Memory on a GPU without a framework: what `--device cuda` uses where torch is not installed.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "plait/cuda_memory.h"
#include "plait/tensor.h"

namespace plait::python {

// A contiguous tensor on a GPU; rows() and reshape() share its memory.
class DeviceArray {
 public:
  // dtype: "float32", "bfloat16", "float16", "float8_e4m3fn",
  // "float8_e5m2", "int32", "int64", "uint8". Throws ArgumentError.
  DeviceArray(std::vector<int64_t> shape, const std::string& dtype, const Device& device);

  TensorView view();  // valid as long as the array
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::string& dtype() const { return dtype_; }
  const Device& device() const { return device_; }
  void* data() const { return data_; }
  long long bytes() const;
  DeviceArray rows(int64_t begin, int64_t end) const;     // of the first dimension
  DeviceArray reshape(std::vector<int64_t> shape) const;  // of as many elements
  void copy_from(const TensorView& host, Stream stream);  // contiguous, of the same shape and dtype
  void copy_to(void* host, Stream stream) const;
  const std::shared_ptr<void>& memory() const { return memory_; }

 private:
  std::vector<int64_t> shape_;
  std::string dtype_;
  uint8_t code_ = 0, bits_ = 0;
  Device device_;
  std::shared_ptr<void> memory_;
  void* data_ = nullptr;
};

}  // namespace plait::python
