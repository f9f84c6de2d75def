// Rows of a tile of 16-bit elements in shared memory, a row at a time in the registers of a group
// of lanes: the accessor that row transforms see in the tensor-core kernels (members:
// host_device/row.h). A row is read once and written once, in pieces of 8 bytes, however many
// transforms run on it; both halves of a pair are in one lane in either pairing. A group takes runs
// of four rows, several side by side, so that none waits for its own shared memory or user's loads.
#pragma once
#include "host_device/convert.h"
#include "host_device/row.h"

namespace plait {

inline constexpr int kRowsOfRun = 4;

// The angles of a lane's four pairs, from row to row. Its frequencies are read when a row meets a
// table for the first time. kInOrder: rows are met in runs of positions 4 n ... 4 n + 3. The first
// of a run costs sines and cosines, the others a complex product each; so a position's angles are
// the same bits whatever tile it lies in. All conditions are constants once a run is unrolled, but
// for queries, of which several have one position.
template <bool kInOrder>
struct Rotor {
  static constexpr int kRun = kInOrder ? kRowsOfRun : 1, kNone = -2;

  const TurnsPerPosition* memory = nullptr;
  int pairs_of = 0;  // what the angles are of, see rotate(); 0: nothing yet
  TurnsPerPosition turns[4] = {};
  CosSin step[4] = {}, now[4] = {};
  int run = 0, place = kNone;  // `now` is of position run + place; run: a multiple of kRun

  // Rows of the run at `first` come next. (Nothing of `now` is kept: registers.)
  PLAIT_DEVICE void start_run(int first) {
    run = first;
    place = kNone;
  }

  // To position `at` of pairs first[0], first[0] + 1, first[1], first[1] + 1 of `table`, both even.
  // Those from num_pairs on are not turned. `pairs` stands for num_pairs and first.
  PLAIT_DEVICE void turn_to(int at, const TurnsPerPosition* table, int pairs, int num_pairs,
                            const int (&first)[2]) {
    const bool known = pairs_of == pairs && memory == table;
    if (!known) read(rotation_table(table, num_pairs), num_pairs, first);
    const bool within = static_cast<unsigned>(at - run) < kRun;
    const int run_of = within ? run : at & -kRun;
    const int place_of = within ? at - run : at & (kRun - 1);
    if (known && within && place == place_of) {
      // Of the same position: another head of a query.
    } else if (known && within && place + 1 == place_of) {
      turn_on();
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) now[i] = fast_cos_sin(turn_at(turns[i], run_of));
      if constexpr (kInOrder) {
#pragma unroll 1
        for (int i = 0; i < place_of; ++i) turn_on();
      }
    }
    memory = table;
    pairs_of = pairs;
    run = run_of;
    place = place_of;
  }

