// exp, expm1, log, log1p and tanh in float32 without branches or tables, so that loops over them
// become vector code. Within 2 ulp of the exact value; overflow, underflow into denormals,
// infinities and NaN behave as in the C library.
#pragma once
#include <cstdint>
#include <cstring>

namespace dlsys {
namespace cpu {

inline __attribute__((always_inline)) float FloatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline __attribute__((always_inline)) uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

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
  const int32_t exponent = (int32_t)(BitsOfFloat(shifted) - BitsOfFloat(kRound));
  const int32_t half = exponent >> 1;
  const float low = FloatOfBits((uint32_t)(half + 127) << 23);
  const float high = FloatOfBits(((uint32_t)exponent - (uint32_t)half + 127u) << 23);
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
  const uint32_t bits = BitsOfFloat(tiny ? x * 8388608.f : x);
  const int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23;
  const float n = (float)(tiny ? exponent - 23 : exponent);
  const float r = FloatOfBits(bits - ((uint32_t)exponent << 23)) - 1.f;
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
  const int32_t exponent = (int32_t)(BitsOfFloat(shifted) - BitsOfFloat(kRound));
  const int32_t half = exponent >> 1;
  const float low = FloatOfBits((uint32_t)(half + 127) << 23);
  const float high = FloatOfBits(((uint32_t)exponent - (uint32_t)half + 127u) << 23);
  const float small = p * low * high + (low * high - 1.f);
  return n > 64.f ? (p + 1.f) * low * high : small;  // 2^n alone may be no float32
}

// log(1 + x), corrected by what 1 + x lost in rounding (Kahan); within 3 ulp.
inline __attribute__((always_inline)) float log1p(float x) {
  const float u = 1.f + x;
  const float y = log(u) * (x / (u - 1.f));
  return u == 1.f || x == __builtin_inff() ? x : y;
}

// A polynomial near 0 (Cephes tanhf), else 1 - 2 / (exp(2|x|) + 1), which is 1 from 9.1 on; with
// the sign of x, zeros too.
inline __attribute__((always_inline)) float tanh(float x) {
  const float size = FloatOfBits(BitsOfFloat(x) & 0x7fffffffu);
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float large = 1.f - 2.f / (ExpWithin(2.f * (size > 20.f ? 20.f : size)) + 1.f);
  return __builtin_copysignf(size < 0.625f ? p * z * size + size : large, x);
}

}  // namespace cpu
}  // namespace dlsys
