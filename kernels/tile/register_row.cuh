// Rows of a tile of 16-bit elements in shared memory, a row at a time in the registers of a group
// of lanes: the accessor that row transforms see in the tensor-core kernels (members:
// host_device/row.h). A row is read once and written once, in pieces of 8 bytes, however many
// transforms run on it; both halves of a pair are in one lane in either pairing. Along the rows of
// a tile the angle of a pair grows by a constant, so that all but a lane's first row turn it by one
// complex product.
#pragma once
#include "host_device/convert.h"
#include "host_device/row.h"

namespace plait {

// The angles of a lane's four pairs, from row to row. kInOrder: a lane's next row is a position on.
template <bool kInOrder>
struct Rotor {
  CosSin now[4];
  int position = 0;
  bool running = false;

  // The angles at `at` of pairs first[0], first[0] + 1, first[1], first[1] + 1, both even. Pairs
  // beyond the table's are not turned.
  PLAIT_DEVICE void turn_to(int at, const RotationTable& table, int num_pairs,
                            const int (&first)[2]) {
    struct alignas(16) TwoSteps {
      CosSin step[2];
    };
    const bool next = kInOrder && running && at == position + 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first[i] >= num_pairs) {
        now[2 * i] = now[2 * i + 1] = {1.0f, 0.0f};
      } else if (next) {
        const TwoSteps two = *reinterpret_cast<const TwoSteps*>(table.steps + first[i]);
        now[2 * i] = compose(now[2 * i], two.step[0]);
        now[2 * i + 1] = compose(now[2 * i + 1], two.step[1]);
      } else {
        now[2 * i] = fast_cos_sin(turn_at(table.turns[first[i]], at));
        now[2 * i + 1] = fast_cos_sin(turn_at(table.turns[first[i] + 1], at));
      }
    }
    running = true;
    position = at;
  }
};

constexpr int lanes_of_row(int dim) {  // a power of two, so that groups fill a warp
  int lanes = 1;
  while (lanes * 8 < dim) lanes *= 2;
  return lanes;
}

template <class T, int kDim, bool kInOrder>
struct RegisterRow {
  static constexpr int dim = kDim;
  static constexpr int kGroup = lanes_of_row(kDim);
  static constexpr int kLanes = kDim / 8;  // of the group, that have elements: 4 of each half
  static_assert(kDim % 8 == 0 && kDim <= 256);

  float x[2][4];  // elements kDim / 2 * j + 4 * lane + e
  int lane;
  Rotor<kInOrder>& rotor;

  PLAIT_DEVICE int index(int j, int e) const { return kDim / 2 * j + 4 * lane + e; }
  // Of the group within its warp: its first lane, all of its lanes.
  static PLAIT_DEVICE int first_lane() { return threadIdx.x % 32 / kGroup * kGroup; }
  static PLAIT_DEVICE unsigned group() {
    return (kGroup == 32 ? ~0u : (1u << kGroup % 32) - 1) << first_lane();
  }
  PLAIT_DEVICE bool active() const { return kLanes == kGroup || lane < kLanes; }

