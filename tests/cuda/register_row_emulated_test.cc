// tile/register_row.cuh, executed on the host (emulate.h), against the one-lane accessor of
// host_device/row.h on the same rows.
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tile/register_row.cuh"

namespace plait::test {
namespace {

constexpr int kThreads = 96;
constexpr int kInRuns = 100'000, kBetweenRuns = 100'003;  // first positions

struct FloatRow {
  float* x;
  float get(int i) const { return x[i]; }
  void set(int i, float value) { x[i] = value; }
};

// What a transform might do, by number: it is the same text for both accessors.
template <int kWhat, class Row>
void apply(int position, const std::vector<TurnsPerPosition>& table, Row& row) {
  if constexpr (kWhat == 0) {
    row.map([](int i, float x) { return x * 2 - static_cast<float>(i % 5); });
  } else if constexpr (kWhat == 1) {
    row.map_half_pairs([](int i, float& a, float& b) {
      const float old = a;
      a = b + static_cast<float>(i % 3);
      b = -old;
    });
  } else if constexpr (kWhat == 2) {
    row.map_adjacent_pairs([](int i, float& a, float& b) {
      const float old = a;
      a = b + static_cast<float>(i % 3);
      b = -old;
    });
  } else if constexpr (kWhat == 3) {
    const float total = row.sum([](int i, float x) { return i % 2 ? x : -x; });
    row.map([=](int, float x) { return x + total / 8; });
  } else if constexpr (kWhat == 4) {
    row.template rotate<Pairing::kHalf, 0>(position, table.data());
  } else if constexpr (kWhat == 5) {
    row.template rotate<Pairing::kAdjacent, 0>(position, table.data());
  } else if constexpr (kWhat == 6) {
    row.template rotate<Pairing::kAdjacent, Row::dim / 16 * 8>(position, table.data());
  } else if constexpr (kWhat == 7) {
    row.template rotate<Pairing::kHalf, Row::dim / 16 * 8>(position, table.data());
  } else if constexpr (kWhat == 8) {  // more than half of the row
    row.template rotate<Pairing::kHalf, Row::dim / 8 * 6 / 8 * 8>(position, table.data());
  } else {  // as no built-in does: some positions twice, some never, out of order, by other pairs
    if (position % 3 == 0) row.template rotate<Pairing::kHalf, 0>(position, table.data());
    if (position % 5 < 3) row.template rotate<Pairing::kAdjacent, 0>(position, table.data());
    row.template rotate<Pairing::kHalf, 0>(2 * (position % 100) - 99, table.data());
    row.template rotate<Pairing::kHalf, 0>(position - 1, table.data());
  }
}

// A RotationTable of the rotated pairs that transform `what` has.
std::vector<TurnsPerPosition> table_of(int what, int dim) {
  const int num = what < 6 || what == 9 ? dim : what < 8 ? dim / 16 * 8 : dim / 8 * 6 / 8 * 8;
  std::vector<TurnsPerPosition> table(num);
  for (int i = 0; i < num / 2; ++i) {
    table[i] = 0x9e3779b97f4a7c15ull / (3 * i + 7);
    const CosSin step = cos_sin(turn_at(table[i], 1));
    std::memcpy(&table[num / 2 + i], &step, sizeof step);
  }
  return table;
}

// Columns of a row are permuted by blocks of four, and rows padded, as a swizzle would have it.
template <int kDim>
int offset_of(int row, int col) {
  return row * (kDim * 2 + 16) + ((col / 4 ^ (row & 1)) * 4 + col % 4) * 2;
}

template <int kDim, int kWhat, bool kInOrder>
void check_rows(int num_rows, int first_position) {
  std::mt19937 random(kDim + kWhat);
  const std::vector<TurnsPerPosition> table = table_of(kWhat, kDim);
  std::vector<unsigned char> tile((kDim * 2 + 16) * (num_rows + 1));
  const auto element = [&](int row, int col) -> Float16& {
    return *reinterpret_cast<Float16*>(tile.data() + offset_of<kDim>(row, col));
  };
  std::vector<std::vector<float>> want(num_rows + 1, std::vector<float>(kDim));
  const auto position_of = [&](int row) {
    return kInOrder ? first_position + row : first_position - 7 * (row / 2);  // pairs of equal ones
  };
  for (int row = 0; row <= num_rows; ++row) {
    for (int i = 0; i < kDim; ++i) {
      element(row, i) = from_float<Float16>(static_cast<float>(random() % 2048) / 512.0f - 2.0f);
      want[row][i] = to_float(element(row, i));
    }
    if (row == num_rows) break;  // the row behind the last stays
    Row<FloatRow, kDim, 1> reference{{want[row].data()}, 0, 0};
    apply<kWhat>(position_of(row), table, reference);
  }
  emulate::launch(1, kThreads, {0}, [&] {
    transform_rows<Float16, kDim, kInOrder, kInOrder ? 4 : 2, kThreads>(
        tile.data(), num_rows, kInOrder ? first_position : 0, threadIdx.x, offset_of<kDim>,
        [&](int number, auto& accessor) {
          apply<kWhat>(kInOrder ? number : position_of(number), table, accessor);
        });
  });
  for (int row = 0; row <= num_rows; ++row) {
    for (int i = 0; i < kDim; ++i) {
      ASSERT_NEAR(to_float(element(row, i)), want[row][i], std::fabs(want[row][i]) / 1024 + 2e-4)
          << "dim " << kDim << " transform " << kWhat << " row " << row << " element " << i;
    }
  }
}

template <int kDim, int kWhat>
void check_transform() {
  // Emulated shuffles take whole warps: as many rows as every group of a warp has a share of.
  constexpr int kPasses = kThreads / lanes_of_row(kDim) * kRowsOfRun;
  for (const int passes : {1, 2}) {
    check_rows<kDim, kWhat, true>(kPasses * passes, kInRuns);
    check_rows<kDim, kWhat, false>(kPasses * passes, kInRuns);
  }
  if (kWhat == 3 || kWhat == 7 || kWhat == 8) return;
  for (const int rows : {0, 1, 2, 5, 65}) {
    check_rows<kDim, kWhat, true>(rows, kBetweenRuns);
    check_rows<kDim, kWhat, false>(rows, kBetweenRuns);
  }
}

template <int kDim>
void check_dim() {
  check_transform<kDim, 0>();
  check_transform<kDim, 1>();
  check_transform<kDim, 2>();
  check_transform<kDim, 3>();
  check_transform<kDim, 4>();
  check_transform<kDim, 5>();
  check_transform<kDim, 9>();
  if constexpr (kDim >= 16) {
    check_transform<kDim, 6>();
    check_transform<kDim, 7>();
    check_transform<kDim, 8>();
  }
}

TEST(RegisterRowEmulated, AsTheOneLaneAccessor) {
  check_dim<8>();
  check_dim<24>();
  check_dim<40>();
  check_dim<64>();
  check_dim<96>();
  check_dim<128>();
  check_dim<192>();
  check_dim<256>();
}

// The rows of positions first ... first + num_rows - 1, each of ones, turned.
std::vector<Float16> turned_ones(int first, int num_rows) {
  static constexpr int kDim = 64;
  const std::vector<TurnsPerPosition> table = table_of(4, kDim);
  std::vector<Float16> tile(num_rows * kDim, from_float<Float16>(1.0f));
  emulate::launch(1, kThreads, {0}, [&] {
    transform_rows<Float16, kDim, true, 1, kThreads>(
        reinterpret_cast<unsigned char*>(tile.data()), num_rows, first, threadIdx.x,
        [](int row, int col) { return (row * kDim + col) * 2; },
        [&](int position, auto& accessor) { apply<4>(position, table, accessor); });
  });
  return tile;
}
TEST(RegisterRowEmulated, APositionIsTurnedAlikeInEveryTile) {
  constexpr int kFirst = -9, kRows = 70, kDim = 64;
  const std::vector<Float16> whole = turned_ones(kFirst, kRows);
  for (const int begin : {1, 2, 3, 4, 33}) {
    for (const int rows : {1, 6, 31}) {
      const std::vector<Float16> part = turned_ones(kFirst + begin, rows);
      EXPECT_EQ(std::memcmp(part.data(), whole.data() + begin * kDim, part.size() * 2), 0)
          << begin << " " << rows;
    }
  }
}

// The angles themselves, which rows of 16 bits would not show, against long double.
TEST(RegisterRowEmulated, AnglesAreExactToAFewRoundings) {
  constexpr long double kTwoPi = 6.283185307179586476925286766559005768L;
  std::vector<TurnsPerPosition> table = table_of(4, 8);
  double worst = 0;
  for (const int first : {-4, 0, (1 << 17) - 4, (1 << 20) - 8, 0x7fffffe0}) {
    Rotor<true> rotor;
    rotor.start_run(first);
    for (int at = first; at < first + kRowsOfRun; ++at) {
      rotor.turn_to(at, table.data(), 4, 4, {0, 2});
      for (int i = 0; i < 4; ++i) {
        const __int128 product = static_cast<__int128>(table[i]) * at;
        const long double angle =
            static_cast<long double>(static_cast<unsigned long long>(product)) * 0x1p-64L * kTwoPi;
        worst = std::fmax(worst, std::fabs(rotor.now[i].cos - std::cos(angle)));
        worst = std::fmax(worst, std::fabs(rotor.now[i].sin - std::sin(angle)));
      }
    }
  }
  EXPECT_LT(worst, 1e-6);  // 6e-8 is half of a float32's last place; on the GPU 5e-7 more
}

}  // namespace
}  // namespace plait::test
