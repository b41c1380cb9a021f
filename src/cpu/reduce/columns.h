// Column-wise reductions by a monoid on the CPU: iteration over the middle axis of x (outer, n,
// inner) for each column of (outer, inner). The grouping of values depends on the shape only.
//
// Vectors run across columns. Where a row has few columns, consecutive rows are folded into one
// wide row; where n is small too, vectors run across columns of different outer indices. A long
// axis is reduced in groups, whose results a second loop combines.
#pragma once
#include <limits>

#include "cpu/reduce/rows.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {

inline constexpr int64_t kColumns = 512;        // columns of a task
inline constexpr int64_t kFoldedColumns = 256;  // columns of a folded row
inline constexpr int64_t kSplit = 65536;        // elements of a task, about
inline constexpr int64_t kShort = 32;           // elements of a short column

// Monoids: an operation and its identity. NaN propagates.
template <class T>
struct MaxMonoid {
  using State = T;
  static constexpr const char* name = "reduce_max";
  static constexpr bool kIdempotent = true;  // an element may be taken twice
  static constexpr T kIdentity = std::numeric_limits<T>::has_infinity
                                     ? -std::numeric_limits<T>::infinity()
                                     : std::numeric_limits<T>::lowest();
  DLSYS_INLINE T operator()(T a, T b) const {
    const T larger = b > a ? b : a;  // one instruction; the branch on NaN is predicted
    return b != b ? b : larger;
  }
};
template <class T>
struct MinMonoid {
  using State = T;
  static constexpr const char* name = "reduce_min";
  static constexpr bool kIdempotent = true;
  static constexpr T kIdentity = std::numeric_limits<T>::has_infinity
                                     ? std::numeric_limits<T>::infinity()
                                     : std::numeric_limits<T>::max();
  DLSYS_INLINE T operator()(T a, T b) const {
    const T smaller = b < a ? b : a;
    return b != b ? b : smaller;
  }
};

// The columns of an array (outer, n, inner), along n, and the groups that a long axis is split
// into.
struct Columns {
  int64_t outer, n, inner;

  bool IsShort() const { return n <= kShort && inner < kLanes; }
  int64_t GroupLength() const { return std::max<int64_t>(64, kSplit / std::min(inner, kColumns)); }
  int64_t Groups() const { return n > GroupLength() ? (n - 1) / GroupLength() + 1 : 1; }
};

// Checks x (outer, n, inner) against a result of shape (outer, inner), or of x's shape.
inline Columns CheckedColumns(const char* op, const DLArray* x, const DLArray* y,
                              bool keeps_shape = false) {
  Check(op, x);
  Check(op, y);
  bool fits = x->ndim == 3 && y->ndim == (keeps_shape ? 3 : 2);
  fits = fits && y->shape[0] == x->shape[0] && y->shape[y->ndim - 1] == x->shape[2];
  if (!fits || (keeps_shape && y->shape[1] != x->shape[1]))
    Fail("%s: %s does not reduce to %s: expected (outer, n, inner) and %s", op,
         ShapeText(x).c_str(), ShapeText(y).c_str(), keeps_shape ? "the same" : "(outer, inner)");
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

// Rows of a strip of columns in one group: they start at element `from` of x and row `first` of n,
// and their results start at element `to` of an array (outer, groups, inner).
struct Strip {
  int64_t from, first, rows, cols, to;
};

// Calls body(strip) for the strips of every group of n.
template <class F>
void ForGroups(const Columns& s, const F& body) {
  const int64_t length = s.GroupLength(), groups = s.Groups();
  const int64_t width = std::min(s.inner, kColumns);
  const int64_t strips = (s.inner - 1) / width + 1;
  const int64_t grain = RowGrain(width * std::min(length, s.n));
  ParallelFor(s.outer * groups * strips, grain, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin; k < end; k++) {
        const int64_t job = k / strips, col = k % strips * width;
        const int64_t first = job % groups * length;
        body(Strip{(job / groups * s.n + first) * s.inner + col, first,
                   std::min(length, s.n - first), std::min(width, s.inner - col),
                   job * s.inner + col});
      }
    });
  });
}

// Calls body(x, offsets of the columns in it, first column, count of columns) for kLanes short
// columns at a time. The last block repeats its last column.
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

// The rows of a strip that fold into one wide row.
DLSYS_INLINE int64_t FoldedRows(const Columns& s, const Strip& strip) {
  return std::max<int64_t>(1, std::min(kFoldedColumns / s.inner, strip.rows / 4));
}

// Reduces a contiguous run by F.
template <class F, class T>
DLSYS_INLINE typename F::State ReduceRun(const T* x, int64_t n) {
  typename F::State lane[kLanes], other[kLanes];  // two accumulators hide the latency of F
  for (int j = 0; j < kLanes; j++) lane[j] = other[j] = F::kIdentity;
  int64_t k = 0;
  for (; k + 2 * kLanes <= n; k += 2 * kLanes) {
    for (int j = 0; j < kLanes; j++) lane[j] = F()(lane[j], x[k + j]);
    for (int j = 0; j < kLanes; j++) other[j] = F()(other[j], x[k + kLanes + j]);
  }
  for (int j = 0; j < kLanes; j++) lane[j] = F()(lane[j], other[j]);
  if (F::kIdempotent && n > kLanes) {  // the tail overlaps elements already taken
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
