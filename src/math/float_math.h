// exp, exp2, expm1, log, log2, log10, log1p, tanh, pow, sin, cos and tan in float32 without
// branches (sin and cos in two ranges), so that loops over them compile to vector code. The error
// is 2 ulp at most, where not noted, and 4 of tan; overflow, underflow to denormals, infinities and
// NaN behave as in the C library.
#pragma once
#include <cstdint>
#include <cstring>

#include "math/storage.h"

namespace dlsys {
namespace cpu {

// exp(x) = 2^n exp(r) with |r| <= ln(2)/2; ln(2) in two parts (Cody and Waite), exp(r) by a
// polynomial (Cephes expf). For x from -104 to 89, and NaN.
inline __attribute__((always_inline)) float ExpWithin(float x) {
  const float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  // 2^n in two factors: alone it would not be a float32 at either end.
  const int32_t exponent = (int32_t)(BitsOf(shifted) - BitsOf(kRound));
  const int32_t half = exponent >> 1;
  const float low = FloatOf((uint32_t)(half + 127) << 23);
  const float high = FloatOf(((uint32_t)exponent - (uint32_t)half + 127u) << 23);
  return p * low * high;
}

inline __attribute__((always_inline)) float exp(float x) {
  x = x < -104.f ? -104.f : x;
  return ExpWithin(x > 89.f ? 89.f : x);
}

// x = 2^n m with m in [sqrt(1/2), sqrt(2)); log(m) by a polynomial in m - 1 (Cephes logf).
inline __attribute__((always_inline)) float log(float x) {
  const float kInfinity = __builtin_inff();
  const bool tiny = x < 1.17549435e-38f;  // denormals have no exponent of their own
  const uint32_t bits = BitsOf(tiny ? x * 8388608.f : x);
  const int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23;
  const float n = (float)(tiny ? exponent - 23 : exponent);
  const float r = FloatOf(bits - ((uint32_t)exponent << 23)) - 1.f;
  const float z = r * r;
  float p = 7.0376836292e-2f;
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  p = p * r * z + n * -2.12194440e-4f - 0.5f * z;
  float y = r + p + n * 0.693359375f;
  y = x < kInfinity ? y : x;  // infinity and NaN
  y = x == 0.f ? -kInfinity : y;
  return x < 0.f ? __builtin_nanf("") : y;
}

// 2^n (exp(r) - 1) + (2^n - 1), with r and the polynomial of exp; within 3 ulp.
inline __attribute__((always_inline)) float expm1(float x) {
  const float kRound = 12582912.f;
  x = x < -30.f ? -30.f : x;
  x = x > 89.f ? 89.f : x;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r;
  const int32_t exponent = (int32_t)(BitsOf(shifted) - BitsOf(kRound));
  const int32_t half = exponent >> 1;
  const float low = FloatOf((uint32_t)(half + 127) << 23);
  const float high = FloatOf(((uint32_t)exponent - (uint32_t)half + 127u) << 23);
  const float small = p * low * high + (low * high - 1.f);
  return n > 64.f ? (p + 1.f) * low * high : small;  // 2^n alone may be no float32
}

// log(1 + x), corrected by what 1 + x lost in rounding (Kahan); within 3 ulp.
inline __attribute__((always_inline)) float log1p(float x) {
  const float u = 1.f + x;
  const float lost = (x - (u - 1.f)) / u;
  const float y = log(u) + (lost == lost ? lost : 0.f);  // it is NaN at -1 and infinity
  return x == 0.f ? x : y;
}

// A polynomial near 0 (Cephes tanhf), else 1 - 2 / (exp(2|x|) + 1), which is 1 from 9.1 on; with
// the sign of x, zeros too.
inline __attribute__((always_inline)) float tanh(float x) {
  const float magnitude = FloatOf(BitsOf(x) & 0x7fffffffu);
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float large = 1.f - 2.f / (ExpWithin(2.f * (magnitude > 20.f ? 20.f : magnitude)) + 1.f);
  return __builtin_copysignf(magnitude < 0.625f ? p * z * magnitude + magnitude : large, x);
}

// Range reduction: x = n pi/2 + r with |r| <= pi/4 up to rounding. Only the lowest two bits of n
// are used.
struct ReducedAngle {
  int32_t n;
  float r;
};

constexpr float kNearRange = 1048576.f;  // 2^20

// For |x| <= kNearRange: pi/2 in two parts (Cody and Waite) in double. The first has 33 bits, so
// that its product with n and the difference from x are exact; r is left with an error of 2^-67,
// and no float32 in this range comes closer than 2^-31 to a multiple of pi/2.
inline __attribute__((always_inline)) ReducedAngle ReduceNear(float x) {
  const double kRound = 6755399441055744.;  // 1.5 * 2^52
  const double shifted = x * 0.63661977236758134 + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11;
  int64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  return {(int32_t)bits, (float)r};
}

// For finite |x| > kNearRange (any other x gives some ReducedAngle): the product with 2/pi modulo 4
// (Payne and Hanek). Of 2/pi only 96 bits count; those in front of them make multiples of 4, those
// behind them less than 2^-70.
inline __attribute__((always_inline)) ReducedAngle ReduceFar(float x) {
  static constexpr uint32_t kTwoOverPi[] = {0,           0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                            0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
  const uint32_t magnitude = BitsOf(x) & 0x7fffffffu;
  const uint32_t digits = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t exponent = magnitude >> 23;
  const uint32_t first = (exponent < 147u ? 147u : exponent) - 120u;  // 2/pi begins at bit 32
  const uint32_t word = first >> 5, shift = first & 31u;
  uint64_t part[3];
  for (uint32_t k = 0; k < 3; k++) {
    const uint64_t two = (uint64_t)kTwoOverPi[word + k] << 32 | kTwoOverPi[word + k + 1];
    part[k] = (two << shift) >> 32;
  }
  const uint64_t product = (digits * part[0] << 32) + digits * part[1] + (digits * part[2] >> 32);
  // Two bits of n and 62 bits of its fraction, rounded to nearest.
  const uint32_t n = (uint32_t)(product >> 62) + ((uint32_t)(product >> 61) & 1u);
  const float r = (float)((double)(int64_t)(product << 2) * 8.51530395021638647334e-20);
  const bool negative = BitsOf(x) >> 31;
  return {(int32_t)(negative ? 0u - n : n), negative ? -r : r};
}

inline __attribute__((always_inline)) float Magnitude(float x) {
  return FloatOf(BitsOf(x) & 0x7fffffffu);
}

// The sine of (n + quarters) pi/2 + r: polynomials for sine and cosine (Cephes sinf).
inline __attribute__((always_inline)) float SineOf(ReducedAngle angle, int32_t quarters) {
  const float r = angle.r, z = r * r;
  float s = -1.9515295891e-4f;
  s = s * z + 8.3321608736e-3f;
  s = s * z - 1.6666654611e-1f;
  s = s * z * r + r;
  float c = 2.443315711809948e-5f;
  c = c * z - 1.388731625493765e-3f;
  c = c * z + 4.166664568298827e-2f;
  c = c * z - 0.5f;
  c = c * z + 1.f;
  const uint32_t n = (uint32_t)angle.n + (uint32_t)quarters;
  const float y = n & 1u ? c : s;
  return FloatOf(BitsOf(y) ^ (n & 2u) << 30);
}

// For |x| <= kNearRange.
inline __attribute__((always_inline)) float NearSin(float x) {
  const float y = SineOf(ReduceNear(x), 0);
  return x == 0.f ? x : y;  // -0 stays -0
}
inline __attribute__((always_inline)) float NearCos(float x) { return SineOf(ReduceNear(x), 1); }

// For finite |x| > kNearRange.
inline __attribute__((always_inline)) float FarSin(float x) { return SineOf(ReduceFar(x), 0); }
inline __attribute__((always_inline)) float FarCos(float x) { return SineOf(ReduceFar(x), 1); }

// Selects the near or the far form of a function; NaN for infinities.
inline __attribute__((always_inline)) float Periodic(float x, float near, float far) {
  const float magnitude = Magnitude(x);
  const float value = magnitude < __builtin_inff() ? far : __builtin_nanf("");
  return magnitude <= kNearRange ? near : value;
}
inline __attribute__((always_inline)) float sin(float x) {
  return Periodic(x, NearSin(x), FarSin(x));
}
inline __attribute__((always_inline)) float cos(float x) {
  return Periodic(x, NearCos(x), FarCos(x));
}
inline __attribute__((always_inline)) float tan(float x) { return sin(x) / cos(x); }

inline __attribute__((always_inline)) uint64_t BitsOfDouble(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline __attribute__((always_inline)) double DoubleOfBits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The remainder of a truncated division, exact: of a quotient below 2^28, which a double tells from
// every integer that it is not, also without the C library's loop over its digits.
inline __attribute__((always_inline)) float fmod(float x, float y) {
  const double quotient = (double)x / y;
  if (!(__builtin_fabs(quotient) < 268435456. && __builtin_fabsf(y) < __builtin_inff()))
    return __builtin_fmodf(x, y);
  return __builtin_copysignf((float)(x - __builtin_trunc(quotient) * y), x);
}

// x = 2^n m, positive and normal, with m in [sqrt(1/2), sqrt(2)), and s = (m - 1) / (m + 1), of
// which log(m) is 2 atanh(s), a short series.
struct Binary {
  double n, s;
};
inline __attribute__((always_inline)) Binary Split(double x) {
  const uint64_t bits = BitsOfDouble(x);
  const uint64_t above = bits - 0x3fe6a09e667f3bcdull;  // sqrt(1/2)
  const double m = DoubleOfBits(bits - (above & 0xfff0000000000000ull));
  // n is small: as the low bits of 2^52 + 2^51 it becomes a double without a conversion.
  const double n =
      DoubleOfBits(0x4338000000000000ull + (above >> 52) - (above >> 63 ? uint64_t{1} << 12 : 0)) -
      6755399441055744.;
  return {n, (m - 1.) / (m + 1.)};
}

// A polynomial of z by Horner's rule, the highest coefficient first.
template <class... T>
inline __attribute__((always_inline)) double Horner(double z, double highest, T... lower) {
  double p = highest;
  ((p = p * z + lower), ...);
  return p;
}

// log2(x) of a positive float32, in double with a relative error of 2^-39.
inline __attribute__((always_inline)) double Log2(float x) {
  const Binary of = Split(x);
  const double z = of.s * of.s;
  const double p = Horner(z, 1. / 15, 1. / 13, 1. / 11, 1. / 9, 1. / 7, 1. / 5, 1. / 3);
  return (p * z * of.s + of.s) * 2.8853900817779268 + of.n;
}

// log(x) of a positive double, within 2^-50 of it.
inline __attribute__((always_inline)) double Log(double x) {
  const Binary of = Split(x);
  const double z = of.s * of.s;
  const double p = Horner(z, 1. / 21, 1. / 19, 1. / 17, 1. / 15, 1. / 13, 1. / 11, 1. / 9, 1. / 7,
                          1. / 5, 1. / 3);
  return (p * z * of.s + of.s) * 2. + of.n * 0.69314718055994531;
}

// 2^x in double with a relative error of 2^-32; of what a float32 does not hold, some such number.
inline __attribute__((always_inline)) double Exp2(double x) {
  const double kRound = 6755399441055744.;
  x = x < -200. ? -200. : x;
  x = x > 200. ? 200. : x;
  const double shifted = x + kRound;
  const double r = (x - (shifted - kRound)) * 0.69314718055994531;
  double p = 1. / 40320;
  p = p * r + 1. / 5040;
  p = p * r + 1. / 720;
  p = p * r + 1. / 120;
  p = p * r + 1. / 24;
  p = p * r + 1. / 6;
  p = p * r + 1. / 2;
  p = p * r + 1.;
  p = p * r + 1.;
  return p * DoubleOfBits((BitsOfDouble(shifted) + 1023) << 52);
}

inline __attribute__((always_inline)) float exp2(float x) { return (float)Exp2(x); }

// The logarithm in which 2 has this logarithm, exact for powers of the base.
inline __attribute__((always_inline)) float LogOf(float x, double of_2) {
  float y = (float)(Log2(Magnitude(x)) * of_2);
  y = x < __builtin_inff() ? y : x;  // infinity and NaN
  y = x == 0.f ? -__builtin_inff() : y;
  return x < 0.f ? __builtin_nanf("") : y;
}
inline __attribute__((always_inline)) float log2(float x) { return LogOf(x, 1.); }
inline __attribute__((always_inline)) float log10(float x) { return LogOf(x, 0.30102999566398120); }

// x to the power y as in the C library, within 1 ulp: 2^(y log2(|x|)) in double, and what the
// standard says of zeros, infinities, NaN and negative x.
inline __attribute__((always_inline)) float pow(float x, float y) {
  const float kInfinity = __builtin_inff();
  const float magnitude = Magnitude(x);
  double exponent = Log2(magnitude);
  exponent = magnitude == 0.f ? -kInfinity : exponent;
  exponent = magnitude < kInfinity ? exponent : magnitude;  // infinity and NaN
  double product = exponent * y;
  product = (magnitude == 1.f) & (y == y) ? 0. : product;  // 1 to an infinite power
  float power = (float)Exp2(product);
  // Adding 2^23 rounds to an integer in the low bits; from 2^23 on all floats are integers, from
  // 2^24 on even.
  const float steps = Magnitude(y), shift = steps < 8388608.f ? 8388608.f : 0.f;
  const float shifted = steps + shift;
  const bool integer = shifted - shift == steps;
  const uint32_t odd = BitsOf(shifted) & integer & (steps < 16777216.f);
  power = FloatOf(BitsOf(power) | (BitsOf(x) & odd << 31));
  power = (x < 0.f) & (magnitude < kInfinity) & !integer ? __builtin_nanf("") : power;
  return (y == 0.f) | (x == 1.f) ? 1.f : power;
}

}  // namespace cpu
}  // namespace dlsys
