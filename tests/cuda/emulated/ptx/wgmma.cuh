// kernels/ptx/wgmma.cuh for emulate.h. An instruction runs when it is waited for, the
// latest moment that hardware may take: operands given up too early show. Fragments and descriptors
// are read as the PTX manual has them ("Asynchronous Warpgroup Level Matrix Instructions"), not by
// the kernel's own layout.h.
#pragma once
#include <deque>

#include "cuda/emulate.h"
#include "host_device/convert.h"
#include "ptx/copy.cuh"

namespace plait::ptx {

// What one thread has issued, oldest first; a group ends where `commits` counts up.
struct PendingWgmma {
  std::function<void()> run;
  unsigned group;
};
struct WgmmaQueue {
  std::deque<PendingWgmma> pending;
  unsigned group = 0;
};
inline std::vector<WgmmaQueue> wgmma_queues;  // by thread
inline WgmmaQueue& wgmma_queue() {
  if (wgmma_queues.size() < 1024) wgmma_queues.resize(1024);
  return wgmma_queues[threadIdx.x];
}

inline void wgmma_fence() {}
inline void wgmma_commit() {
  ++wgmma_queue().group;
  emulate::cta->nap();
}
template <int kPending>
void wgmma_wait() {
  WgmmaQueue& queue = wgmma_queue();
  while (!queue.pending.empty() && queue.pending.front().group + kPending < queue.group) {
    const auto run = std::move(queue.pending.front().run);
    queue.pending.pop_front();
    run();
  }
  __syncwarp();  // what one lane says after it holds for all
  emulate::cta->nap();
}
template <int kCount>
void wgmma_fence_registers(float (&)[kCount]) {}

struct Descriptor {
  unsigned start, leading, stride;
  explicit Descriptor(i64 bits)
      : start((bits & 0x3fff) << 4),
        leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4) {}
  unsigned k_major(int row, int k) const {
    return start + row / 8 * stride + row % 8 * 128 + k * 2;
  }
  unsigned n_major(int n, int k) const {
    return start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2;
  }
};

template <Dtype kDtype, int kN>
struct Wgmma {
  static float element(unsigned address) {
    Storage<kDtype> x;
    std::memcpy(&x, emulate::dynamic_smem + swizzled(address), 2);
    return to_float(x);
  }
  // a[r][k]: this thread's two rows. b(n, k).
  template <class B>
  static void multiply(float* d, const float (&a)[2][16], B&& b, bool accumulate) {
    for (int j = 0; j < kN / 4; ++j) {
      const int n = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
      float sum[2] = {};
      for (int k = 0; k < 16; ++k) {
        const float x = b(n, k);
        for (int r = 0; r < 2; ++r) sum[r] += a[r][k] * x;
      }
      for (int r = 0; r < 2; ++r) {
        float& to = d[j / 2 * 4 + 2 * r + j % 2];
        to = (accumulate ? to : 0.0f) + sum[r];
      }
    }
  }
  static void ss(float (&d)[kN / 2], i64 a, i64 b, int accumulate) {
    const auto run = [d = &d[0], a, b, accumulate] {
      const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      float rows[2][16];
      for (int r = 0; r < 2; ++r) {
        for (int k = 0; k < 16; ++k) {
          rows[r][k] = element(Descriptor(a).k_major(row + 8 * r, k));
        }
      }
      const Descriptor from(b);
      multiply(
          d, rows, [&](int n, int k) { return element(from.k_major(n, k)); }, accumulate);
    };
    wgmma_queue().pending.push_back({run, wgmma_queue().group});
  }
  static void rs(float (&d)[kN / 2], const unsigned* a, i64 b, int accumulate) {
    const auto run = [d = &d[0], a, b, accumulate] {
      float rows[2][16];
      for (int lane = 0; lane < 4; ++lane) {  // the four threads of a row hold its 16 k
        for (int i = 0; i < 4; ++i) {
          const unsigned pair = __shfl_sync(~0u, a[i], threadIdx.x % 32 / 4 * 4 + lane);
          for (int e = 0; e < 2; ++e) {
            const Storage<kDtype> x{static_cast<unsigned short>(pair >> 16 * e)};
            rows[i % 2][i / 2 * 8 + 2 * lane + e] = to_float(x);
          }
        }
      }
      const Descriptor from(b);
      multiply(
          d, rows, [&](int n, int k) { return element(from.n_major(n, k)); }, accumulate);
    };
    wgmma_queue().pending.push_back({run, wgmma_queue().group});
  }
};

}  // namespace plait::ptx
