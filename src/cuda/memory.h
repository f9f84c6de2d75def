// Device memory for the host side: workspaces, plans.
#pragma once
#include <cstddef>

#include "cuda/device.h"
#include "plait/tensor.h"

namespace plait {

// 256-byte aligned, contents undefined; 0 bytes give a pointer that may be freed. Makes the device
// current for the call only. Throws ArgumentError (no such device) or Error (no driver, no memory).
void* device_alloc(const Device& device, long long bytes);
void device_free(const Device& device, void* data);  // waits for the device; null is ignored

namespace cuda {

// Owns device memory of one GPU.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(GpuDevice& device, std::size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  GpuDevice* device_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace cuda
}  // namespace plait
