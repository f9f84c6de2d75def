// host_device/row.h: every accessor reaches every element once, whatever the number of lanes.
#include "host_device/row.h"

#include <gtest/gtest.h>

#include <vector>

namespace plait {
namespace {

struct Plain {
  float* x;
  float get(int i) const { return x[i]; }
  void set(int i, float value) { x[i] = value; }
};

template <int kDim, int kNumLanes, class F>
std::vector<float> on_all_lanes(F f) {
  std::vector<float> x(kDim);
  for (int i = 0; i < kDim; ++i) x[i] = 100.0f + i;
  for (int lane = 0; lane < kNumLanes; ++lane) {
    Row<Plain, kDim, kNumLanes> row{{x.data()}, lane, 0};
    f(row);
  }
  return x;
}

template <int kDim, int kNumLanes>
void check_row() {
  auto x = on_all_lanes<kDim, kNumLanes>(
      [](auto& row) { row.map([](int i, float value) { return 2 * value + i; }); });
  for (int i = 0; i < kDim; ++i) EXPECT_EQ(x[i], 2 * (100.0f + i) + i);

  x = on_all_lanes<kDim, kNumLanes>([](auto& row) {
    row.map_half_pairs([](int i, float& a, float& b) {
      const float old = a;
      a = 1000.0f * i + b;
      b = old;
    });
  });
  for (int i = 0; i < kDim / 2; ++i) {
    EXPECT_EQ(x[i], 1000.0f * i + 100 + i + kDim / 2);
    EXPECT_EQ(x[i + kDim / 2], 100.0f + i);
  }

  x = on_all_lanes<kDim, kNumLanes>([](auto& row) {
    row.map_adjacent_pairs([](int i, float& a, float& b) {
      const float old = a;
      a = 1000.0f * i + b;
      b = old;
    });
  });
  for (int i = 0; i < kDim / 2; ++i) {
    EXPECT_EQ(x[2 * i], 1000.0f * i + 100 + 2 * i + 1);
    EXPECT_EQ(x[2 * i + 1], 100.0f + 2 * i);
  }

  float total = 0;  // the lanes' parts; the device adds them by shuffles
  on_all_lanes<kDim, kNumLanes>(
      [&](auto& row) { total += row.sum([](int i, float value) { return value + i; }); });
  float want = 0;
  for (int i = 0; i < kDim; ++i) want += 100 + 2 * i;
  EXPECT_EQ(total, want);
}

TEST(Row, OneLane) {
  check_row<8, 1>();
  check_row<40, 1>();
  check_row<128, 1>();
}
TEST(Row, ManyLanes) {
  check_row<8, 8>();
  check_row<40, 8>();
  check_row<128, 16>();
  check_row<256, 32>();
}

}  // namespace
}  // namespace plait
