// Reductions along the middle axis of x (outer, n, inner) -> y (outer, inner) on the CPU: max, min,
// product (carried in double) and logsumexp (two-pass: the maximum, then the sum of exponentials).
#include "cpu/reduce/columns.h"
#include "math/functors.h"

namespace dlsys {
namespace cpu {
namespace {

struct Prod {
  using State = double;
  static constexpr const char* name = "reduce_prod";
  static constexpr bool kIdempotent = false;
  static constexpr double kIdentity = 1;
  DLSYS_INLINE double operator()(double a, double b) const { return a * b; }
};
using Max = MaxMonoid<float>;
using Min = MinMonoid<float>;

// ---- max, min, prod ----

template <class F, class T, class U>
DLSYS_INLINE void ReduceStrip(const T* x, const Columns& s, const Strip& strip, U* to) {
  if (s.inner == 1) {
    *to = (U)ReduceRun<F>(x, strip.rows);
    return;
  }
  const int64_t folded = FoldedRows(s, strip), cols = strip.cols;
  const int64_t width = folded * cols, stride = folded * s.inner;
  typename F::State state[kColumns];
  std::fill(state, state + width, F::kIdentity);
  int64_t r = 0;
  for (; r + folded <= strip.rows; r += folded, x += stride)
    for (int64_t c = 0; c < width; c++) state[c] = F()(state[c], x[c]);
  for (int64_t c = 0; c < (strip.rows - r) * cols; c++) state[c] = F()(state[c], x[c]);
  for (int64_t c = cols; c < width; c++) state[c % cols] = F()(state[c % cols], state[c]);
  for (int64_t c = 0; c < cols; c++) to[c] = (U)state[c];
}

template <class F, class T>
void ReduceShort(const T* x, const Columns& s, float* y) {
  auto block = [=](const T* from, const int32_t* start, int64_t first, int count)
                   __attribute__((always_inline)) {
                     typename F::State state[kLanes];
                     for (int j = 0; j < kLanes; j++) state[j] = F::kIdentity;
                     for (int64_t r = 0; r < s.n; r++)
                       for (int j = 0; j < kLanes; j++)
                         state[j] = F()(state[j], from[start[j] + r * s.inner]);
                     for (int j = 0; j < count; j++) y[first + j] = (float)state[j];
                   };
  ForShort(x, s, block);
}

template <class F, class T, class U>
void ReduceGroups(const T* x, const Columns& s, U* y) {
  ForGroups(s, [=](const Strip& strip) __attribute__((always_inline)) {
    ReduceStrip<F>(x + strip.from, s, strip, y + strip.to);
  });
}

template <class F>
void ReduceTo(const float* x, const Columns& s, float* y) {
  if (s.IsShort()) return ReduceShort<F>(x, s, y);
  const int64_t groups = s.Groups();
  if (groups == 1) return ReduceGroups<F>(x, s, y);
  using State = typename F::State;
  const ScratchArray<State> of_group(s.outer * groups * s.inner);
  State* partial = of_group.data();
  ReduceGroups<F>(x, s, partial);
  ForStrips({s.outer, groups, s.inner}, [=](int64_t o, int64_t col, int64_t cols) {
    for (int64_t c = col; c < col + cols; c++) {
      State state = F::kIdentity;
      for (int64_t g = 0; g < groups; g++)
        state = F()(state, partial[(o * groups + g) * s.inner + c]);
      y[o * s.inner + c] = (float)state;
    }
  });
}

template <class F>
void Reduce(const DLArray* x, DLArray* y) {
  const float* in = Input(F::name, x);
  float* out = Output(F::name, y);
  const Columns s = CheckedColumns(F::name, x, y);
  if (Numel(y)) ReduceTo<F>(in, s, out);
}

// ---- logsumexp ----

// What is subtracted before exp: the maximum, or 0 where it is infinite, as inf - inf would be NaN.
DLSYS_INLINE float Shift(float max) {
  return max == Max::kIdentity || max == Min::kIdentity ? 0.f : max;
}

DLSYS_INLINE float LogSumExpRun(const float* x, int64_t n) {
  const float shift = Shift(ReduceRun<Max>(x, n));
  const double sum =
      SumOf(Row{x, n, n}, Max::kIdentity,
            [=](float value) __attribute__((always_inline)) { return fn::exp(value - shift); });
  return fn::log((float)sum) + shift;
}

void LogSumExpShort(const float* x, const Columns& s, float* y) {
  auto block = [=](const float* from, const int32_t* start, int64_t first, int count)
                   __attribute__((always_inline)) {
                     float shift[kLanes];
                     double sum[kLanes] = {};
                     for (int j = 0; j < kLanes; j++) shift[j] = Max::kIdentity;
                     for (int64_t r = 0; r < s.n; r++)
                       for (int j = 0; j < kLanes; j++)
                         shift[j] = Max()(shift[j], from[start[j] + r * s.inner]);
                     for (int j = 0; j < kLanes; j++) shift[j] = Shift(shift[j]);
                     for (int64_t r = 0; r < s.n; r++)
                       for (int j = 0; j < kLanes; j++)
                         sum[j] += fn::exp(from[start[j] + r * s.inner] - shift[j]);
                     for (int j = 0; j < kLanes; j++) shift[j] += fn::log((float)sum[j]);
                     for (int j = 0; j < count; j++) y[first + j] = shift[j];
                   };
  ForShort(x, s, block);
}

// The sums of exp(x - shift) over the rows of a strip.
DLSYS_INLINE void SumExpOfStrip(const float* x, const Columns& s, const Strip& strip,
                                const float* max, double* to) {
  const int64_t folded = FoldedRows(s, strip), cols = strip.cols;
  const int64_t width = folded * cols, stride = folded * s.inner;
  float shift[kColumns];
  double sum[kColumns];
  for (int64_t c = 0; c < cols; c++) shift[c] = Shift(max[c]);
  for (int64_t c = cols; c < width; c++) shift[c] = shift[c - cols];
  std::fill(sum, sum + width, 0.0);
  int64_t r = 0;
  for (; r + folded <= strip.rows; r += folded, x += stride)
    for (int64_t c = 0; c < width; c++) sum[c] += fn::exp(x[c] - shift[c]);
  for (int64_t c = 0; c < (strip.rows - r) * cols; c++) sum[c] += fn::exp(x[c] - shift[c]);
  for (int64_t c = cols; c < width; c++) sum[c % cols] += sum[c];
  std::copy(sum, sum + cols, to);
}

void LogSumExpColumns(const float* x, const Columns& s, float* y) {
  ReduceTo<Max>(x, s, y);
  const int64_t groups = s.Groups();
  const ScratchArray<double> of_group(s.outer * groups * s.inner);
  double* sums = of_group.data();
  ForGroups(s, [=](const Strip& strip) __attribute__((always_inline)) {
    const int64_t o = strip.to / (groups * s.inner), col = strip.to % s.inner;
    SumExpOfStrip(x + strip.from, s, strip, y + o * s.inner + col, sums + strip.to);
  });
  ForStrips({s.outer, groups, s.inner}, [=](int64_t o, int64_t col, int64_t cols) {
    for (int64_t c = col; c < col + cols; c++) {
      double sum = 0;
      for (int64_t g = 0; g < groups; g++) sum += sums[(o * groups + g) * s.inner + c];
      float* result = y + o * s.inner + c;
      *result = fn::log((float)sum) + Shift(*result);
    }
  });
}

void LogSumExp(const DLArray* x, DLArray* y) {
  const char* op = "reduce_logsumexp";
  const float* in = Input(op, x);
  float* out = Output(op, y);
  const Columns s = CheckedColumns(op, x, y);
  if (Numel(y) == 0) return;
  if (s.IsShort()) return LogSumExpShort(in, s, out);
  if (s.inner > 1) return LogSumExpColumns(in, s, out);
  ParallelFor(s.outer, RowGrain(s.n), [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      for (int64_t o = begin; o < end; o++) out[o] = LogSumExpRun(in + o * s.n, s.n);
    });
  });
}

DLSYS_KERNEL(cpu, reduce_max, Reduce<Max>);
DLSYS_KERNEL(cpu, reduce_min, Reduce<Min>);
DLSYS_KERNEL(cpu, reduce_prod, Reduce<Prod>);
DLSYS_KERNEL(cpu, reduce_logsumexp, LogSumExp);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
