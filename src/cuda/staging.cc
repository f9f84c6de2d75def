#include "cuda/staging.h"

#include <bit>

#include "plait/error.h"

namespace plait::cuda {
namespace {
constexpr std::size_t kMinBytes = 64 * 1024;
}

void StagingRing::reserve(int num_buffers, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t before = buffers_.size();
  try {
    for (int i = 0; i < num_buffers; ++i) add(bytes);
  } catch (...) {
    shrink(before);  // an owner that is being constructed will not clear()
    throw;
  }
}

void StagingRing::clear() { shrink(0); }

void StagingRing::shrink(std::size_t num_buffers) {
  while (buffers_.size() > num_buffers) {
    Buffer* const buffer = buffers_.back();
    driver().EventSynchronize(buffer->done);
    driver().EventDestroy(buffer->done);
    driver().MemFreeHost(buffer->data);
    delete buffer;
    buffers_.pop_back();
  }
}

StagingRing::Buffer* StagingRing::add(std::size_t bytes) {
  auto* buffer = new Buffer;
  buffer->bytes = std::bit_ceil(bytes < kMinBytes ? kMinBytes : bytes);
  if (const int error = driver().MemHostAlloc(&buffer->data, buffer->bytes, 0)) {
    const std::size_t wanted = buffer->bytes;
    delete buffer;
    check_cuda(error, concat("pinning ", wanted, " bytes of host memory").c_str());
  }
  if (const int error = driver().EventCreate(&buffer->done, kEventDisableTiming)) {
    driver().MemFreeHost(buffer->data);
    delete buffer;
    check_cuda(error, "cuEventCreate");
  }
  buffers_.push_back(buffer);
  return buffer;
}

StagingRing::Buffer* StagingRing::acquire(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (Buffer* buffer : buffers_) {
    // An event that was never recorded counts as done.
    if (!buffer->busy && buffer->bytes >= bytes && driver().EventQuery(buffer->done) == kSuccess) {
      buffer->busy = true;
      return buffer;
    }
  }
  Buffer* buffer = add(bytes);
  buffer->busy = true;
  return buffer;
}

void StagingRing::release(Buffer* buffer, Stream stream) {
  const std::lock_guard lock(mutex_);
  const int error = driver().EventRecord(buffer->done, stream);
  // Without the event nobody could know when the device is done: the buffer stays out of use.
  if (error != kSuccess) check_cuda(error, "cuEventRecord");
  buffer->busy = false;
}

void StagingRing::release_unused(Buffer* buffer) {
  const std::lock_guard lock(mutex_);
  buffer->busy = false;
}

}  // namespace plait::cuda
