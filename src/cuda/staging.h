// Pinned host memory between the host and kernels that read it: rings of slices that grow and never
// wait. A slice is used again when the work that read it is known to be done. Pinning is slow
// (about half a millisecond a megabyte), so a slab serves several slices of whatever size.
#pragma once
#include <cstddef>
#include <deque>
#include <list>
#include <mutex>
#include <vector>

#include "cuda/driver.h"

namespace plait::cuda {

class StagingRing {
 public:
  // Pins `bytes` ahead of time; nothing if it throws.
  void reserve(std::size_t bytes);
  // Waits for the device, and frees. The context is current; without a driver any more, nothing.
  void clear();

  struct Buffer {
    void* data = nullptr;  // 256-byte aligned; readable by the device under the same address
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
  struct Slab {
    char* data;
    std::size_t bytes;
    std::deque<Buffer> in_use;  // oldest first, each behind the one before or at 0
  };
  void add_slab(std::size_t bytes);
  void retire_finished(Slab& slab);
  // Null if the slab has no such room between its newest and its oldest slice.
  Buffer* take(Slab& slab, std::size_t bytes);

  std::mutex mutex_;
  std::list<Slab> slabs_;
  std::vector<Event> events_;  // of slices that are done
};

}  // namespace plait::cuda
