// Pinned host memory between the host and kernels that read it: a ring that grows and never waits.
// A buffer is used again when the work that read it is known to be done.
#pragma once
#include <cstddef>
#include <mutex>
#include <vector>

#include "cuda/driver.h"

namespace plait::cuda {

class StagingRing {
 public:
  // Makes `num_buffers` of `bytes` each ahead of time, or none: pinning memory is slow.
  void reserve(int num_buffers, std::size_t bytes);
  // Waits for the device, and frees. The context is current; without a driver any more, nothing.
  void clear();

  struct Buffer {
    void* data = nullptr;  // 16-byte aligned; readable by the device under the same address
    std::size_t bytes = 0;
    Event done = nullptr;
    bool busy = false;  // handed out, `done` not recorded yet
  };
  // Memory for the host to write and for work on one stream to read. The context is current, as in
  // the other calls.
  Buffer* acquire(std::size_t bytes);
  // After the last work that reads `buffer` was put on `stream`.
  void release(Buffer* buffer, Stream stream);
  // After a failure: nothing was launched.
  void release_unused(Buffer* buffer);

 private:
  Buffer* add(std::size_t bytes);
  void shrink(std::size_t num_buffers);  // frees the last ones
  std::mutex mutex_;
  std::vector<Buffer*> buffers_;
};

}  // namespace plait::cuda
