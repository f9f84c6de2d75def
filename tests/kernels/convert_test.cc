// host_device/convert.h: all values of the 16-bit and 8-bit types, and rounding at every midpoint.
#include "host_device/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace plait {
namespace {

// sign, exponent bits, mantissa bits -> value, as IEEE 754 defines it.
double value_of(unsigned bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = bits >> (exponent_bits + mantissa_bits) ? -1 : 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

template <class T>
void check_all(int exponent_bits, int mantissa_bits) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const double want = value_of(bits, exponent_bits, mantissa_bits);
    const float got = to_float(T{static_cast<unsigned short>(bits)});
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      EXPECT_TRUE(std::isnan(to_float(from_float<T>(got)))) << bits;
      continue;
    }
    EXPECT_EQ(got, want) << bits;
    EXPECT_EQ(std::signbit(got), std::signbit(want)) << bits;
    EXPECT_EQ(from_float<T>(got).bits, bits);
  }
}

// Between neighbours a < b: the midpoint goes to the even one, its neighbours to the nearer one.
template <class T>
void check_midpoints(unsigned infinity) {
  for (unsigned bits = 0; bits < infinity; ++bits) {
    const double a = to_float(T{static_cast<unsigned short>(bits)});
    double b = to_float(T{static_cast<unsigned short>(bits + 1)});
    if (bits + 1 == infinity) b = 2 * a - to_float(T{static_cast<unsigned short>(bits - 1)});
    const float middle = static_cast<float>((a + b) / 2);
    ASSERT_EQ(middle, (a + b) / 2);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(from_float<T>(middle).bits, even) << bits;
    EXPECT_EQ(from_float<T>(-middle).bits, even | 0x8000u) << bits;
    EXPECT_EQ(from_float<T>(std::nextafter(middle, 0.0f)).bits, bits);
    EXPECT_EQ(from_float<T>(std::nextafter(middle, std::numeric_limits<float>::infinity())).bits,
              bits + 1);
  }
}

TEST(Convert, EveryBfloat16) { check_all<Bfloat16>(8, 7); }
TEST(Convert, EveryFloat16) { check_all<Float16>(5, 10); }
TEST(Convert, Bfloat16RoundsToNearestEven) { check_midpoints<Bfloat16>(0x7f80); }
TEST(Convert, Float16RoundsToNearestEven) { check_midpoints<Float16>(0x7c00); }

// float8_e4m3fn is no IEEE format: the largest exponent is of numbers, but for its last fraction.
double value_of_e4m3(unsigned bits) {
  if ((bits & 0x7f) == 0x7f) return NAN;
  const double sign = bits & 0x80 ? -1 : 1;
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  return exponent == 0 ? sign * std::ldexp(fraction, -9)
                       : sign * std::ldexp(8 + fraction, exponent - 10);
}
double value_of_e5m2(unsigned bits) { return value_of(bits, 5, 2); }

template <class T, class Value>
void check_every_byte(Value value, unsigned largest) {
  for (unsigned bits = 0; bits < 256; ++bits) {
    const double want = value(bits);
    const T x{static_cast<unsigned char>(bits)};
    const float got = to_float(x);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      EXPECT_TRUE(std::isnan(to_float(from_float<T>(got)))) << bits;
      continue;
    }
    EXPECT_EQ(got, want) << bits;
    EXPECT_EQ(std::signbit(got), std::signbit(want)) << bits;
    EXPECT_EQ(from_float<T>(got).bits, std::isinf(want) ? (bits & 0x80) | largest : bits);
  }
  // Rounding, and what is beyond the largest finite value.
  for (unsigned bits = 0; bits < largest; ++bits) {
    const float middle = static_cast<float>((value(bits) + value(bits + 1)) / 2);
    EXPECT_EQ(from_float<T>(middle).bits, bits + bits % 2) << bits;
    EXPECT_EQ(from_float<T>(-middle).bits, (bits + bits % 2) | 0x80) << bits;
    EXPECT_EQ(from_float<T>(std::nextafter(middle, 0.0f)).bits, bits);
    EXPECT_EQ(from_float<T>(std::nextafter(middle, INFINITY)).bits, bits + 1);
  }
  for (const float x : {1.001f * static_cast<float>(value(largest)), 3e38f, INFINITY}) {
    EXPECT_EQ(from_float<T>(x).bits, largest) << x;
    EXPECT_EQ(from_float<T>(-x).bits, largest | 0x80) << x;
  }
}

TEST(Convert, EveryE4m3) { check_every_byte<E4m3>(value_of_e4m3, 0x7e); }
TEST(Convert, EveryE5m2) { check_every_byte<E5m2>(value_of_e5m2, 0x7b); }

TEST(Convert, NanStaysNan) {
  for (unsigned bits : {0x7f800001u, 0x7fffffffu, 0x7fc00000u, 0xff800001u, 0xffffffffu}) {
    float x;
    std::memcpy(&x, &bits, 4);
    EXPECT_TRUE(std::isnan(to_float(from_float<Bfloat16>(x)))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(to_float(from_float<Float16>(x)))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(to_float(from_float<E4m3>(x)))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(to_float(from_float<E5m2>(x)))) << std::hex << bits;
  }
}

}  // namespace
}  // namespace plait
