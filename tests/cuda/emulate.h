// Runs a kernel's source on the host: a CTA's threads are fibers that take turns at barriers and
// warp operations, CTAs run one after the other in any order given. Slow, and blind to memory
// ordering, but it executes the very lines that NVRTC compiles, on machines without a GPU.
// Included before any kernel: it stands in for what the device compiler has built in. What kernels
// write as PTX is in emulated/ptx, which the build lets stand before kernels/ptx.
#pragma once
#include <math.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#define PLAIT_DEVICE inline
#define __shared__ static

namespace emulate {

struct Dim3 {
  unsigned x = 0, y = 0, z = 0;
};

// A wrong kernel may be right in one order of events. `last_first`: of the threads that may go on,
// the one that has waited least does. `early_copies`: cp.async writes at once, else only when it is
// waited for. `late_boxes`: boxes of TMA land some time after they were issued, in an order drawn
// from this seed; 0: at once. `naps`: a warp that meets others (at a barrier, a copy, a product)
// falls asleep now and then, drawn from this seed; 0: never.
struct Mode {
  bool last_first = false, early_copies = false;
  unsigned late_boxes = 0, naps = 0;
};
inline Mode mode;

// Called as a CTA begins (false), and once all its threads wait for the kernels before it (true): a
// test lets what those write be there only then, as late as it can be.
inline std::function<void(bool complete)> kernels_before;

// Dynamic shared memory of the running CTA: all NaN as it starts.
inline constexpr std::size_t kSmemBytes = 227 * 1024;
alignas(1024) inline unsigned char dynamic_smem[kSmemBytes];

// The threads of one CTA.
class Cta {
 public:
  explicit Cta(int num_threads)
      : fibers_(num_threads),
        warps_((num_threads + 31) / 32),
        random_(mode.late_boxes + 1000 * mode.naps),
        asleep_until_(warps_.size(), 0) {
    all_.size = num_threads;
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
  // Lets other threads run until `done()`; throws when that never comes.
  template <class F>
  void wait_until(F&& done) {
    for (int turns = 0; land_boxes(), !done(); ++turns) {
      const int most = mode.naps == 0 ? 100000 : 1000000;
      if (turns > most) throw std::logic_error("a thread waits for ever");
      mode.last_first ? runnable_.push_front(running) : runnable_.push_back(running);
      swapcontext(&fibers_[running].context, &scheduler_);
    }
  }
  void sync_threads() {
    nap();
    wait(all_);
  }
  void complete_kernels_before() {
    if (!std::exchange(kernels_before_complete_, true) && kernels_before) kernels_before(true);
  }

  // Where the running warp may be late; its first lane decides. Most naps are short, a few outlast
  // whole units of work.
  void nap() {
    if (mode.naps == 0 || running % 32 != 0 || random_() % 8 != 0) return;
    asleep_until_[running / 32] =
        now_ + random_() % 2000 + (random_() % 16 == 0 ? random_() % 30000 : 0);
    runnable_.push_back(running);
    swapcontext(&fibers_[running].context, &scheduler_);
  }

  // PTX's named barriers, at which threads may also arrive without waiting.
  void arrive_named(int id, int num_threads) {
    nap();
    NamedBarrier& barrier = named_[id];
    if (++barrier.arrived < num_threads) return;
    barrier.arrived = 0;
    ++barrier.generation;
  }
  void sync_named(int id, int num_threads) {
    const unsigned generation = named_[id].generation;
    arrive_named(id, num_threads);
    wait_until([&] { return named_[id].generation != generation; });
    nap();
  }
  // Among the lanes of `mask` that the CTA has.
  void sync_warp(unsigned mask) { wait(group(mask).barrier); }

  // Every lane of `mask` gives a value, then may see those of all.
  template <class T>
  const unsigned char* exchange(unsigned mask, const T& value) {
    static_assert(sizeof value <= kSlotBytes);
    Group& lanes = group(mask);
    int& parity = lanes.parity[running % 32];
    auto& slots = lanes.slots[parity];
    parity ^= 1;  // a lane that is ahead writes the other half
    __builtin_memcpy(slots[running % 32], &value, sizeof value);
    wait(lanes.barrier);
    return slots[0];
  }

  // What a box of TMA writes; most land soon, a few late.
  void land_later(std::function<void()> box) {
    if (mode.late_boxes == 0) return box();
    const std::uint64_t delay = random_() % 2000 + (random_() % 12 == 0 ? random_() % 40000 : 0);
    boxes_.push_back({now_ + delay, std::move(box)});
  }

  static constexpr int kSlotBytes = 32;

  // cp.async of the running thread.
  void copy(void* to, const void* from, int bytes) {
    Copy copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes};
    if (mode.early_copies) {
      copy.finish();
    } else {
      fibers_[running].open_group.push_back(copy);
    }
  }
  void commit_copies() {
    nap();
    Fiber& fiber = fibers_[running];
    fiber.groups.push_back(std::move(fiber.open_group));
    fiber.open_group.clear();
  }
  void wait_copies(std::size_t pending) {
    nap();
    auto& groups = fibers_[running].groups;
    for (; groups.size() > pending; groups.pop_front()) {
      for (const Copy& copy : groups.front()) copy.finish();
    }
  }

  int running = 0;

 private:
  struct Box {
    std::uint64_t due;
    std::function<void()> land;
  };
  void land_boxes() {  // time is counted in looks of waiting threads
    ++now_;
    for (std::size_t i = 0; i < boxes_.size();) {
      if (boxes_[i].due > now_) {
        ++i;
        continue;
      }
      const Box box = std::move(boxes_[i]);
      boxes_.erase(boxes_.begin() + static_cast<std::ptrdiff_t>(i));
      box.land();
    }
  }

