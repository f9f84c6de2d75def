// Device memory that C++ objects own. The public calls are in plait/cuda_memory.h.
#pragma once
#include <cstddef>

#include "cuda/device.h"
#include "plait/cuda_memory.h"

namespace plait::cuda {

// Memory of one GPU, 256-byte aligned, contents undefined.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(GpuDevice& device, std::size_t bytes);
  ~DeviceBuffer();  // waits for the device
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  GpuDevice* device_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace plait::cuda
