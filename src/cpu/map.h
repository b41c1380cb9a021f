// Runs of functions of one number.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../functors.h"
#include "simd.h"

namespace dlsys {
namespace cpu {

// y[k] = F(x[k]); y may be x.
template <class F>
struct MapRun {
  static DLSYS_INLINE void Run(const float* x, float* y, int64_t n) {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = F()(x[k]);
  }
};

// sin and cos: a block whose numbers are all small, as they mostly are, goes by Near.
template <class F, float (*Near)(float)>
struct PeriodicRun {
  static constexpr int64_t kBlock = 1024;

  static DLSYS_INLINE void Run(const float* x, float* y, int64_t n) {
    for (int64_t at = 0; at < n; at += kBlock) {
      const int64_t end = std::min(at + kBlock, n);
      if (!AllNear(x + at, end - at)) {
        for (int64_t k = at; k < end; k++) y[k] = F()(x[k]);
        continue;
      }
      DLSYS_IVDEP
      for (int64_t k = at; k < end; k++) y[k] = Near(x[k]);
    }
  }

  static DLSYS_INLINE bool AllNear(const float* x, int64_t n) {
    int far = 0;
    for (int64_t k = 0; k < n; k++) far |= !(fn::fabs(x[k]) <= kNearTurns);
    return !far;
  }
};

template <>
struct MapRun<fn::Sin> : PeriodicRun<fn::Sin, NearSin> {};
template <>
struct MapRun<fn::Cos> : PeriodicRun<fn::Cos, NearCos> {};

}  // namespace cpu
}  // namespace dlsys