  // Of element index(j, 0) on: 8 bytes.
  struct alignas(8) Piece {
    unsigned words[2];
  };
  PLAIT_DEVICE void unpack(const Piece& low, const Piece& high) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Piece& piece = j == 0 ? low : high;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const Two two = to_floats<T>(piece.words[w]);
        x[j][2 * w] = two.low;
        x[j][2 * w + 1] = two.high;
      }
    }
  }
  PLAIT_DEVICE Piece packed(int j) const {
    return {{from_floats<T>(x[j][0], x[j][1]), from_floats<T>(x[j][2], x[j][3])}};
  }

  template <class F>
  PLAIT_DEVICE void map(F f) {
    if (!active()) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = f(index(i / 4, i % 4), x[i / 4][i % 4]);
  }
  template <class F>
  PLAIT_DEVICE void map_half_pairs(F f) {
    if (!active()) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) f(index(0, e), x[0][e], x[1][e]);
  }
  template <class F>
  PLAIT_DEVICE void map_adjacent_pairs(F f) {
    if (!active()) return;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      f(index(p / 2, 2 * (p % 2)) / 2, x[p / 2][2 * (p % 2)], x[p / 2][2 * (p % 2) + 1]);
    }
  }
  template <class F>
  PLAIT_DEVICE float sum(F f) {
    float total = 0.0f;
    if (active()) {
#pragma unroll
      for (int i = 0; i < 8; ++i) total += f(index(i / 4, i % 4), x[i / 4][i % 4]);
    }
#pragma unroll
    for (int step = kGroup / 2; step > 0; step /= 2) total += __shfl_xor_sync(group(), total, step);
    return total;
  }

  template <Pairing kPairing, int kNum>
  PLAIT_DEVICE void rotate(int position, const TurnsPerPosition* memory) {
    constexpr int kPairs = (kNum == 0 ? kDim : kNum) / 2;
    static_assert(kPairs % 4 == 0);
    const RotationTable table = rotation_table(memory, kPairs);
    if constexpr (kPairing == Pairing::kAdjacent) {
      if (!active()) return;
      rotor.turn_to(position, table, kPairs, {2 * lane, kDim / 4 + 2 * lane});
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        rotate_pair(rotor.now[p], x[p / 2][2 * (p % 2)], x[p / 2][2 * (p % 2) + 1]);
      }
    } else if constexpr (2 * kPairs == kDim) {
      if (!active()) return;
      rotor.turn_to(position, table, kPairs, {4 * lane, 4 * lane + 2});
#pragma unroll
      for (int p = 0; p < 4; ++p) rotate_pair(rotor.now[p], x[0][p], x[1][p]);
    } else {
      rotate_part<kPairs / 4>(position, table.turns);
    }
  }

 private:
  // Half pairs of a part of the row: kHalf blocks of four elements with the kHalf behind them,
  // which other lanes hold. Rare, and not made fast.
  template <int kHalf>
  PLAIT_DEVICE void rotate_part(int position, const TurnsPerPosition* turns) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float other[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int block = lane + j * kLanes;
        const int partner = block < kHalf       ? block + kHalf
                            : block < 2 * kHalf ? block - kHalf
                                                : block;
        const int from = first_lane() + partner % kLanes;
        const float a = __shfl_sync(group(), x[0][e], from),
                    b = __shfl_sync(group(), x[1][e], from);
        other[j] = partner < kLanes ? a : b;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int block = lane + j * kLanes;
        if (!active() || block >= 2 * kHalf) continue;
        const CosSin r = fast_cos_sin(turn_at(turns[4 * (block % kHalf) + e], position));
        x[j][e] = x[j][e] * r.cos + other[j] * (block < kHalf ? -r.sin : r.sin);
      }
    }
  }
};

// Calls transform(row, accessor) for rows [0, num_rows) of a tile, on `kNumThreads` threads (whole
// warps; thread = 0 ... kNumThreads - 1). offset(row, col): bytes from `tile` to an element, of
// which four from a multiple of four on are neighbours. kInOrder: row r + 1 is one position behind
// row r.
template <class T, int kDim, bool kInOrder, int kNumThreads, class Offset, class F>
PLAIT_DEVICE void transform_rows(unsigned char* tile, int num_rows, int thread, Offset offset,
                                 F&& transform) {
  constexpr int kGroup = lanes_of_row(kDim), kNumGroups = kNumThreads / kGroup;
  static_assert(kNumThreads % 32 == 0);
  using Row = RegisterRow<T, kDim, kInOrder>;
  using Piece = typename Row::Piece;
  Rotor<kInOrder> rotor;
  const int lane = thread % kGroup;
  Row accessor{{}, lane, rotor};
  const bool active = accessor.active();
  const auto piece = [&](int row, int j) {
    return reinterpret_cast<Piece*>(tile + offset(row, kDim / 2 * j + 4 * lane));
  };
  // Each group takes a run of rows. The next row is on its way while this one is transformed.
  const int share = (num_rows + kNumGroups - 1) / kNumGroups;
  int row = thread / kGroup * share;
  const int end = row + share < num_rows ? row + share : num_rows;
  Piece next[2] = {};
  const auto fetch = [&](int r) {
    if (r >= end || !active) return;
    next[0] = *piece(r, 0);
    next[1] = *piece(r, 1);
  };
  fetch(row);
#pragma unroll 1
  for (; row < end; ++row) {
    accessor.unpack(next[0], next[1]);
    fetch(row + 1);
    transform(row, accessor);
    if (active) {
      *piece(row, 0) = accessor.packed(0);
      *piece(row, 1) = accessor.packed(1);
    }
  }
}

}  // namespace plait
