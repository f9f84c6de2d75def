// host_device/rotation.h and variants/rope.cc against long double: angles at any position, the
// fast recurrence's parts, frequencies.
#include "host_device/rotation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "variants/rope.h"

namespace plait {
namespace {

constexpr long double kTwoPi = 6.283185307179586476925286766559005768L;

// The angle of pair i, as the definition has it.
long double angle(const RopeOptions& o, int dim, int i, long long position) {
  return position * std::pow(static_cast<long double>(o.theta), -2.0L * i / dim) / o.scale;
}

TEST(Rotation, AnglesAreRightAtAnyPosition) {
  float worst = 0;
  for (const RopeOptions& o : {RopeOptions{}, RopeOptions{.theta = 500000, .scale = 4},
                               RopeOptions{.theta = 3.5, .scale = 0.03}}) {
    for (const int dim : {8, 128, 256}) {
      const auto turns = rope_table(o, dim);
      ASSERT_EQ(turns.size(), static_cast<size_t>(dim));
      for (int i = 0; i < dim / 2; ++i) {
        for (const int position : {0, 1, 2, 77, 4095, 131071, 1048575, (1 << 30) - 1, -1, -300}) {
          const long double a = angle(o, dim, i, position);
          const CosSin got = cos_sin(turn_at(turns[i], position));
          worst = std::max(worst, std::fabs(got.cos - static_cast<float>(std::cos(a))));
          worst = std::max(worst, std::fabs(got.sin - static_cast<float>(std::sin(a))));
        }
      }
    }
  }
  EXPECT_LT(worst, 2e-7f);  // 2^-32 of a turn is 1.5e-9
}

TEST(Rotation, CosSinOfEveryPartOfATurn) {
  for (unsigned i = 0; i < 4096; ++i) {
    for (const unsigned around : {0u, 1u, 0xffffffffu}) {
      const unsigned turn = (i << 20) + around;
      const long double a = kTwoPi * turn / 0x1p32L;
      const CosSin got = cos_sin(turn);
      ASSERT_NEAR(got.cos, std::cos(a), 1.3e-7) << turn;
      ASSERT_NEAR(got.sin, std::sin(a), 1.3e-7) << turn;
    }
  }
}

TEST(Rotation, ComposedAnglesStayNearOverATile) {
  const auto turns = rope_table({}, 128);
  for (int i = 0; i < 64; ++i) {
    CosSin r = cos_sin(turn_at(turns[i], 123456));
    const CosSin step = rotation_table(turns.data(), 64).steps[i];
    for (int n = 1; n <= 32; ++n) {
      r = compose(r, step);
      const CosSin exact = cos_sin(turn_at(turns[i], 123456 + n));
      ASSERT_NEAR(r.cos, exact.cos, 4e-6);
      ASSERT_NEAR(r.sin, exact.sin, 4e-6);
    }
  }
}

// The formula of Llama 3.1 as Hugging Face and FlashInfer write it, in double.
TEST(Rotation, Llama31Frequencies) {
  const RopeOptions o{.theta = 500000, .scale = 8, .old_context_len = 8192};
  const auto turns = rope_table(o, 128);
  int kept = 0, scaled = 0, blended = 0;
  for (int i = 0; i < 64; ++i) {
    const double frequency = std::pow(500000.0, -i / 64.0);
    const double wavelength = 2 * M_PI / frequency;
    double want = frequency;
    if (wavelength > 8192 / o.low_freq_factor) {
      want = frequency / 8;
      ++scaled;
    } else if (wavelength >= 8192 / o.high_freq_factor) {
      const double smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0);
      want = (1 - smooth) * frequency / 8 + smooth * frequency;
      ++blended;
    } else {
      ++kept;
    }
    EXPECT_NEAR(turns[i] / 0x1p64 * 2 * M_PI, want, 1e-12 + 1e-10 * want) << i;
  }
  EXPECT_TRUE(kept > 5 && scaled > 5 && blended > 2) << kept << " " << scaled << " " << blended;
}

}  // namespace
}  // namespace plait