  // Takes the thread that goes on: the first, or the last, of those whose warps are awake.
  int next_thread() {
    for (;;) {
      std::uint64_t first_awake = ~0ull;
      for (std::size_t i = 0; i < runnable_.size(); ++i) {
        const std::size_t at = mode.last_first ? runnable_.size() - 1 - i : i;
        const int thread = runnable_[at];
        if (asleep_until_[thread / 32] <= now_) {
          runnable_.erase(runnable_.begin() + static_cast<std::ptrdiff_t>(at));
          return thread;
        }
        first_awake = std::min(first_awake, asleep_until_[thread / 32]);
      }
      now_ = first_awake;  // all sleep
    }
  }

  struct Copy {
    unsigned char* to;
    const unsigned char* from;
    int bytes;
    void finish() const {
      if (bytes > 0) std::memcpy(to, from, bytes);
      std::memset(to + bytes, 0, 16 - bytes);
    }
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::vector<Copy> open_group;
    std::deque<std::vector<Copy>> groups;
  };
  struct Group {
    Barrier barrier;
    unsigned char slots[2][32][kSlotBytes];
    int parity[32] = {};
  };
  Group& group(unsigned mask) {
    const int lanes = static_cast<int>(fibers_.size()) - running / 32 * 32;
    if (lanes < 32) mask &= (1u << lanes) - 1;
    Group& found = warps_[running / 32][mask];
    found.barrier.size = __builtin_popcount(mask);
    return found;
  }
  static void enter();
  std::vector<Fiber> fibers_;
  std::vector<std::map<unsigned, Group>> warps_;  // by the lanes that meet
  struct NamedBarrier {
    int arrived = 0;
    unsigned generation = 0;
  };
  NamedBarrier named_[16];
  int finished_ = 0;
  bool kernels_before_complete_ = false;
  std::mt19937 random_;
  std::uint64_t now_ = 0;
  std::vector<Box> boxes_;                   // under way
  std::vector<std::uint64_t> asleep_until_;  // by warp
  Barrier all_;
  std::deque<int> runnable_;
  ucontext_t scheduler_;
  const std::function<void()>* thread_ = nullptr;
};

inline Cta* cta = nullptr;
inline Dim3 block_idx, grid_dim, block_dim;
inline Dim3 thread_idx() { return {static_cast<unsigned>(cta->running), 0, 0}; }

inline void Cta::enter() {
  (*cta->thread_)();
  ++cta->finished_;
}

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
    running = next_thread();
    swapcontext(&scheduler_, &fibers_[running].context);
  }
  if (finished_ != static_cast<int>(fibers_.size())) {
    throw std::logic_error("threads of a CTA were left waiting at a barrier");
  }
  if (!boxes_.empty()) throw std::logic_error("a CTA ended before its copies had landed");
}

// Launches `kernel` on CTAs in the order of `ctas`. Throws if threads were left waiting.
inline void launch(int grid, int num_threads, const std::vector<int>& ctas,
                   const std::function<void()>& kernel) {
  grid_dim = {static_cast<unsigned>(grid), 1, 1};
  block_dim = {static_cast<unsigned>(num_threads), 1, 1};
  for (const int i : ctas) {
    block_idx = {static_cast<unsigned>(i), 0, 0};
    std::memset(dynamic_smem, 0xff, kSmemBytes);
    if (kernels_before) kernels_before(false);
    Cta(num_threads).run(kernel);
  }
}

inline void check_aligned(const void* address, std::size_t bytes) {
  if (reinterpret_cast<std::size_t>(address) % bytes != 0) {
    throw std::logic_error("an access is not aligned as its instruction wants it");
  }
}

template <class T>
T lane_value(const unsigned char* slots, int lane) {
  T value;
  __builtin_memcpy(&value, slots + Cta::kSlotBytes * lane, sizeof value);
  return value;
}

}  // namespace emulate

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

#define threadIdx (emulate::thread_idx())
#define blockIdx (emulate::block_idx)
#define gridDim (emulate::grid_dim)
#define blockDim (emulate::block_dim)

inline void __syncthreads() { emulate::cta->sync_threads(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulate::cta->sync_warp(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const int first = emulate::cta->running % 32 / width * width;  // before others run
  return emulate::lane_value<T>(emulate::cta->exchange(mask, value), first + lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  const int lane = emulate::cta->running % 32;
  return emulate::lane_value<T>(emulate::cta->exchange(mask, value), lane ^ step);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int lane = emulate::cta->running % 32;
  return emulate::lane_value<T>(emulate::cta->exchange(mask, value),
                                lane < step ? lane : lane - step);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int step) {
  const int lane = emulate::cta->running % 32;
  return emulate::lane_value<T>(emulate::cta->exchange(mask, value),
                                lane + step > 31 ? lane : lane + step);
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  const unsigned char* slots = emulate::cta->exchange(mask, value);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) {
    ballot |= static_cast<unsigned>(emulate::lane_value<bool>(slots, lane)) << lane;
  }
  return ballot;
}
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, !value) == 0; }
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

// The transforms' row accessor has its warp operations behind __CUDA_ARCH__, which the rest of the
// shared headers must not see here.
#include "host_device/base.h"
#include "host_device/rotation.h"
#define __CUDA_ARCH__ 900
#include "host_device/row.h"
#undef __CUDA_ARCH__
