// Row-wise sums and maxima on the CPU, with explicit SIMD lanes, so that they compile to vector
// code without reassociation by the compiler. Sums of blocks are carried in double, so that the
// error does not grow with the length.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/runtime/simd.h"
#include "math/storage.h"

namespace dlsys {
namespace cpu {

inline constexpr int kLanes = 32;
inline constexpr int64_t kSumBlock = 16 * kLanes;

// A row of n values of any storage type, of which `readable` >= n values may be read from `data`
// on: following rows of the same task included.
template <class T>
struct RowOf {
  const T* data;
  int64_t n, readable;
};
using Row = RowOf<float>;

// The type in which a value of a row is computed with.
template <class T>
using Lane = std::conditional_t<kIs16Bit<T>, float, T>;

// The last values of a row, from k on, fewer than kLanes and padded by `fill`, so that loops over
// lanes have a fixed length.
template <class T>
struct Tail {
  DLSYS_INLINE Tail(const RowOf<T>& row, int64_t k, Lane<T> fill) {
    const T* x = row.data + k;
    const int left = (int)(row.n - k);
    if (row.readable - k >= kLanes) {
      for (int j = 0; j < kLanes; j++) {
        const Lane<T> value = x[j];
        lane[j] = j < left ? value : fill;
      }
    } else {
      for (int j = 0; j < kLanes; j++) lane[j] = fill;
      for (int j = 0; j < left; j++) lane[j] = x[j];
    }
  }
  Lane<T> lane[kLanes];
};

// Reduces the lanes to one value by f, as a tree.
template <class T, class F>
DLSYS_INLINE T FoldLanes(const T (&lane)[kLanes], const F& f) {
  T half[kLanes / 2];
  for (int j = 0; j < 16; j++) half[j] = f(lane[j], lane[j + 16]);
  for (int j = 0; j < 8; j++) half[j] = f(half[j], half[j + 8]);
  for (int j = 0; j < 4; j++) half[j] = f(half[j], half[j + 4]);
  return f(f(half[0], half[2]), f(half[1], half[3]));
}

DLSYS_INLINE float AddLanes(const float (&lane)[kLanes]) {
  return FoldLanes(lane, [](float x, float y) __attribute__((always_inline)) { return x + y; });
}

// The sum of term(x[k], y[k]) over two rows of one length, where term(x_fill, y_fill) is 0. Within
// a block a lane adds 16 terms, then the lanes are added as a tree.
template <class T, class U, class F>
DLSYS_INLINE double SumOf(const RowOf<T>& x, Lane<T> x_fill, const RowOf<U>& y, Lane<U> y_fill,
                          const F& term) {
  double total = 0;
  int64_t k = 0;
  while (k + kLanes <= x.n) {
    float lane[kLanes] = {};
    const int64_t end = std::min(x.n, k + kSumBlock);
    for (; k + kLanes <= end; k += kLanes)
      for (int j = 0; j < kLanes; j++) lane[j] += term(x.data[k + j], y.data[k + j]);
    total += AddLanes(lane);
  }
  if (k == x.n) return total;
  const Tail left(x, k, x_fill);
  const Tail right(y, k, y_fill);
  float lane[kLanes];
  for (int j = 0; j < kLanes; j++) lane[j] = term(left.lane[j], right.lane[j]);
  return total + AddLanes(lane);
}

template <class T, class F>
DLSYS_INLINE double SumOf(const RowOf<T>& x, Lane<T> fill, const F& term) {
  auto of_x = [=](float value, float) __attribute__((always_inline)) { return term(value); };
  return SumOf(x, fill, x, fill, of_x);
}

template <class T>
DLSYS_INLINE double SumOf(const RowOf<T>& x) {
  return SumOf(x, Lane<T>(0), [](float value) __attribute__((always_inline)) { return value; });
}

// The largest value, minus infinity for none; NaN is ignored.
template <class T>
DLSYS_INLINE float MaxOf(const RowOf<T>& x) {
  const float lowest = -std::numeric_limits<float>::infinity();
  auto larger = [](float a, float b) __attribute__((always_inline)) { return b > a ? b : a; };
  float max[kLanes];
  for (int j = 0; j < kLanes; j++) max[j] = lowest;
  int64_t k = 0;
  for (; k + kLanes <= x.n; k += kLanes)
    for (int j = 0; j < kLanes; j++) max[j] = larger(max[j], x.data[k + j]);
  if (k < x.n) {
    const Tail tail(x, k, T(lowest));
    for (int j = 0; j < kLanes; j++) max[j] = larger(max[j], tail.lane[j]);
  }
  return FoldLanes(max, larger);
}

// y[k] = f(x[k]) for a row; y may be x. Returns the sum of y, where f(fill) is 0.
template <class T, class F>
DLSYS_INLINE double MapRow(const RowOf<T>& x, T fill, float* y, const F& f) {
  int64_t k = 0;
  for (; k + kLanes <= x.n; k += kLanes) {
    DLSYS_IVDEP
    for (int j = 0; j < kLanes; j++) y[k + j] = f(x.data[k + j]);
  }
  double total = SumOf(Row{y, k, k});
  if (k == x.n) return total;
  const Tail tail(x, k, fill);
  float lane[kLanes];
  for (int j = 0; j < kLanes; j++) lane[j] = f(tail.lane[j]);
  for (int j = 0; k < x.n; k++, j++) y[k] = lane[j];
  return total + AddLanes(lane);
}

}  // namespace cpu
}  // namespace dlsys
