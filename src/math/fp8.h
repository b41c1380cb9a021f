// Floats of 8 bits (Micikevicius et al. 2022, arXiv:2209.05433): e4m3, which has no infinities, for
// what is multiplied forward, and e5m2, with the range of float16, for gradients. A float is
// rounded to nearest, ties to even; beyond the largest number it is that number, and NaN stays NaN.
// The arithmetic has no branches, so that loops over it are vectorized.
#pragma once
#include "math/storage.h"

namespace dlsys {

// The code of x in a format of so many bits of mantissa, exponents biased by kBias and the largest
// finite number kMost.
template <int kMantissa, int kBias, uint32_t kMost>
DLSYS_STORAGE uint8_t CodeOfFp8(float x) {
  constexpr int kCut = 23 - kMantissa;  // bits of float32's mantissa
  const uint32_t u = BitsOf(x), magnitude = u & 0x7FFFFFFFu;
  const uint32_t rounded = magnitude + ((1u << (kCut - 1)) - 1) + ((magnitude >> kCut) & 1u);
  const uint32_t normal = (rounded - ((127u - kBias) << 23)) >> kCut;
  // The sum with 2^e has the last place that subnormals have, 2^(1 - kBias - kMantissa).
  constexpr uint32_t kTwo = (uint32_t)(127 + 24 - kBias - kMantissa) << 23;
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + FloatOf(kTwo)) - kTwo;
  uint32_t code = magnitude < (128u - kBias) << 23 ? subnormal : normal;
  code = magnitude >= (127u + 16) << 23 || code > kMost ? kMost : code;
  code = magnitude > 0x7F800000u ? 0x7Fu : code;
  return (uint8_t)(code | (magnitude > 0x7F800000u ? 0 : u >> 24 & 0x80u));
}

// 4 bits of exponent, 3 of mantissa; the largest number is 448.
struct e4m3 {
  static constexpr float kLargest = 448;
  uint8_t bits;
  static e4m3 Of(float x) { return {CodeOfFp8<3, 7, 0x7E>(x)}; }
  operator float() const {
    if ((bits & 0x7F) == 0x7F) return FloatOf(0x7FC00000u);
    float16 half;  // whose exponents are biased by 8 more
    half.bits = (uint16_t)((bits & 0x80) << 8 | (bits & 0x7F) << 7);
    return 256 * (float)half;
  }
};

// 5 bits of exponent, 2 of mantissa, the upper byte of a float16; the largest number is 57344.
struct e5m2 {
  static constexpr float kLargest = 57344;
  uint8_t bits;
  static e5m2 Of(float x) { return {CodeOfFp8<2, 15, 0x7B>(x)}; }
  operator float() const {
    float16 half;
    half.bits = (uint16_t)(bits << 8);
    return half;
  }
};

}  // namespace dlsys
