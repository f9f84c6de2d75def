#include "cuda/memory.h"

#include <utility>

#include "plait/error.h"

namespace plait {
namespace {

using cuda::CurrentDevice;
using cuda::DevicePtr;
using cuda::driver;
using cuda::GpuDevice;

DevicePtr address(const void* data) { return reinterpret_cast<DevicePtr>(data); }

void* allocate(GpuDevice& device, std::size_t bytes) {
  const CurrentDevice current(device);
  DevicePtr data = 0;
  const int error = driver().MemAlloc(&data, bytes > 0 ? bytes : 1);
  if (error == cuda::kErrorOutOfMemory) {
    std::size_t free = 0, total = 0;
    driver().MemGetInfo(&free, &total);
    fail("cuda:", device.id(), ": no memory for ", bytes, " bytes; ", free, " of ", total,
         " are free");
  }
  cuda::check_cuda(error, "cuMemAlloc");
  return reinterpret_cast<void*>(data);
}

// Called by destructors, perhaps when the process ends and the driver has gone: never throws.
void release(GpuDevice& device, void* data) {
  if (data == nullptr) return;
  if (driver().CtxPushCurrent(device.context()) != cuda::kSuccess) return;
  driver().MemFree(address(data));
  cuda::Context popped = nullptr;
  driver().CtxPopCurrent(&popped);
}

GpuDevice& gpu(const Device& device, const char* what) {
  check(device.type == kCuda, what, ": ", to_string(device), " is no GPU");
  return GpuDevice::get(device.id);
}

std::size_t checked_size(long long bytes, const char* what) {
  check(bytes >= 0, what, ": ", bytes, " bytes");
  return static_cast<std::size_t>(bytes);
}

}  // namespace

void* device_alloc(const Device& device, long long bytes) {
  return allocate(gpu(device, "device_alloc"), checked_size(bytes, "device_alloc"));
}

void device_free(const Device& device, void* data) {
  if (data != nullptr) release(gpu(device, "device_free"), data);
}

void copy_to_device(const Device& device, void* to, const void* from, long long bytes,
                    Stream stream) {
  const CurrentDevice current(gpu(device, "copy_to_device"));
  if (checked_size(bytes, "copy_to_device") == 0) return;
  // From pageable memory this returns when the bytes are staged. From pinned memory it would not.
  cuda::check_cuda(driver().MemcpyHtoDAsync(address(to), from, bytes, stream), "copy_to_device");
  cuda::check_cuda(driver().StreamSynchronize(stream), "copy_to_device");
}

void copy_to_host(const Device& device, void* to, const void* from, long long bytes,
                  Stream stream) {
  const CurrentDevice current(gpu(device, "copy_to_host"));
  if (checked_size(bytes, "copy_to_host") == 0) return;
  cuda::check_cuda(driver().MemcpyDtoHAsync(to, address(from), bytes, stream), "copy_to_host");
  cuda::check_cuda(driver().StreamSynchronize(stream), "copy_to_host");
}

void fill_bytes(const Device& device, void* data, int value, long long bytes, Stream stream) {
  check(value >= 0 && value <= 255, "fill_bytes: value ", value, " is no byte");
  const CurrentDevice current(gpu(device, "fill_bytes"));
  if (checked_size(bytes, "fill_bytes") == 0) return;
  cuda::check_cuda(
      driver().MemsetD8Async(address(data), static_cast<unsigned char>(value), bytes, stream),
      "fill_bytes");
}

void synchronize(const Device& device) {
  const CurrentDevice current(gpu(device, "synchronize"));
  cuda::check_cuda(driver().CtxSynchronize(), "synchronize");
}

void synchronize(const Device& device, Stream stream) {
  const CurrentDevice current(gpu(device, "synchronize"));
  cuda::check_cuda(driver().StreamSynchronize(stream), "synchronize");
}

Stream create_stream(const Device& device) {
  const CurrentDevice current(gpu(device, "create_stream"));
  Stream stream = nullptr;
  cuda::check_cuda(driver().StreamCreate(&stream, cuda::kStreamNonBlocking), "create_stream");
  return stream;
}

void destroy_stream(const Device& device, Stream stream) {
  const CurrentDevice current(gpu(device, "destroy_stream"));
  cuda::check_cuda(driver().StreamDestroy(stream), "destroy_stream");
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