 private:
  PLAIT_DEVICE void read(const RotationTable& table, int num_pairs, const int (&first)[2]) {
    struct alignas(16) TwoTurns {
      TurnsPerPosition turns[2];
    };
    struct alignas(16) TwoSteps {
      CosSin step[2];
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool turned = first[i] < num_pairs;
      const int from = turned ? first[i] : 0;
      const TwoTurns t = *reinterpret_cast<const TwoTurns*>(table.turns + from);
      const TwoSteps s = *reinterpret_cast<const TwoSteps*>(table.steps + from);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        turns[2 * i + j] = turned ? t.turns[j] : 0;
        step[2 * i + j] = turned ? s.step[j] : CosSin{1.0f, 0.0f};
      }
    }
  }
  PLAIT_DEVICE void turn_on() {
#pragma unroll
    for (int i = 0; i < 4; ++i) now[i] = compose(now[i], step[i]);
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
  static PLAIT_DEVICE bool is_active(int lane) { return kLanes == kGroup || lane < kLanes; }
  PLAIT_DEVICE bool active() const { return is_active(lane); }

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
    if constexpr (kPairing == Pairing::kAdjacent) {
      if (!active()) return;
      rotor.turn_to(position, memory, kPairs, kPairs, {2 * lane, kDim / 4 + 2 * lane});
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        rotate_pair(rotor.now[p], x[p / 2][2 * (p % 2)], x[p / 2][2 * (p % 2) + 1]);
      }
    } else if constexpr (2 * kPairs == kDim) {
      if (!active()) return;
      rotor.turn_to(position, memory, -kPairs, kPairs, {4 * lane, 4 * lane + 2});
#pragma unroll
      for (int p = 0; p < 4; ++p) rotate_pair(rotor.now[p], x[0][p], x[1][p]);
    } else {
      rotate_part<kPairs / 4>(position, memory);
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

// Calls transform(number, accessor) for kRows rows from `row` on. All are read before one is
// written: the compiler cannot know that others are elsewhere. (Written all at last, RMS norm and
// RoPE took 20 bytes more than a producer's registers.)
template <int kRows, class Row, class Rotor, class Offset, class F>
PLAIT_DEVICE void transform_side_by_side(unsigned char* tile, int row, int number, int lane,
                                         Rotor& rotor, Offset offset, F& transform) {
  using Piece = typename Row::Piece;
  const auto piece = [&](int i, int j) {
    return reinterpret_cast<Piece*>(tile + offset(row + i, Row::dim / 2 * j + 4 * lane));
  };
  const bool active = Row::is_active(lane);
  Piece pieces[kRows][2] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (!active) continue;
    pieces[i][0] = *piece(i, 0);
    pieces[i][1] = *piece(i, 1);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Row accessor{{}, lane, rotor};
    accessor.unpack(pieces[i][0], pieces[i][1]);
    transform(number + i, accessor);
    if (!active) continue;
    *piece(i, 0) = accessor.packed(0);
    *piece(i, 1) = accessor.packed(1);
  }
}

// Calls transform(number, accessor) for the num_rows rows of a tile, which are numbered from
// first_number on, by `kNumThreads` threads (whole warps; thread = 0 ... kNumThreads - 1).
// offset(row, col): bytes from `tile` to an element of row 0 ... num_rows - 1, of which four from a
// multiple of four on are neighbours. kInOrder: numbers are positions. kSide: how many rows of a
// run are read side by side.
template <class T, int kDim, bool kInOrder, int kSide, int kNumThreads, class Offset, class F>
PLAIT_DEVICE void transform_rows(unsigned char* tile, int num_rows, int first_number, int thread,
                                 Offset offset, F&& transform) {
  constexpr int kGroup = lanes_of_row(kDim), kNumGroups = kNumThreads / kGroup;
  static_assert(kNumThreads % 32 == 0 && kRowsOfRun % kSide == 0);
  using Row = RegisterRow<T, kDim, kInOrder>;
  Rotor<kInOrder> rotor;
  const int lane = static_cast<unsigned>(thread) % kGroup, end = first_number + num_rows;
  // A group takes every kNumGroups-th run. Runs start at multiples of their length, which the
  // compiler sees.
#pragma unroll 1
  for (int run = (first_number >> 2) + thread / kGroup; run * kRowsOfRun < end; run += kNumGroups) {
    const int begin = run * kRowsOfRun;
    rotor.start_run(begin);
    if (begin >= first_number && begin + kRowsOfRun <= end) {
#pragma unroll
      for (int i = 0; i < kRowsOfRun; i += kSide) {
        transform_side_by_side<kSide, Row>(tile, begin - first_number + i, begin + i, lane, rotor,
                                           offset, transform);
      }
    } else {  // cut by an end of the tile
      const int stop = min(begin + kRowsOfRun, end);
#pragma unroll 1
      for (int number = max(begin, first_number); number < stop; ++number) {
        transform_side_by_side<1, Row>(tile, number - first_number, number, lane, rotor, offset,
                                       transform);
      }
    }
  }
}

}  // namespace plait
