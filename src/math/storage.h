// Storage types of floats. A kernel is written over the type in which its arrays lie in memory, and
// computes in float: an element is widened as it is read, and rounded to nearest, ties to even, as
// it is written. The arithmetic here has no branches, so that loops over it are vectorized.
#pragma once
#include <cstdint>
#include <cstring>

#include "include/dlsys.h"

#ifdef __CUDACC__
#define DLSYS_STORAGE __host__ __device__ __forceinline__
#else
#define DLSYS_STORAGE inline __attribute__((always_inline))
#endif

namespace dlsys {

DLSYS_STORAGE uint32_t BitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
DLSYS_STORAGE float FloatOf(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The upper half of a float32: 8 bits of exponent, 7 of mantissa.
struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  DLSYS_STORAGE explicit bfloat16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    const uint32_t u = BitsOf(x), rounded = u + 0x7FFFu + ((u >> 16) & 1u);
    bits = (uint16_t)((x == x ? rounded : u | 0x400000u) >> 16);  // NaN stays NaN
#endif
  }
  DLSYS_STORAGE operator float() const { return FloatOf((uint32_t)bits << 16); }
};

// IEEE 754's binary16: 5 bits of exponent, 10 of mantissa; beyond 65504 it is infinite.
struct float16 {
  uint16_t bits;

  float16() = default;
  DLSYS_STORAGE explicit float16(float x) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    const uint32_t u = BitsOf(x), magnitude = u & 0x7FFFFFFFu;
    // The exponent's bias falls from 127 to 15; half a unit of the last place that stays is added.
    const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the sum with 0.5 has a last place of 2^-24, as subnormals have.
    const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477FF000u ? 0x7C00u : half;
    half = magnitude > 0x7F800000u ? 0x7E00u : half;
    bits = (uint16_t)(half | (u >> 16 & 0x8000u));
#endif
  }
  DLSYS_STORAGE operator float() const {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#else
    const uint32_t h = bits, magnitude = (h & 0x7FFFu) << 13;
    // A product with 2^112 moves the bias from 15 to 127 and makes subnormals normal.
    const uint32_t finite = BitsOf(FloatOf(magnitude) * FloatOf(0x77800000u));
    const uint32_t wide = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : finite;
    return FloatOf(wide | (h & 0x8000u) << 16);
#endif
  }
};

template <class T>
inline constexpr bool kIs16Bit = false;
template <>
inline constexpr bool kIs16Bit<bfloat16> = true;
template <>
inline constexpr bool kIs16Bit<float16> = true;

// The dtype's code of each element type.
template <class T>
inline constexpr int kDtype = -1;
template <>
inline constexpr int kDtype<float> = DL_FLOAT32;
template <>
inline constexpr int kDtype<double> = DL_FLOAT64;
template <>
inline constexpr int kDtype<int32_t> = DL_INT32;
template <>
inline constexpr int kDtype<int64_t> = DL_INT64;
template <>
inline constexpr int kDtype<uint8_t> = DL_UINT8;
template <>
inline constexpr int kDtype<bfloat16> = DL_BFLOAT16;
template <>
inline constexpr int kDtype<float16> = DL_FLOAT16;

}  // namespace dlsys
