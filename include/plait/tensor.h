// TensorView: a borrowed tensor, DLPack's DLTensor field for field, and the few questions asked of
// one. Nothing here owns memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "plait/plan_data.h"

namespace plait {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };  // DLPack's codes

struct Device {
  int32_t type = kCpu;
  int32_t id = 0;
  bool operator==(const Device&) const = default;
};

struct TensorView {
  void* data = nullptr;
  int32_t device_type = kCpu;
  int32_t device_id = 0;
  int32_t ndim = 0;
  uint8_t dtype_code = 0;  // 0 int, 1 unsigned, 2 float, 4 bfloat, 10 float8_e4m3fn, 12 _e5m2
  uint8_t dtype_bits = 0;
  uint16_t dtype_lanes = 1;
  int64_t* shape = nullptr;
  int64_t* strides = nullptr;  // in elements; null: contiguous
  uint64_t byte_offset = 0;

  bool defined() const { return ndim > 0; }  // a default TensorView stands for "not given"
  char* bytes() const { return static_cast<char*>(data) + byte_offset; }
  int64_t stride(int dim) const {
    if (strides != nullptr) return strides[dim];
    int64_t stride = 1;
    for (int i = ndim - 1; i > dim; --i) stride *= shape[i];
    return stride;
  }
  bool on_cpu() const { return device_type == kCpu || device_type == kCudaHost; }
  Device device() const {
    return {on_cpu() ? int32_t{kCpu} : device_type, on_cpu() ? 0 : device_id};
  }
};

std::string to_string(Dtype dtype);              // "bfloat16"
std::string to_string(const Device& device);     // "cpu", "cuda:0"
std::string describe(const TensorView& tensor);  // "float32[3, 8, 128] on cuda:0"
Dtype parse_dtype(const std::string& name);      // throws ArgumentError naming what is taken
// The floating-point dtype of a tensor. uint16 stands for bfloat16, which NumPy lacks.
Dtype dtype_of(const TensorView& tensor, const char* name);

}  // namespace plait
