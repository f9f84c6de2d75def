// The ceiling beside which decode on the CPU is read: how fast all threads together copy memory.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "cpu/thread_pool.h"
#include "plait/bench.h"

namespace plait {

double copy_bandwidth() {
  constexpr std::size_t kBytes = std::size_t{256} << 20, kPiece = std::size_t{1} << 20;
  constexpr int kPieces = kBytes / kPiece, kRuns = 7;
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  std::vector<double> seconds;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    cpu::thread_pool().run(kPieces, 0, [&](int i, int) {
      std::memcpy(to.data() + i * kPiece, from.data() + i * kPiece, kPiece);
    });
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRuns / 2, seconds.end());
  return 2.0 * kBytes / seconds[kRuns / 2];
}

}  // namespace plait
