// Sums and maxima over runs of contiguous values: in lanes, so that they become vector code without reordering by the
// compiler, and with sums of blocks carried in double, so that the error does not grow with the length.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace dlsys {
namespace cpu {

inline constexpr int kLanes = 32;
inline constexpr int64_t kSumBlock = 16 * kLanes;

// The next kLanes of a row's values, or as many as there are with `fill` behind them: rows of any length, short ones
// above all, run through loops of a fixed length.
DLSYS_INLINE void LoadLanes(const float* x, int64_t left, float fill, float (&lane)[kLanes]) {
  if (left >= kLanes) {
    memcpy(lane, x, sizeof lane);
    return;
  }
  for (int j = 0; j < kLanes; j++) lane[j] = fill;
  for (int j = 0; j < left; j++) lane[j] = x[j];
}
DLSYS_INLINE void StoreLanes(float* y, int64_t left, const float (&lane)[kLanes]) {
  if (left >= kLanes) {
    memcpy(y, lane, sizeof lane);
    return;
  }
  for (int j = 0; j < left; j++) y[j] = lane[j];
}

DLSYS_INLINE float AddLanes(float (&lane)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lane[j] += lane[j + width];
  return lane[0];
}

// The sum of n terms: terms(k, left, lane) puts term k and those after it into the lanes, zeros where left < kLanes
// ends them. Within a block a lane adds 16 terms, then lanes are added as a tree.
template <class F>
DLSYS_INLINE double SumOf(int64_t n, const F& terms) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = std::min(n, begin + kSumBlock);
    float sum[kLanes] = {};
    for (int64_t k = begin; k < end; k += kLanes) {
      float lane[kLanes];
      terms(k, n - k, lane);
      for (int j = 0; j < kLanes; j++) sum[j] += lane[j];
    }
    total += AddLanes(sum);
  }
  return total;
}

DLSYS_INLINE double SumOf(const float* x, int64_t n) {
  return SumOf(n, [=](int64_t k, int64_t left, float (&lane)[kLanes])
                      __attribute__((always_inline)) { LoadLanes(x + k, left, 0.f, lane); });
}

// The largest of n values, minus infinity for none; NaN is passed over.
DLSYS_INLINE float MaxOf(const float* x, int64_t n) {
  const float lowest = -std::numeric_limits<float>::infinity();
  float max[kLanes], lane[kLanes];
  for (int j = 0; j < kLanes; j++) max[j] = lowest;
  for (int64_t k = 0; k < n; k += kLanes) {
    LoadLanes(x + k, n - k, lowest, lane);
    for (int j = 0; j < kLanes; j++) max[j] = lane[j] > max[j] ? lane[j] : max[j];
  }
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) max[j] = max[j + width] > max[j] ? max[j + width] : max[j];
  return max[0];
}

}  // namespace cpu
}  // namespace dlsys
