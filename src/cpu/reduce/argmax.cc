// argmax and argmin along the middle axis of x (outer, n, inner) -> (outer, inner) of int64, and
// the mask of the first element that equals its extreme, on the CPU. The first of equals counts,
// and NaN precedes all values.
#include <type_traits>

#include "cpu/reduce/columns.h"

namespace dlsys {
namespace cpu {
namespace {

template <bool kMax, class T>
struct Best {
  using Monoid = std::conditional_t<kMax, MaxMonoid<T>, MinMonoid<T>>;

  DLSYS_INLINE static bool IsBetter(T x, T best) {
    return (kMax ? x > best : x < best) | ((x != x) & (best == best));
  }
  DLSYS_INLINE static bool IsEqual(T x, T y) { return (x == y) | ((x != x) & (y != y)); }
};

// Skips the blocks from k on that do not contain a value.
template <class B, int kBlock, class T>
DLSYS_INLINE int64_t SkipBlocks(const T* x, int64_t k, int64_t n, T value) {
  for (; k + kBlock <= n; k += kBlock) {
    int found = 0;
    for (int j = 0; j < kBlock; j++) found |= B::IsEqual(x[k + j], value);
    if (found) break;
  }
  return k;
}

// The first position of a value that a run of n contains.
template <class B, class T>
DLSYS_INLINE int64_t Find(const T* x, int64_t n, T value) {
  int64_t k = SkipBlocks<B, 4 * kLanes>(x, 0, n, value);
  k = SkipBlocks<B, kLanes>(x, k, n, value);
  while (!B::IsEqual(x[k], value)) k++;
  return k;
}

// The best value of each column of a strip, and its first row of n.
template <class B, class T>
DLSYS_INLINE void BestOfStrip(const T* x, const Columns& s, const Strip& strip, T* value,
                              int64_t* row) {
  const int64_t folded = FoldedRows(s, strip), cols = strip.cols;
  const int64_t width = folded * cols, stride = folded * s.inner;
  T best[kColumns];
  int32_t at[kColumns];
  std::copy(x, x + width, best);
  std::fill(at, at + width, 0);
  auto step = [&](int32_t k, int64_t count) __attribute__((always_inline)) {
    for (int64_t c = 0; c < count; c++) {
      const bool better = B::IsBetter(x[c], best[c]);
      best[c] = better ? x[c] : best[c];
      at[c] = better ? k : at[c];
    }
  };
  int32_t wide = 0;
  for (; (wide + 1) * folded <= strip.rows; wide++, x += stride) step(wide, width);
  step(wide, (strip.rows - wide * folded) * cols);
  for (int64_t c = 0; c < cols; c++) {
    value[c] = best[c];
    row[c] = at[c] * folded;
    for (int64_t a = 1; a < folded; a++) {
      const T other = best[a * cols + c];
      const int64_t other_row = at[a * cols + c] * folded + a;
      const bool earlier = B::IsEqual(other, value[c]) && other_row < row[c];
      if (!earlier && !B::IsBetter(other, value[c])) continue;
      value[c] = other;
      row[c] = other_row;
    }
    row[c] += strip.first;
  }
}

template <class B, class T>
void ArgShort(const T* x, const Columns& s, int64_t* y) {
  auto block = [=](const T* from, const int32_t* start, int64_t first, int count)
                   __attribute__((always_inline)) {
                     T best[kLanes];
                     int32_t at[kLanes];
                     for (int j = 0; j < kLanes; j++) {
                       best[j] = from[start[j]];
                       at[j] = 0;
                     }
                     for (int64_t r = 1; r < s.n; r++) {
                       for (int j = 0; j < kLanes; j++) {
                         const T value = from[start[j] + r * s.inner];
                         const bool better = B::IsBetter(value, best[j]);
                         best[j] = better ? value : best[j];
                         at[j] = better ? (int32_t)r : at[j];
                       }
                     }
                     for (int j = 0; j < count; j++) y[first + j] = at[j];
                   };
  ForShort(x, s, block);
}

// Row-wise: the best value of each group, then its position in the best group.
template <class B, class T>
void ArgRuns(const T* x, const Columns& s, int64_t* y) {
  const int64_t groups = s.Groups(), length = s.GroupLength();
  const ScratchArray<T> best_of_group(s.outer * groups);
  T* values = best_of_group.data();
  ForGroups(s, [=](const Strip& strip) __attribute__((always_inline)) {
    values[strip.to] = ReduceRun<typename B::Monoid>(x + strip.from, strip.rows);
  });
  ParallelFor(s.outer, RowGrain(std::min(s.n, length)), [=](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      for (int64_t o = begin; o < end; o++) {
        const T* value = values + o * groups;
        int64_t best = 0;
        for (int64_t g = 1; g < groups; g++)
          if (B::IsBetter(value[g], value[best])) best = g;
        const int64_t first = best * length;
        y[o] = first + Find<B>(x + o * s.n + first, std::min(length, s.n - first), value[best]);
      }
    });
  });
}

template <class B, class T>
void ArgColumns(const T* x, const Columns& s, int64_t* y) {
  const int64_t groups = s.Groups(), results = s.outer * groups * s.inner;
  const ScratchArray<T> best_of_group(results);
  const ScratchArray<int64_t> row_of_group(groups > 1 ? results : 0);
  T* values = best_of_group.data();
  int64_t* rows = groups > 1 ? row_of_group.data() : y;
  ForGroups(s, [=](const Strip& strip) __attribute__((always_inline)) {
    BestOfStrip<B>(x + strip.from, s, strip, values + strip.to, rows + strip.to);
  });
  if (groups == 1) return;
  ForStrips({s.outer, groups, s.inner}, [&](int64_t o, int64_t col, int64_t cols) {
    for (int64_t c = col; c < col + cols; c++) {
      int64_t best = o * groups * s.inner + c;
      for (int64_t g = 1; g < groups; g++) {
        const int64_t at = (o * groups + g) * s.inner + c;
        if (B::IsBetter(values[at], values[best])) best = at;
      }
      y[o * s.inner + c] = rows[best];
    }
  });
}

template <bool kMax, class T>
void ArgOf(const T* x, const Columns& s, int64_t* y) {
  using B = Best<kMax, T>;
  if (s.IsShort()) return ArgShort<B>(x, s, y);
  if (s.inner == 1) return ArgRuns<B>(x, s, y);
  ArgColumns<B>(x, s, y);
}

template <bool kMax>
void Arg(const DLArray* x, DLArray* y) {
  const char* op = kMax ? "argmax" : "argmin";
  const Columns s = CheckedColumns(op, x, y);
  if (y->dtype != DL_INT64) Fail("%s: expected int64, got %s", op, DtypeText(y->dtype));
  if (Numel(y) == 0) return;
  if (s.n == 0) Fail("%s: shape %s has no elements to choose from", op, ShapeText(x).c_str());
  int64_t* out = (int64_t*)y->data;
  switch (x->dtype) {
    case DL_FLOAT32:
      return ArgOf<kMax>((const float*)x->data, s, out);
    case DL_INT32:
      return ArgOf<kMax>((const int32_t*)x->data, s, out);
    case DL_INT64:
      return ArgOf<kMax>((const int64_t*)x->data, s, out);
    case DL_UINT8:
    case DL_BOOL:
      return ArgOf<kMax>((const uint8_t*)x->data, s, out);
  }
  Fail("%s: does not take %s", op, DtypeText(x->dtype));
}

// mask (outer, n, inner): 1 at the first element of each column that equals y (outer, inner).
void FirstMatch(const DLArray* x, const DLArray* y, DLArray* mask) {
  const char* op = "first_match";
  const float* in = Input(op, x);
  const float* wanted = Input(op, y);
  const Columns s = CheckedColumns(op, x, y);
  CheckedColumns(op, x, mask, true);
  if (mask->dtype != DL_BOOL) Fail("%s: expected bool, got %s", op, DtypeText(mask->dtype));
  uint8_t* out = (uint8_t*)mask->data;
  ForStrips(s, [&](int64_t o, int64_t col, int64_t cols) {
    uint8_t open[kColumns];  // nothing found yet
    std::fill(open, open + cols, (uint8_t)1);
    const float* target = wanted + o * s.inner + col;
    for (int64_t r = 0; r < s.n; r++) {
      const int64_t at = (o * s.n + r) * s.inner + col;
      for (int64_t c = 0; c < cols; c++) {
        const float value = in[at + c], sought = target[c];
        const bool equal = value == sought || (value != value && sought != sought);
        out[at + c] = open[c] & (uint8_t)equal;
        open[c] &= (uint8_t)!out[at + c];
      }
    }
  });
}

DLSYS_KERNEL(cpu, argmax, Arg<true>);
DLSYS_KERNEL(cpu, argmin, Arg<false>);
DLSYS_KERNEL(cpu, first_match, FirstMatch);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
