// Runs a kernel's source on the host: a CTA's threads are fibers that take turns at barriers and
// warp operations, CTAs run one after the other in any order given. Slow, and blind to memory
// ordering, but it executes the very lines that NVRTC compiles, on machines without a GPU.
// Included before any kernel: it stands in for what the device compiler has built in.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define PLAIT_DEVICE inline
#define __shared__ static

namespace emulate {

struct Dim3 {
  unsigned x = 0, y = 0, z = 0;
};

// The threads of one CTA.
class Cta {
 public:
  explicit Cta(int num_threads) : fibers_(num_threads), warps_((num_threads + 31) / 32) {
    all_.size = num_threads;
    for (int w = 0; w < static_cast<int>(warps_.size()); ++w) {
      warps_[w].barrier.size = num_threads - 32 * w < 32 ? num_threads - 32 * w : 32;
    }
  }
  void run(const std::function<void()>& thread);

  struct Barrier {
    int size = 0, arrived = 0;
    std::vector<int> waiting;
  };
  void wait(Barrier& barrier) {
    if (++barrier.arrived == barrier.size) {
      for (const int fiber : barrier.waiting) runnable_.push_back(fiber);
      barrier.waiting.clear();
      barrier.arrived = 0;
      return;
    }
    barrier.waiting.push_back(running);
    swapcontext(&fibers_[running].context, &scheduler_);
  }
  void sync_threads() { wait(all_); }
  void sync_warp() { wait(warps_[running / 32].barrier); }

  // Every lane gives a value, then may see those of all.
  template <class T>
  const unsigned char* exchange(const T& value) {
    Fiber& fiber = fibers_[running];
    Warp& warp = warps_[running / 32];
    auto& slots = warp.slots[fiber.parity];
    fiber.parity ^= 1;  // a lane that is ahead writes the other half
    __builtin_memcpy(slots[running % 32], &value, sizeof value);
    wait(warp.barrier);
    return slots[0];
  }

  int running = 0;

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int parity = 0;
  };
  struct Warp {
    Barrier barrier;
    unsigned char slots[2][32][8];
  };
  static void enter();
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Barrier all_;
  std::deque<int> runnable_;
  ucontext_t scheduler_;
  const std::function<void()>* thread_ = nullptr;
};

inline Cta* cta = nullptr;
inline Dim3 block_idx, grid_dim, block_dim;
inline Dim3 thread_idx() { return {static_cast<unsigned>(cta->running), 0, 0}; }

inline void Cta::enter() { (*cta->thread_)(); }

inline void Cta::run(const std::function<void()>& thread) {
  constexpr std::size_t kStackBytes = 256 * 1024;
  thread_ = &thread;
  cta = this;
  for (int i = 0; i < static_cast<int>(fibers_.size()); ++i) {
    Fiber& fiber = fibers_[i];
    fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.get(), 0, kStackBytes};
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Cta::enter, 0);
    runnable_.push_back(i);
  }
  while (!runnable_.empty()) {
    running = runnable_.front();
    runnable_.pop_front();
    swapcontext(&scheduler_, &fibers_[running].context);
  }
}

// Launches `kernel` on CTAs in the order of `ctas`. Returns false if threads were left waiting.
inline void launch(int grid, int num_threads, const std::vector<int>& ctas,
                   const std::function<void()>& kernel) {
  grid_dim = {static_cast<unsigned>(grid), 1, 1};
  block_dim = {static_cast<unsigned>(num_threads), 1, 1};
  for (const int i : ctas) {
    block_idx = {static_cast<unsigned>(i), 0, 0};
    Cta(num_threads).run(kernel);
  }
}

template <class T>
T lane_value(const unsigned char* slots, int lane) {
  T value;
  __builtin_memcpy(&value, slots + 8 * lane, sizeof value);
  return value;
}

}  // namespace emulate

#define threadIdx (emulate::thread_idx())
#define blockIdx (emulate::block_idx)
#define gridDim (emulate::grid_dim)
#define blockDim (emulate::block_dim)

inline void __syncthreads() { emulate::cta->sync_threads(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulate::cta->sync_warp(); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulate::lane_value<T>(emulate::cta->exchange(value), lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int step) {
  const int lane = emulate::cta->running % 32;
  return emulate::lane_value<T>(emulate::cta->exchange(value), lane ^ step);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const unsigned char* slots = emulate::cta->exchange(value);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) {
    ballot |= static_cast<unsigned>(emulate::lane_value<bool>(slots, lane)) << lane;
  }
  return ballot;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }

// The transforms' row accessor has its warp operations behind __CUDA_ARCH__, which the rest of the
// shared headers must not see here.
#include "host_device/base.h"
#include "host_device/rotation.h"
#define __CUDA_ARCH__ 900
#include "host_device/row.h"
#undef __CUDA_ARCH__
