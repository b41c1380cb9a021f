// Sums over any axes, and the reductions of the middle axis of x (outer, n, inner) by a monoid on
// the CPU: max, min, product and logsumexp. NaN propagates. The output never overlaps the input; a
// sum of floats of 16 bits may be float32. Memory bandwidth limits all but logsumexp.
#include "cpu/reduce/axes.h"
#include "math/integers.h"
#include "math/monoids.h"

namespace dlsys {
namespace cpu {
namespace {

// Values are added in float32 in short stretches and the stretches in double.
struct Sum {
  using State = double;
  static constexpr State kIdentity = 0;
  static constexpr int kTree = 8;
  DLSYS_INLINE static float Of(float x) { return x; }
  DLSYS_INLINE static float Combine(float a, float b) { return a + b; }
  DLSYS_INLINE static double Combine(double a, double b) { return a + b; }
};
struct ScaledSum : Listed<Sum> {
  static constexpr int64_t kNarrow = kLanes;
  float scale;

  explicit ScaledSum(float scale) : scale(scale) {}
  DLSYS_INLINE static bool IsShort(int64_t n, int64_t inner) {
    return n < (inner == 1 ? kLanes : Sum::kTree);  // from 8 on, rows are added in float32
  }
  template <class T>
  DLSYS_INLINE float Result(State s, const RowOf<T>&) const {
    return (float)(s * scale);
  }
  template <class T>
  DLSYS_INLINE static State Run(const RowOf<T>& x, int64_t) {
    return SumOf(x);
  }
};

using Max = monoid::Max;

// What is subtracted before exp: the maximum, or 0 where it is infinite, as inf - inf would be NaN.
DLSYS_INLINE float Shift(float max) {
  return max == -monoid::kInfinity || max == monoid::kInfinity ? 0.f : max;
}

// Two-pass within a run or a tile, which the cache holds: the maximum, then the sum of exp(x -
// max). Stretches of different maxima are rescaled as they combine.
struct MaxAndSum {
  float max;
  double sum;
};
struct LogSumExp {
  static constexpr const char* name = "reduce_logsumexp";
  using State = MaxAndSum;
  static constexpr int64_t kNarrow = Listed<Max>::kNarrow;

  DLSYS_INLINE static bool IsShort(int64_t n, int64_t) { return n <= kShort; }
  DLSYS_INLINE static State Identity() { return {Max::kIdentity, 0.0}; }
  DLSYS_INLINE static State Combine(State a, State b) {
    if (a.sum == 0) return b;
    const float max = Max::Combine(a.max, b.max);
    if (a.max != max) a.sum *= fn::exp(Shift(a.max) - Shift(max));
    if (b.max != max) b.sum *= fn::exp(Shift(b.max) - Shift(max));
    return {max, a.sum + b.sum};
  }
  template <class T>
  DLSYS_INLINE static float Result(State s, const RowOf<T>&) {
    return fn::log((float)s.sum) + Shift(s.max);
  }
  template <class T>
  DLSYS_INLINE static State Run(const RowOf<T>& x, int64_t first) {
    const float max = Listed<Max>::Run(x, first), shift = Shift(max);
    return {max, SumOf(x, (T)Max::kIdentity, [=](float value) __attribute__((always_inline)) {
              return fn::exp(value - shift);
            })};
  }

  template <int N>
  struct Block {
    Listed<Max>::Block<N> max;
    alignas(64) float shift[N];
    alignas(64) double sum[N];
    template <class F>
    DLSYS_INLINE void Reduce(const F& rows, const Tile& t) {
      max.Reduce(rows, t);
      float* const m = max.state;
      for (int64_t c = t.cols; c < t.width; c++) m[c % t.cols] = Max::Combine(m[c % t.cols], m[c]);
      for (int64_t c = t.cols; c < t.width; c++) m[c] = m[c - t.cols];
      for (int64_t c = 0; c < t.width; c++) shift[c] = Shift(m[c]);
      std::fill(sum, sum + t.width, 0.0);
      EachRow(rows, t, [&](const auto& row, int64_t cols, int64_t) __attribute__((always_inline)) {
        for (int64_t c = 0; c < cols; c++) sum[c] += fn::exp(row[c] - shift[c]);
      });
    }
    DLSYS_INLINE State Get(int64_t c, int64_t a, const Tile& t) const {
      return {max.state[a * t.cols + c], sum[a * t.cols + c]};
    }
  };
};

template <class T>
void ReduceSum(const DLArray* x, int64_t axes, float scale, DLArray* y) {
  Input<T>("reduce_sum", x);
  CheckReduced("reduce_sum", x, axes, y);
  if (y->dtype == DL_FLOAT32) {
    Output<float>("reduce_sum", y);
    return Reduce<T, float>(ScaledSum{scale}, x, axes, y);
  }
  Output<T>("reduce_sum", y);
  Reduce<T, T>(ScaledSum{scale}, x, axes, y);
}

constexpr int64_t kMiddle = 1 << 1;  // of (outer, n, inner)

template <class T, class R>
void ReduceMiddle(const DLArray* x, DLArray* y) {
  Input<T>(R::name, x);
  Output<T>(R::name, y);
  CheckedExtents(R::name, x, y);
  Reduce<T, T>(R(), x, kMiddle, y);
}

// Reductions of int64.
template <class M>
struct Integer : Listed<M> {
  template <class T>
  DLSYS_INLINE static int64_t Result(int64_t s, const RowOf<T>&) {
    return s;
  }
};

void ReduceIntegerSum(const DLArray* x, int64_t axes, float, DLArray* y) {
  Input<int64_t>("reduce_sum", x);
  Output<int64_t>("reduce_sum", y);
  CheckReduced("reduce_sum", x, axes, y);
  Reduce<int64_t, int64_t>(Integer<integers::Sum>(), x, axes, y);
}

#define DLSYS_REGISTER_INTEGER(Name, kernel, ...) \
  DLSYS_KERNEL_OF(cpu, kernel, #kernel, DL_INT64, ReduceMiddle<int64_t, Integer<integers::Name>>);
DLSYS_INTEGER_MONOIDS(DLSYS_REGISTER_INTEGER)
DLSYS_KERNEL_OF(cpu, reduce_sum, "reduce_sum", DL_INT64, ReduceIntegerSum);

#define DLSYS_REGISTER_MONOID(Name, kernel, ...) \
  DLSYS_KERNEL_TYPED(cpu, kernel, ReduceMiddle, Listed<monoid::Name>);
DLSYS_MONOIDS(DLSYS_REGISTER_MONOID)
DLSYS_KERNEL_TYPED(cpu, reduce_sum, ReduceSum);
DLSYS_KERNEL_TYPED(cpu, reduce_logsumexp, ReduceMiddle, LogSumExp);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
