// argmax and argmin along the middle axis of x (outer, n, inner) -> (outer, inner) of int64, which
// are reductions by a monoid (axes.h), and the mask of the first element that equals its extreme,
// on the CPU. The first of equals counts, and NaN precedes all values.
#include <limits>

#include "cpu/reduce/axes.h"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cpu {
namespace {

template <bool kMax, class T>
DLSYS_INLINE bool IsBetter(T x, T best) {
  return (kMax ? x > best : x < best) | ((x != x) & (best == best));
}
template <class T>
DLSYS_INLINE bool IsEqual(T x, T y) {
  return (x == y) | ((x != x) & (y != y));
}

// The extreme alone, NaN where there is one.
template <bool kMax, class T>
struct Extreme {
  using State = T;
  using Limits = std::numeric_limits<T>;
  static constexpr T kHighest = Limits::has_infinity ? Limits::infinity() : Limits::max();
  static constexpr T kLowest = Limits::has_infinity ? -kHighest : Limits::lowest();
  static constexpr T kIdentity = kMax ? kLowest : kHighest;
  DLSYS_INLINE static T Of(T x) { return x; }
  DLSYS_INLINE static T Combine(T a, T b) {
    const T better = (kMax ? b > a : b < a) ? b : a;
    return b != b ? b : better;
  }
};

// Skips the blocks from k on that do not contain a value.
template <int kBlock, class E, class T>
DLSYS_INLINE int64_t SkipBlocks(const E* x, int64_t k, int64_t n, T value) {
  for (; k + kBlock <= n; k += kBlock) {
    int found = 0;
    for (int j = 0; j < kBlock; j++) found |= IsEqual<T>(x[k + j], value);
    if (found) break;
  }
  return k;
}

template <class T>
struct Indexed {
  T value;
  int64_t index;
};

template <bool kMax, class T>
struct ArgMonoid {
  using State = Indexed<T>;
  using Value = Extreme<kMax, T>;
  static constexpr int64_t kNarrow = kFoldedColumns / 2;

  DLSYS_INLINE static bool IsShort(int64_t n, int64_t) { return n <= kShort; }
  DLSYS_INLINE static State Identity() { return {Value::kIdentity, INT64_MAX}; }
  DLSYS_INLINE static State Combine(State a, State b) {
    const bool earlier = IsEqual(b.value, a.value) && b.index < a.index;
    return earlier || IsBetter<kMax>(b.value, a.value) ? b : a;
  }
  // A run gives its extreme and where it begins; the result looks for it in the best run.
  template <class E>
  DLSYS_INLINE static State Run(const RowOf<E>& x, int64_t first) {
    return {Listed<Value>::Run(x, first), first};
  }
  template <class E>
  DLSYS_INLINE static int64_t Result(State s, const RowOf<E>& x) {
    if (x.n == 0) return s.index;
    int64_t k = SkipBlocks<4 * kLanes>(x.data, s.index, x.n, s.value);
    k = SkipBlocks<kLanes>(x.data, k, x.n, s.value);
    while (!IsEqual<T>(x.data[k], s.value)) k++;
    return k;
  }

  template <int N>
  struct Block {
    alignas(64) T best[N];
    alignas(64) int32_t at[N];
    template <class F>
    DLSYS_INLINE void Reduce(const F& rows, const Tile& t) {
      std::fill(best, best + t.width, Value::kIdentity);
      std::fill(at, at + t.width, 0);
      auto add = [&](const auto& row, int64_t cols, int64_t k) __attribute__((always_inline)) {
        for (int64_t c = 0; c < cols; c++) {
          const T value = row[c];
          const bool better = IsBetter<kMax>(value, best[c]);
          best[c] = better ? value : best[c];
          at[c] = better ? (int32_t)k : at[c];
        }
      };
      EachRow(rows, t, add);
    }
    DLSYS_INLINE State Get(int64_t c, int64_t a, const Tile& t) const {
      const int64_t k = a * t.cols + c;
      return {best[k], t.first + at[k] * (t.width / t.cols) + a};
    }
  };
};

template <bool kMax>
void Arg(const DLArray* x, DLArray* y) {
  const char* op = kMax ? "argmax" : "argmin";
  Check(op, x);
  Check(op, y);
  const Extents of = CheckedExtents(op, x, y);
  if (y->dtype != DL_INT64) Fail("%s: expected int64, got %s", op, DtypeText(y->dtype));
  if (Numel(y) == 0) return;
  if (of.n == 0) Fail("%s: shape %s has no elements to choose from", op, ShapeText(x).c_str());
  const int64_t middle = 1 << 1;
  WithComparable(op, x->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using Compared = std::conditional_t<kIs16Bit<T>, float, T>;
    Reduce<T, int64_t>(ArgMonoid<kMax, Compared>(), x, middle, y);
  });
}

// mask (outer, n, inner): 1 at the first element of each column that equals y (outer, inner).
template <class T>
void FirstMatch(const DLArray* x, const DLArray* y, DLArray* mask) {
  const char* op = "first_match";
  const T* in = Input<T>(op, x);
  const T* wanted = Input<T>(op, y);
  Check(op, mask);
  const Extents of = CheckedExtents(op, x, y);
  CheckedExtents(op, x, mask, true);
  if (mask->dtype != DL_BOOL) Fail("%s: expected bool, got %s", op, DtypeText(mask->dtype));
  if (Numel(mask) == 0) return;
  uint8_t* out = (uint8_t*)mask->data;
  const int64_t width = std::min(of.inner, kColumns), strips = (of.inner - 1) / width + 1;
  auto strip = [=](int64_t o, int64_t col, int64_t cols) {
    uint8_t open[kColumns];  // nothing found yet
    std::fill(open, open + cols, (uint8_t)1);
    const T* target = wanted + o * of.inner + col;
    for (int64_t r = 0; r < of.n; r++) {
      const int64_t at = (o * of.n + r) * of.inner + col;
      for (int64_t c = 0; c < cols; c++) {
        out[at + c] = open[c] & (uint8_t)IsEqual<float>(in[at + c], target[c]);
        open[c] &= (uint8_t)!out[at + c];
      }
    }
  };
  ParallelFor(of.outer * strips, RowGrain(width * of.n), [=](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const int64_t col = k % strips * width;
      strip(k / strips, col, std::min(width, of.inner - col));
    }
  });
}

DLSYS_KERNEL_ANY(cpu, argmax, Arg<true>);
DLSYS_KERNEL_ANY(cpu, argmin, Arg<false>);
DLSYS_KERNEL_TYPED(cpu, first_match, FirstMatch);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
