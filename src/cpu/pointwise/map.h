// Vector loops over unary functors (math/functors.h), y[k] = F(x[k]), contiguous; y may be x. The
// compiler vectorizes a loop that has no branches, so functors with a rare expensive case get
// special ones: sin and cos skip the range reduction of large arguments by blocks in which all are
// small, and a constant power of 2, 3 or 0.5 is a product or a square root. Memory bandwidth limits
// cheap functors; exp and its like are limited by their arithmetic.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/runtime/simd.h"
#include "math/functors.h"

namespace dlsys {
namespace cpu {

// y[k] = F(x[k]); y may be x.
template <class F>
struct MapRun {
  template <class T>
  static DLSYS_INLINE void Run(const T* x, T* y, int64_t n) {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = T(F()(x[k]));
  }
};

// sin and cos: a block whose arguments are all small, as most are, skips the range reduction for
// large ones.
template <float (*Near)(float), float (*Far)(float)>
struct PeriodicRun {
  static constexpr int64_t kBlock = 1024;

  static DLSYS_INLINE void Run(const float* x, float* y, int64_t n) {
    for (int64_t at = 0; at < n; at += kBlock) RunBlock(x + at, y + at, std::min(kBlock, n - at));
  }

  static DLSYS_INLINE void RunBlock(const float* x, float* y, int64_t n) {
    int64_t far = 0;
    for (int64_t k = 0; k < n; k++) far += !(Magnitude(x[k]) <= kNearRange);
    if (far == 0) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = Near(x[k]);
      return;
    }
    float values[kBlock];
    for (int64_t k = 0; k < n; k++) values[k] = Far(x[k]);
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = Periodic(x[k], Near(x[k]), values[k]);
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
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = T(F()(x[k], c));
  }
};

// Squares and cubes are products; the square root is not pow's (functors.h).
template <>
struct ConstRun<fn::PowConst> {
  static DLSYS_INLINE void Run(const float* x, float c, float* y, int64_t n) {
    if (c == 2.f) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = x[k] * x[k];
    } else if (c == 3.f) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = x[k] * x[k] * x[k];
    } else if (c == 0.5f) {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = fn::sqrt(x[k]);
    } else {
      DLSYS_IVDEP
      for (int64_t k = 0; k < n; k++) y[k] = pow(x[k], c);
    }
  }
};

}  // namespace cpu
}  // namespace dlsys
