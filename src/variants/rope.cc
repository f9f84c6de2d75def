#include "variants/rope.h"

#include <cmath>
#include <cstring>

#include "host_device/rotation.h"
#include "plait/error.h"

namespace plait {
namespace {

constexpr long double kTwoPi = 6.283185307179586476925286766559005768L;

// Radians a position of the pair whose unscaled frequency is `frequency`.
long double scaled(const RopeOptions& o, long double frequency) {
  const long double scale = o.scale;
  if (o.old_context_len == 0) return frequency / scale;
  const long double turns = o.old_context_len * frequency / kTwoPi;  // within the old context
  if (turns > o.high_freq_factor) return frequency;
  if (turns < o.low_freq_factor) return frequency / scale;
  const long double smooth = (turns - o.low_freq_factor) /
                             (static_cast<long double>(o.high_freq_factor) - o.low_freq_factor);
  return (1 - smooth) * frequency / scale + smooth * frequency;
}

}  // namespace

void check_rope(const RopeOptions& o) {
  const auto positive = [](const char* name, double value) {
    check(std::isfinite(value) && value > 0, "rope: ", name, " is ", value,
          ", but must be finite and > 0");
  };
  positive("theta", o.theta);
  positive("scale", o.scale);
  check(o.rotary_dim >= 0 && o.rotary_dim <= 256 && o.rotary_dim % 8 == 0, "rope: rotary_dim is ",
        o.rotary_dim, ", but must be a multiple of 8 up to 256 (0: the whole head)");
  check(o.old_context_len >= 0, "rope: old_context_len is ", o.old_context_len,
        ", but must be >= 0 (0: no Llama 3.1 scaling)");
  positive("low_freq_factor", o.low_freq_factor);
  positive("high_freq_factor", o.high_freq_factor);
  check(o.low_freq_factor < o.high_freq_factor, "rope: low_freq_factor is ", o.low_freq_factor,
        " and high_freq_factor ", o.high_freq_factor, "; the first must be less");
}

std::vector<unsigned long long> rope_table(const RopeOptions& o, int head_dim) {
  const int rotary_dim = o.rotary_dim == 0 ? head_dim : o.rotary_dim;
  check(rotary_dim <= head_dim, "rope: rotary_dim is ", rotary_dim, ", but head_dim_qk is ",
        head_dim);
  const size_t num_pairs = rotary_dim / 2;
  std::vector<unsigned long long> table(2 * num_pairs);  // turns, then steps
  for (size_t i = 0; i < num_pairs; ++i) {
    const long double frequency =
        std::pow(static_cast<long double>(o.theta), -2 * static_cast<long double>(i) / rotary_dim);
    const long double a_position = scaled(o, frequency) / kTwoPi;
    const long double fraction = a_position - std::floor(a_position);  // whole turns are none
    table[i] = static_cast<unsigned long long>(fraction * 0x1p64L);
    const CosSin step{static_cast<float>(std::cos(fraction * kTwoPi)),
                      static_cast<float>(std::sin(fraction * kTwoPi))};
    static_assert(sizeof step == sizeof table[0]);
    std::memcpy(&table[num_pairs + i], &step, sizeof step);
  }
  return table;
}

}  // namespace plait
