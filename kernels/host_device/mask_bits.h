// Custom mask bits as the kernels read them (TokenMask, plan_data.h): words of 32 keys, aligned to
// absolute positions, whatever alignment the caller's packing had. And how a caller's bits or bools
// become such words: on the host by the formats, on the device by kernels/pack_mask.cuh.
#pragma once
#include "host_device/base.h"
#include "host_device/visibility.h"

namespace plait {

// Word `word` of a row, that is of keys 32 * word ...: before the covered keys all ones, behind
// them zeros.
PLAIT_HD unsigned mask_word(const unsigned* words, const TokenMask& mask, int word) {
  const int first = mask.begin >> 5;
  if (word < first) return ~0u;
  return word * 32 < mask.end ? words[mask.first_word + (word - first)] : 0u;
}

// Bit i: does the token see the key at k_pos + i, 0 <= i < 32. k_pos >= 0.
PLAIT_HD unsigned mask_word_at(const unsigned* words, const TokenMask& mask, int k_pos) {
  const int shift = k_pos & 31;
  const unsigned low = mask_word(words, mask, k_pos >> 5);
  if (shift == 0) return low;  // tiles of a list that starts at such a position: all of them
  return low >> shift | mask_word(words, mask, (k_pos >> 5) + 1) << (32 - shift);
}

PLAIT_HD bool mask_bit(const unsigned* words, const TokenMask& mask, int k_pos) {
  return mask_word(words, mask, k_pos >> 5) >> (k_pos & 31) & 1u;
}

// What a thread of an mma or wgmma accumulator needs of a row: columns 8 j + 2 q + b, b = 0, 1, for
// its place q = lane % 4 in the quad, in one word; column 8 j + 2 q + b is bit 2 j + b.
template <int kColumns>
using FragmentBits = Select<(kColumns > 128), unsigned long long, unsigned>;
template <class Bits>
PLAIT_HD bool fragment_bit(Bits bits, int column_group, int b) {
  return (bits >> (2 * column_group + b) & 1) != 0;
}

// Bits of the thread's columns below `column`.
template <class Bits>
PLAIT_HD Bits fragment_bits_below(int column, int quad) {
  const int x = max(column - 2 * quad, 0);
  const int bits = 2 * (x >> 3) + min(x & 7, 2);
  return bits < 8 * static_cast<int>(sizeof(Bits)) ? (Bits{1} << bits) - 1 : ~Bits{0};
}

// Which keys at k_pos + column, of kColumns, the row sees, by position; k_pos >= 0.
template <int kColumns>
PLAIT_HD FragmentBits<kColumns> fragment_visible(const VisibleRange& range, int k_pos, int quad) {
  using Bits = FragmentBits<kColumns>;
  const Bits before = fragment_bits_below<Bits>(max(range.begin, 0) - k_pos, quad);
  return fragment_bits_below<Bits>(range.end - k_pos, quad) &
         (~before | fragment_bits_below<Bits>(range.sink_end - k_pos, quad));
}

// Which of 32 * kWords columns the row sees, by its custom mask.
template <int kWords>
PLAIT_HD unsigned fragment_mask(const unsigned* words, const TokenMask& mask, int k_pos, int quad) {
  static_assert(kWords >= 1 && kWords <= 4);
  unsigned packed = 0;
#if defined(__CUDACC__)
#pragma unroll 1  // rarely run, and addresses of all words at once are many registers
#endif
  for (int w = 0; w < kWords; ++w) {
    const unsigned pairs = mask_word_at(words, mask, k_pos + 32 * w) >> (2 * quad) & 0x03030303u;
    packed |= (pairs * 0x01041040u >> 24) << (8 * w);  // side by side: of each 8 bits the first 2
  }
  return packed;
}

// Words that a row with bits for [begin, end) has; one without bits may have the word it ends in.
PLAIT_HD int mask_row_words(int begin, int end) { return ((end + 31) >> 5) - (begin >> 5); }

// Word `word` of a row whose bit for key `begin` is bit `first` of the little-endian bits `from`.
// Reads no byte that has none of the row's bits.
PLAIT_HD unsigned pack_mask_bits(const unsigned char* from, i64 first, int begin, int end,
                                 int word) {
  const i64 at = first + (static_cast<i64>(word) * 32 - begin);  // bit of key 32 * word
  const i64 first_byte = first >> 3, end_byte = end > begin ? (first + (end - begin) + 7) >> 3 : 0;
  unsigned long long bits = 0;
  for (int i = 0; i < 5; ++i) {
    const i64 byte = (at >> 3) + i;
    if (byte >= first_byte && byte < end_byte) {
      bits |= static_cast<unsigned long long>(from[byte]) << (8 * i);
    }
  }
  unsigned packed = static_cast<unsigned>(bits >> (at & 7));
  if (word * 32 < begin) packed |= (1u << (begin & 31)) - 1;
  if (end - word * 32 < 32) packed &= (1u << (end & 31)) - 1;
  return packed;
}
// The same where element `first` of the bools `from` is that of key `begin`.
PLAIT_HD unsigned pack_mask_bools(const unsigned char* from, i64 first, int begin, int end,
                                  int word) {
  unsigned packed = 0;
  for (int i = 0; i < 32; ++i) {
    const int k = word * 32 + i;
    const bool shown = k < begin || (k < end && from[first + (k - begin)] != 0);
    packed |= static_cast<unsigned>(shown) << i;
  }
  return packed;
}

}  // namespace plait
