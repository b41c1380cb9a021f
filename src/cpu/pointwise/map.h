// Vector loops over unary functors, with special ones for sin, cos and constant powers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/runtime/simd.h"
#include "math/functors.h"
#include "math/storage.h"

namespace dlsys {
namespace cpu {

// float16 is converted in loops of its own, a block at a time: of a functor that selects and this
// conversion in one loop, compilers make branches, which are not vectorized.
template <class T>
inline constexpr bool kConvertedApart = std::is_same_v<T, float16>;
constexpr int64_t kConverted = 512;  // elements of a block

template <class From, class To>
DLSYS_INLINE void ConvertRun(const From* x, To* y, int64_t n) {
  DLSYS_IVDEP
  for (int64_t k = 0; k < n; k++) y[k] = To((float)x[k]);
}

// Calls body(x, y, n) over blocks in float of the arrays; y may be x.
template <class T, class Body>
DLSYS_INLINE void InFloat(const T* x, T* y, int64_t n, const Body& body) {
  float from[kConverted], to[kConverted];
  for (int64_t at = 0; at < n; at += kConverted) {
    const int64_t count = std::min(kConverted, n - at);
    ConvertRun(x + at, from, count);
    body(from, to, count);
    ConvertRun(to, y + at, count);
  }
}
#define DLSYS_IN_FLOAT [=](const float* a, float* b, int64_t count) __attribute__((always_inline))

// y[k] = F(x[k]); y may be x.
template <class F>
struct MapRun {
  template <class T>
  static DLSYS_INLINE void Run(const T* x, T* y, int64_t n) {
    if constexpr (kConvertedApart<T>) return InFloat(x, y, n, DLSYS_IN_FLOAT { Run(a, b, count); });
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = T(F()(x[k]));
  }
};

// sin and cos: a block whose arguments are all small, as most are, skips the range reduction for
// large ones.
template <float (*Near)(float), float (*Far)(float)>
struct PeriodicRun {
  static constexpr int64_t kBlock = 1024;

  template <class T>
  static DLSYS_INLINE void Run(const T* x, T* y, int64_t n) {
    for (int64_t at = 0; at < n; at += kBlock) RunBlock(x + at, y + at, std::min(kBlock, n - at));
  }

  template <class T>
  static DLSYS_INLINE void RunBlock(const T* x, T* y, int64_t n) {
    int64_t far = 0;
    for (int64_t k = 0; k < n; k++) far += !(Magnitude(x[k]) <= kNearRange);
    if (far == 0) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = T(Near(x[k]));
      return;
    }
    float values[kBlock];
    for (int64_t k = 0; k < n; k++) values[k] = Far(x[k]);
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = T(Periodic(x[k], Near(x[k]), values[k]));
  }
};

template <>
struct MapRun<fn::Sin> : PeriodicRun<NearSin, FarSin> {};
template <>
struct MapRun<fn::Cos> : PeriodicRun<NearCos, FarCos> {};

// y[k] = F(x[k], c); y may be x.
template <class F>
struct ConstRun {
  template <class T>
  static DLSYS_INLINE void Run(const T* x, float c, T* y, int64_t n) {
    if constexpr (kConvertedApart<T>)
      return InFloat(x, y, n, DLSYS_IN_FLOAT { Run(a, c, b, count); });
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = T(F()(x[k], c));
  }
};

// Squares and cubes are products; the square root is not pow's (functors.h).
template <>
struct ConstRun<fn::PowConst> {
  template <class T>
  static DLSYS_INLINE void Run(const T* x, float c, T* y, int64_t n) {
    if constexpr (kConvertedApart<T>)
      return InFloat(x, y, n, DLSYS_IN_FLOAT { Run(a, c, b, count); });
    if (c == 2.f) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = T((float)x[k] * (float)x[k]);
    } else if (c == 3.f) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = T((float)x[k] * (float)x[k] * (float)x[k]);
    } else if (c == 0.5f) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = T(fn::sqrt((float)x[k]));
    } else {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = T(pow((float)x[k], c));
    }
  }
};

}  // namespace cpu
}  // namespace dlsys
