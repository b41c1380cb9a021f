// How the middle axis of x (outer, n, inner) is walked to give a result for each of the columns
// (outer, inner), and the extremes of runs. How values are grouped depends on the shape only.
//
// Vectors run across columns. Where the columns of a row are few, rows that follow each other are
// taken abreast, as one wide row, and where n is small too, columns of different rows of `outer`.
#pragma once
#include <limits>

#include "cpu/reduce/rows.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {

inline constexpr int64_t kColumns = 512;  // columns whose results a task holds
inline constexpr int64_t kAbreast = 256;  // columns of a wide row
inline constexpr int64_t kSplit = 65536;  // elements that one task joins at most, give or take
inline constexpr int64_t kShort = 32;     // elements of a short column

// What joins two values, where `kStart` changes nothing. NaN is larger and smaller than everything.
template <class T>
struct MaxOver {
  using State = T;
  static constexpr const char* name = "reduce_max";
  static constexpr bool kRepeats = true;  // taking an element twice changes nothing
  static constexpr T kStart = std::numeric_limits<T>::has_infinity
                                  ? -std::numeric_limits<T>::infinity()
                                  : std::numeric_limits<T>::lowest();
  DLSYS_INLINE T operator()(T a, T b) const {
    const T larger = b > a ? b : a;  // one instruction, and a branch on NaN is foreseen
    return b != b ? b : larger;
  }
};
template <class T>
struct MinOver {
  using State = T;
  static constexpr const char* name = "reduce_min";
  static constexpr bool kRepeats = true;
  static constexpr T kStart = std::numeric_limits<T>::has_infinity
                                  ? std::numeric_limits<T>::infinity()
                                  : std::numeric_limits<T>::max();
  DLSYS_INLINE T operator()(T a, T b) const {
    const T smaller = b < a ? b : a;
    return b != b ? b : smaller;
  }
};

// The columns of an array (outer, n, inner), along n, and the parts that long ones are cut into.
struct Columns {
  int64_t outer, n, inner;

  bool IsShort() const { return n <= kShort && inner < kLanes; }
  int64_t Part() const { return std::max<int64_t>(64, kSplit / std::min(inner, kColumns)); }
  int64_t Groups() const { return n > Part() ? (n - 1) / Part() + 1 : 1; }
};

// Checks x (outer, n, inner) against a result of shape (outer, inner), or of x's shape.
inline Columns CheckedColumns(const char* op, const DLArray* x, const DLArray* y,
                              bool keeps = false) {
  Check(op, x);
  Check(op, y);
  bool fits = x->ndim == 3 && y->ndim == (keeps ? 3 : 2);
  fits = fits && y->shape[0] == x->shape[0] && y->shape[y->ndim - 1] == x->shape[2];
  if (!fits || (keeps && y->shape[1] != x->shape[1]))
    Fail("%s: %s does not reduce to %s: expected (outer, n, inner) and %s", op,
         ShapeText(x).c_str(), ShapeText(y).c_str(), keeps ? "the same" : "(outer, inner)");
  return {x->shape[0], x->shape[1], x->shape[2]};
}

// Calls body(outer index, first column, columns) for strips of columns.
template <class F>
void ForStrips(const Columns& s, const F& body) {
  if (s.outer == 0 || s.inner == 0) return;
  const int64_t width = std::min(s.inner, kColumns);
  const int64_t strips = (s.inner - 1) / width + 1;
  ParallelFor(s.outer * strips, RowGrain(width * std::max<int64_t>(s.n, 1)),
              [&](int64_t begin, int64_t end) {
                for (int64_t k = begin; k < end; k++) {
                  const int64_t col = k % strips * width;
                  body(k / strips, col, std::min(width, s.inner - col));
                }
              });
}

// Some rows of a strip of columns: they begin at element `from` of x, the first of them is row
// `first` of n, and their results begin at element `to` of an array (outer, groups, inner).
struct Strip {
  int64_t from, first, rows, cols, to;
};

// Calls body(strip) for the strips of every part of n.
template <class F>
void ForParts(const Columns& s, const F& body) {
  const int64_t part = s.Part(), groups = s.Groups();
  const int64_t width = std::min(s.inner, kColumns);
  const int64_t strips = (s.inner - 1) / width + 1;
  const int64_t grain = RowGrain(width * std::min(part, s.n));
  ParallelFor(s.outer * groups * strips, grain, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t job = k / strips, col = k % strips * width;
        const int64_t first = job % groups * part;
        body(Strip{(job / groups * s.n + first) * s.inner + col, first, std::min(part, s.n - first),
                   std::min(width, s.inner - col), job * s.inner + col});
      }
    });
  });
}

// Calls body(x from there on, where each column begins in it, first column, columns) for kLanes
// short columns at a time. Those that the last block lacks are its last one again.
template <class T, class F>
void ForShort(const T* x, const Columns& s, const F& body) {
  const int64_t columns = s.outer * s.inner, skip = (s.n - 1) * s.inner;
  ParallelFor((columns - 1) / kLanes + 1, RowGrain(kLanes * s.n), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t first = k * kLanes, i = first % s.inner;
        const int count = (int)std::min<int64_t>(kLanes, columns - first);
        int32_t start[kLanes] = {};
        int64_t left = s.inner - i;  // columns until the next row of `outer`
        for (int j = 1; j < kLanes; j++) {
          const bool wraps = --left == 0;
          start[j] = start[j - 1] + (j < count) * (1 + wraps * (int32_t)skip);
          left = wraps ? s.inner : left;
        }
        body(x + first / s.inner * s.n * s.inner + i, start, first, count);
      }
    });
  });
}

// How many rows of a strip are taken abreast.
DLSYS_INLINE int64_t Abreast(const Columns& s, const Strip& strip) {
  return std::max<int64_t>(1, std::min(kAbreast / s.inner, strip.rows / 4));
}

// A run joined into one value by F.
template <class F, class T>
DLSYS_INLINE typename F::State JoinRun(const T* x, int64_t n) {
  typename F::State lane[kLanes], other[kLanes];  // two, since a step waits for the last one
  for (int j = 0; j < kLanes; j++) lane[j] = other[j] = F::kStart;
  int64_t k = 0;
  for (; k + 2 * kLanes <= n; k += 2 * kLanes) {
    for (int j = 0; j < kLanes; j++) lane[j] = F()(lane[j], x[k + j]);
    for (int j = 0; j < kLanes; j++) other[j] = F()(other[j], x[k + kLanes + j]);
  }
  for (int j = 0; j < kLanes; j++) lane[j] = F()(lane[j], other[j]);
  if (F::kRepeats && n > kLanes) {  // the rest with some of those before it
    if (k + kLanes < n)
      for (int j = 0; j < kLanes; j++) lane[j] = F()(lane[j], x[k + j]);
    k = n - kLanes;
  }
  for (; k + kLanes <= n; k += kLanes)
    for (int j = 0; j < kLanes; j++) lane[j] = F()(lane[j], x[k + j]);
  for (int j = 0; k < n; k++, j++) lane[j] = F()(lane[j], x[k]);
  return FoldLanes(lane, F());
}

}  // namespace cpu
}  // namespace dlsys
