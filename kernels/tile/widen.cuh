// fp8 becomes what the tensor cores read: numbers of 8 bits, as they lie in memory, become those of
// 16 bits, in registers, or a whole tile of them where transforms or wgmma want one. Every number
// of either format is one of bfloat16 and of float16, so that nothing is rounded; NaN stays NaN.
#pragma once
#include "host_device/convert.h"

namespace plait {

// Bytes 2 i and 2 i + 1 of `word`, each the upper byte of a half of the result.
template <int kPair>
PLAIT_HD unsigned upper_bytes(unsigned word) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(word, 0, kPair == 0 ? 0x1404 : 0x3424);
#else
  const unsigned pair = word >> 16 * kPair;
  return (pair & 0xff) << 8 | (pair & 0xff00) << 16;
#endif
}

// Two neighbours as float16.
template <class From, int kPair>
struct Halves;
template <int kPair>
struct Halves<E5m2, kPair> {
  static PLAIT_HD unsigned of(unsigned word) { return upper_bytes<kPair>(word); }
};
template <int kPair>
struct Halves<E4m3, kPair> {
  static PLAIT_HD unsigned of(unsigned word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned halves;
    // Halves of a register, which the instruction takes; a shift would be one more.
    if constexpr (kPair == 0) {
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
          : "=r"(halves)
          : "r"(word));
    } else {
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
          : "=r"(halves)
          : "r"(word));
    }
    return halves;
#else
    const unsigned bytes = upper_bytes<kPair>(word), magnitude = bytes & 0x7f007f00u;
    // Bit 15 of a half where its magnitude is 0x7f: then the exponent becomes that of NaN.
    const unsigned nan = (magnitude + 0x01000100u) & 0x80008000u;
    const unsigned biased = (magnitude | nan) >> 1 | (bytes & 0x80008000u);
#if defined(__CUDA_ARCH__)
    unsigned halves;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(biased), "r"(0x5c005c00u));  // 2^8
    return halves;
#else
    const auto two = to_floats<Float16>(biased);
    return from_floats<Float16>(two.low * 256.0f, two.high * 256.0f);
#endif
#endif
  }
};

// Bytes 0, 2, 1, 3.
PLAIT_HD unsigned swap_middle_bytes(unsigned word) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(word, 0, 0x3120);
#else
  return (word & 0xff0000ffu) | (word >> 8 & 0xff00u) | (word << 8 & 0xff0000u);
#endif
}

// Numbers 2 kPair and 2 kPair + 1 of a word of four.
template <class From, int kPair>
PLAIT_HD Two floats_of_pair(unsigned word) {
  return to_floats<Float16>(Halves<From, kPair>::of(word));
}
template <class From, Dtype kTo, int kPair>
PLAIT_HD unsigned widen_pair(unsigned word) {
  if constexpr (kTo == Dtype::kFloat16) {
    return Halves<From, kPair>::of(word);
  } else {
    const Two two = floats_of_pair<From, kPair>(word);
    return from_floats<Storage<kTo>>(two.low, two.high);
  }
}

// kRows rows of kDim numbers of kFrom as kTo: chunk i (of 8 elements, row by row) is read at
// from_offset(i) of `from`, chunk c of a row is written at to_offset(row, c) of `to`; with kCut
// rows at and beyond num_rows are zeros. On `kNumThreads` threads, thread = 0 ... kNumThreads - 1.
// A thread reads kBatch chunks before it writes one, since the compiler cannot know that `to` is
// elsewhere; 1 where O and S fill its registers.
template <Dtype kFrom, Dtype kTo, int kDim, int kRows, int kNumThreads, int kBatch, bool kCut,
          class FromOffset, class ToOffset>
struct Widener {
  static_assert(kDim % 16 == 0);
  static constexpr unsigned kChunks = kDim / 8, kNumChunks = kRows * kChunks;
  static constexpr unsigned kStep = kBatch * kNumThreads;
  using From = Storage<kFrom>;
  struct alignas(8) Eight {
    unsigned words[2];
  };
  const unsigned char* from;
  unsigned char* to;
  int num_rows;
  FromOffset from_offset;
  ToOffset to_offset;

  template <bool kGuarded>
  PLAIT_DEVICE void batch(unsigned first) const {
    Eight x[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const unsigned i = first + b * kNumThreads;
      if (kGuarded && i >= kNumChunks) break;
      x[b] = *reinterpret_cast<const Eight*>(from + from_offset(i));
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const unsigned i = first + b * kNumThreads;
      if (kGuarded && i >= kNumChunks) break;
      const int row = static_cast<int>(i / kChunks), chunk = static_cast<int>(i % kChunks);
      if (kCut && row >= num_rows) x[b] = Eight{{0, 0}};
      *reinterpret_cast<uint4*>(to + to_offset(row, chunk)) =
          uint4{widen_pair<From, kTo, 0>(x[b].words[0]), widen_pair<From, kTo, 1>(x[b].words[0]),
                widen_pair<From, kTo, 0>(x[b].words[1]), widen_pair<From, kTo, 1>(x[b].words[1])};
    }
  }
  PLAIT_DEVICE void run(unsigned thread) const {
    constexpr unsigned kWhole = kNumChunks / kStep * kStep;
#pragma unroll 1
    for (unsigned first = thread; first < kWhole; first += kStep) batch<false>(first);
    if constexpr (kWhole < kNumChunks) batch<true>(kWhole + thread);
  }
};
template <Dtype kFrom, Dtype kTo, int kDim, int kRows, int kNumThreads, int kBatch, bool kCut,
          class FromOffset, class ToOffset>
PLAIT_DEVICE void widen_rows(const unsigned char* from, unsigned char* to, int num_rows, int thread,
                             FromOffset from_offset, ToOffset to_offset) {
  Widener<kFrom, kTo, kDim, kRows, kNumThreads, kBatch, kCut, FromOffset, ToOffset>{
      from, to, num_rows, from_offset, to_offset}
      .run(thread);
}

}  // namespace plait
