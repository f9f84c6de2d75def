// host_device/mask_bits.h: rows of every small begin and end, packed as callers pack them (no
// alignment at all), read back bit by bit, as words and as accumulator fragments.
#include "host_device/mask_bits.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace plait {
namespace {

struct MaskRow {
  TokenMask mask;
  std::vector<bool> shown;  // by key position, up to 300
  std::vector<unsigned> words;
};

// `first`: where the row starts in the caller's bits or bools; what lies around it is garbage, and
// bytes that have none of its bits are not there at all.
MaskRow make_row(int begin, int end, int first, bool bools, std::mt19937& random) {
  MaskRow row{{2, begin, end}, std::vector<bool>(300), {7u, 7u}};  // two words of others in front
  std::vector<unsigned char> from(bools ? first + end - begin : (first + end - begin + 7) / 8);
  for (unsigned char& byte : from) byte = static_cast<unsigned char>(random());
  for (int k = 0; k < 300; ++k) {
    row.shown[k] = k < begin || (k < end && random() % 2);
    if (k < begin || k >= end) continue;
    const int at = first + k - begin;
    if (bools) {
      from[at] = row.shown[k] ? 1 + random() % 255 : 0;
    } else {
      from[at / 8] = static_cast<unsigned char>((from[at / 8] & ~(1u << (at % 8))) |
                                                unsigned{row.shown[k]} << (at % 8));
    }
  }
  for (int i = 0; i < mask_row_words(begin, end); ++i) {
    const int word = begin / 32 + i;
    row.words.push_back(bools ? pack_mask_bools(from.data(), first, begin, end, word)
                              : pack_mask_bits(from.data(), first, begin, end, word));
  }
  row.words.push_back(~0u);  // the next row's: never to be seen
  return row;
}

TEST(MaskBits, RowsOfEveryAlignment) {
  std::mt19937 random(1);
  for (const bool bools : {false, true}) {
    for (const int begin : {0, 1, 7, 31, 32, 33, 63, 64, 70}) {
      for (const int length : {0, 1, 2, 25, 31, 32, 33, 64, 97}) {
        for (const int first : {0, 3, 8, 29}) {
          const MaskRow row = make_row(begin, begin + length, first, bools, random);
          for (int k = 0; k < 200; ++k) {
            ASSERT_EQ(mask_bit(row.words.data(), row.mask, k), row.shown[k])
                << "key " << k << " begin " << begin << " length " << length;
            const unsigned word = mask_word_at(row.words.data(), row.mask, k);
            for (int i = 0; i < 32; ++i) ASSERT_EQ(word >> i & 1u, unsigned{row.shown[k + i]});
          }
        }
      }
    }
  }
}

template <int kWords>
void check_fragments() {
  std::mt19937 random(kWords);
  const MaskRow row = make_row(13, 171, 5, false, random);
  for (const int k_pos : {0, 3, 32, 64, 128, 130}) {
    for (int quad = 0; quad < 4; ++quad) {
      const unsigned packed = fragment_mask<kWords>(row.words.data(), row.mask, k_pos, quad);
      for (int group = 0; group < 4 * kWords; ++group) {
        for (int b = 0; b < 2; ++b) {
          EXPECT_EQ(fragment_bit(packed, group, b),
                    row.shown[k_pos + 8 * group + 2 * quad + b])
              << k_pos << " " << quad << " " << group << " " << b;
        }
      }
    }
  }
}

TEST(MaskBits, FragmentsOfAnAccumulator) {
  check_fragments<1>();
  check_fragments<2>();
  check_fragments<4>();
}

template <int kColumns>
void check_visible() {
  for (const int begin : {kMinInt, -5, 0, 1, 96, 97, 103, 104, 130, 227, 228, 500}) {
    for (const int end : {0, 1, 96, 98, 101, 111, 223, 224, 225, 600, kMaxInt}) {
      for (const int sink_end : {0, 3, 98, 99, 300}) {
        const VisibleRange range{begin, end, sink_end};
        for (const int k_pos : {0, 96, 97}) {
          for (int quad = 0; quad < 4; ++quad) {
            const auto bits = fragment_visible<kColumns>(range, k_pos, quad);
            for (int column = 2 * quad; column < kColumns; column += column % 2 == 0 ? 1 : 7) {
              ASSERT_EQ(fragment_bit(bits, column / 8, column % 2),
                        visible(range, k_pos + column))
                  << begin << " " << end << " " << sink_end << " " << k_pos << " " << column;
            }
          }
        }
      }
    }
  }
}

// Against the predicate of each key.
TEST(MaskBits, FragmentsOfVisibleRanges) {
  check_visible<80>();
  check_visible<128>();
  check_visible<256>();
}

}  // namespace
}  // namespace plait
