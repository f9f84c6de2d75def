// Angles of rotary embeddings. Pair i of a row at position p is turned by p * frequency(i), which
// at p = 2^20 is far beyond what a float holds to a fraction of a turn. So frequencies are
// fractions of a turn a position in 64-bit fixed point, computed once on the host: the product with
// a position wraps around exactly where turns do, and its upper half is the angle to 2^-32 of a
// turn.
#pragma once
#include "host_device/base.h"

namespace plait {

using TurnsPerPosition = unsigned long long;  // times 2^64

// In turns, times 2^32. Any position, negative ones too.
PLAIT_HD unsigned turn_at(TurnsPerPosition turns, int position) {
  return static_cast<unsigned>(
      (turns * static_cast<unsigned long long>(static_cast<i64>(position))) >> 32);
}

struct CosSin {
  float cos, sin;
};

// To about one float32 rounding. Turn to the nearest quarter, Taylor-like minimax polynomials on
// the rest. Source of the coefficients: Cephes, single/sinf.c (Moshier, 1985-1992).
PLAIT_HD CosSin cos_sin(unsigned turn) {
  const unsigned quarter = (turn + 0x20000000u) >> 30;
  const int rest = static_cast<int>(turn - (quarter << 30));          // [-1/8, 1/8) of a turn
  const float x = static_cast<float>(rest) * 1.4629180792671596e-9f;  // 2 pi / 2^32
  const float x2 = x * x;
  const float s =
      x + x * x2 * (-1.6666654611e-1f + x2 * (8.3321608736e-3f - x2 * 1.9515295891e-4f));
  const float c =
      1.0f - 0.5f * x2 +
      x2 * x2 *
          (4.166664568298827e-2f + x2 * (-1.388731625493765e-3f + x2 * 2.443315711809948e-5f));
  const bool swapped = quarter & 1u;
  const float cos = swapped ? s : c, sin = swapped ? c : s;
  return {(quarter + 1u) & 2u ? -cos : cos, quarter & 2u ? -sin : sin};
}

// For rows of 16-bit elements, whose rounding is a thousand times larger: absolute error 5e-7.
PLAIT_HD CosSin fast_cos_sin(unsigned turn) {
#if defined(__CUDA_ARCH__)
  const float x = static_cast<float>(static_cast<int>(turn)) * 1.4629180792671596e-9f;
  CosSin r;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(r.cos) : "f"(x));
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(r.sin) : "f"(x));
  return r;
#else
  return cos_sin(turn);
#endif
}

// The pair (x, y) turned.
PLAIT_HD void rotate_pair(const CosSin& r, float& x, float& y) {
  const float x0 = x;
  x = x0 * r.cos - y * r.sin;
  y = x0 * r.sin + y * r.cos;
}
// The angle of both.
PLAIT_HD CosSin compose(const CosSin& a, const CosSin& b) {
  return {a.cos * b.cos - a.sin * b.sin, a.sin * b.cos + a.cos * b.sin};
}

// Of n pairs: their frequencies, and the angle of one position, by which a kernel that walks along
// a tile turns on from row to row. One behind the other in memory, as the host makes them.
struct RotationTable {
  const TurnsPerPosition* turns;  // [n]
  const CosSin* steps;            // [n]
};
PLAIT_HD RotationTable rotation_table(const TurnsPerPosition* memory, int num_pairs) {
  return {memory, reinterpret_cast<const CosSin*>(memory + num_pairs)};
}

enum class Pairing { kHalf, kAdjacent };  // pair i: elements i and i + n / 2; 2 i and 2 i + 1

}  // namespace plait
