#include "cuda/memory.h"

#include <utility>

#include "plait/error.h"

namespace plait {
namespace {

void* allocate(cuda::GpuDevice& device, std::size_t bytes) {
  const cuda::CurrentDevice current(device);
  cuda::DevicePtr data = 0;
  const int error = cuda::driver().MemAlloc(&data, bytes > 0 ? bytes : 1);
  if (error == cuda::kErrorOutOfMemory) {
    std::size_t free = 0, total = 0;
    cuda::driver().MemGetInfo(&free, &total);
    fail("cuda:", device.id(), ": no memory for ", bytes, " bytes; ", free, " of ", total,
         " are free");
  }
  cuda::check_cuda(error, "cuMemAlloc");
  return reinterpret_cast<void*>(data);
}

// Called by destructors, perhaps when the process ends and the driver has gone: never throws.
void release(cuda::GpuDevice& device, void* data) {
  if (data == nullptr) return;
  const cuda::Driver& d = cuda::driver();
  if (d.CtxPushCurrent(device.context()) != cuda::kSuccess) return;
  d.MemFree(reinterpret_cast<cuda::DevicePtr>(data));
  cuda::Context popped = nullptr;
  d.CtxPopCurrent(&popped);
}

}  // namespace

void* device_alloc(const Device& device, long long bytes) {
  check(device.type == kCuda, "device_alloc: ", to_string(device), " is no GPU");
  check(bytes >= 0, "device_alloc: ", bytes, " bytes");
  return allocate(cuda::GpuDevice::get(device.id), static_cast<std::size_t>(bytes));
}

void device_free(const Device& device, void* data) {
  if (data != nullptr) release(cuda::GpuDevice::get(device.id), data);
}

namespace cuda {

DeviceBuffer::DeviceBuffer(GpuDevice& device, std::size_t bytes)
    : device_(&device), data_(allocate(device, bytes)), bytes_(bytes) {}
DeviceBuffer::~DeviceBuffer() {
  if (device_ != nullptr) release(*device_, data_);
}
DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace cuda
}  // namespace plait
