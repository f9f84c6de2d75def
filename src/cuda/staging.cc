#include "cuda/staging.h"

#include <algorithm>

#include "plait/error.h"

namespace plait::cuda {
namespace {

constexpr std::size_t kAlignment = 256, kSlabUnit = 64 * 1024;

std::size_t up_to(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void StagingRing::reserve(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  add_slab(bytes);
}

void StagingRing::clear() {
  for (Slab& slab : slabs_) {
    for (const Buffer& buffer : slab.in_use) {
      driver().EventSynchronize(buffer.done);
      events_.push_back(buffer.done);
    }
    driver().MemFreeHost(slab.data);
  }
  slabs_.clear();
  for (const Event event : events_) driver().EventDestroy(event);
  events_.clear();
}

void StagingRing::add_slab(std::size_t bytes) {
  void* data = nullptr;
  bytes = up_to(bytes, kSlabUnit);
  check_cuda(driver().MemHostAlloc(&data, bytes, 0),
             concat("pinning ", bytes, " bytes of host memory").c_str());
  slabs_.push_back({static_cast<char*>(data), bytes, {}});
}

void StagingRing::retire_finished(Slab& slab) {
  // An event that was never recorded counts as done.
  while (!slab.in_use.empty() && !slab.in_use.front().busy &&
         driver().EventQuery(slab.in_use.front().done) == kSuccess) {
    events_.push_back(slab.in_use.front().done);
    slab.in_use.pop_front();
  }
}

StagingRing::Buffer* StagingRing::take(Slab& slab, std::size_t bytes) {
  std::size_t begin = 0, end = slab.bytes;  // where there is room
  if (!slab.in_use.empty()) {
    const auto offset = [&](const Buffer& buffer) {
      return static_cast<std::size_t>(static_cast<char*>(buffer.data) - slab.data);
    };
    const std::size_t oldest = offset(slab.in_use.front()), newest = offset(slab.in_use.back());
    begin = newest + slab.in_use.back().bytes;
    if (newest < oldest) {
      end = oldest;
    } else if (begin + bytes > end) {
      begin = 0;
      end = oldest;
    }
  }
  if (begin + bytes > end) return nullptr;
  Buffer buffer;
  buffer.data = slab.data + begin;
  buffer.bytes = bytes;
  if (events_.empty()) {
    check_cuda(driver().EventCreate(&buffer.done, kEventDisableTiming), "cuEventCreate");
  } else {
    buffer.done = events_.back();
    events_.pop_back();
  }
  buffer.busy = true;
  slab.in_use.push_back(buffer);
  return &slab.in_use.back();
}

StagingRing::Buffer* StagingRing::acquire(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes = std::max(up_to(bytes, kAlignment), kAlignment);
  for (Slab& slab : slabs_) {
    retire_finished(slab);
    if (Buffer* buffer = take(slab, bytes)) return buffer;
  }
  add_slab(2 * bytes);
  return take(slabs_.back(), bytes);
}

void StagingRing::release(Buffer* buffer, Stream stream) {
  const std::lock_guard lock(mutex_);
  const int error = driver().EventRecord(buffer->done, stream);
  // Without the event nobody could know when the device is done: the slice stays out of use.
  if (error != kSuccess) check_cuda(error, "cuEventRecord");
  buffer->busy = false;
}

void StagingRing::release_unused(Buffer* buffer) {
  const std::lock_guard lock(mutex_);
  buffer->busy = false;
}

}  // namespace plait::cuda
