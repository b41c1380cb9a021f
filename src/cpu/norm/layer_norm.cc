// Layer, group, instance and RMS normalization on the CPU, row-wise, forward and backward. The
// variance is two-pass; backward recomputes the statistics while the row is in the cache. dx may be
// dy. Sums are float32 for every storage type of x; scale and bias are of either. Memory bandwidth
// limits it.
#include <cmath>

#include "cpu/norm/channels.h"
#include "cpu/reduce/rows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

// Rows of `length` values whose scale and bias go by channel; a row holds complete channels.
struct Layout {
  Channels channels;
  int64_t length, rows, groups;  // groups: rows of one image

  Layout(const char* op, const DLArray* x, const DLArray* scale, int64_t length, int64_t inner)
      : length(length) {
    const int64_t n = Numel(x), count = Numel(scale);
    int64_t image;
    if (length < 0 || inner < 0 || __builtin_mul_overflow(count, inner, &image) ||
        (image ? n % image : n) || (length ? image % length : n))
      Fail("%s: rows of %ld values do not fit x %s and scale %s", op, (long)length,
           ShapeText(x).c_str(), ShapeText(scale).c_str());
    channels = {image ? n / image : 0, count, inner};
    rows = length ? n / length : 0;
    groups = length ? image / length : 0;
  }
  int64_t FirstChannel(int64_t row) const { return row % groups * (length / channels.inner); }
};

struct RowStatistics {
  float mean, inverse;
};

template <class T>
DLSYS_INLINE double Squares(const RowOf<T>& row, float mean) {
  return SumOf(row, mean,
               [=](float v) __attribute__((always_inline)) { return (v - mean) * (v - mean); });
}

template <class T>
DLSYS_INLINE RowStatistics StatisticsOf(const RowOf<T>& row, bool centered, float eps) {
  const double n = (double)row.n;
  const double mean = centered ? SumOf(row) / n : 0;
  const float rounded = (float)mean;
  const double offset = mean - rounded;
  const double variance = Squares(row, rounded) / n - offset * offset;
  return {rounded, (float)(1 / std::sqrt(variance + eps))};
}

// Rows of a task.
int64_t GrainOf(const Layout& layout) { return RowGrain((layout.length + kLanes) * 4); }

// Calls body(row, its offset), each row on some thread.
template <class Body>
void ForRows(const Layout& layout, const Body& body) {
  ParallelFor(layout.rows, GrainOf(layout), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t r = begin; r < end; r++) body(r, r * layout.length);
    });
  });
}

// Calls apply(k, channel) for the elements k of a row that starts at `at`.
template <class Apply>
DLSYS_INLINE void ForElements(const Layout& layout, int64_t row, int64_t at, const Apply& apply) {
  const int64_t inner = layout.channels.inner;
  int64_t c = layout.FirstChannel(row);
  if (inner == 1) {
    DLSYS_IVDEP
    for (int64_t k = 0; k < layout.length; k++) apply(at + k, c + k);
    return;
  }
  for (int64_t k = at; k < at + layout.length; k += inner, c++) {
    DLSYS_IVDEP
    for (int64_t j = 0; j < inner; j++) apply(k + j, c);
  }
}

template <class T>
void RowNormalize(const DLArray* x, const DLArray* scale, const DLArray* bias, int64_t length,
                  int64_t inner, int64_t centered, float eps, DLArray* y) {
  const char* op = "row_normalize";
  const T* in = Input<T>(op, x);
  Check(op, scale);
  const Layout layout(op, x, scale, length, inner);
  const ChannelFloats<T> of_scale(op, scale, layout.channels.count);
  const ChannelFloats<T> of_bias(op, bias, layout.channels.count);
  CheckSameShape(op, x, y);
  const float *scales = of_scale.data(), *biases = of_bias.data();
  T* out = Output<T>(op, y);
  ForRows(layout, [&](int64_t r, int64_t at) __attribute__((always_inline)) {
    const RowStatistics of = StatisticsOf(RowOf<T>{in + at, length, length}, centered, eps);
    ForElements(layout, r, at, [=](int64_t k, int64_t c) __attribute__((always_inline)) {
      out[k] = T((in[k] - of.mean) * of.inverse * scales[c] + biases[c]);
    });
  });
}

template <class T>
struct GradientArrays {
  const T* x;
  const float* scale;
  const T* dy;
  T* dx;
};

// With d = dy * scale: dx = (d - mean(d) - xhat * mean(d * xhat)) / deviation, without mean(d)
// where rows are not centered. `d` has room for a row and may be the row of dx.
template <class T>
DLSYS_INLINE void GradientOfRow(const Layout& layout, const GradientArrays<T>& arrays, int64_t row,
                                int64_t at, bool centered, float eps, float* d) {
  const T *in = arrays.x, *gradients = arrays.dy;
  const float* scales = arrays.scale;
  T* out = arrays.dx;
  const int64_t length = layout.length;
  const RowOf<T> values{in + at, length, length};
  const Row of_d{d, length, length};
  const RowStatistics of = StatisticsOf(values, centered, eps);
  ForElements(layout, row, at, [=](int64_t k, int64_t c) __attribute__((always_inline)) {
    d[k - at] = gradients[k] * scales[c];
  });
  auto term = [=](float v, float g) __attribute__((always_inline)) { return (v - of.mean) * g; };
  const double product = SumOf(values, of.mean, of_d, 0.f, term) * of.inverse / (double)length;
  const float projection = (float)(product * of.inverse);
  const float shift = centered ? (float)(SumOf(of_d) / (double)length) : 0.f;
  DLSYS_IVDEP
  for (int64_t k = at; k < at + length; k++)
    out[k] = T((d[k - at] - (shift + (in[k] - of.mean) * projection)) * of.inverse);
}

// dx may be dy. In float32 it holds d in between; rows of 16 bits have scratch for that.
template <class T>
void RowNormalizeGradient(const DLArray* x, const DLArray* scale, const DLArray* dy, int64_t length,
                          int64_t inner, int64_t centered, float eps, DLArray* dx) {
  const char* op = "row_normalize_gradient";
  const T* in = Input<T>(op, x);
  Check(op, scale);
  const Layout layout(op, x, scale, length, inner);
  CheckSameShape(op, x, dy);
  CheckSameShape(op, x, dx);
  const ChannelFloats<T> scales(op, scale, layout.channels.count);
  const GradientArrays<T> arrays{in, scales.data(), Input<T>(op, dy), Output<T>(op, dx)};
  if constexpr (!kIs16Bit<T>) {
    ForRows(layout, [&](int64_t r, int64_t at) __attribute__((always_inline)) {
      GradientOfRow(layout, arrays, r, at, centered, eps, arrays.dx + at);
    });
  } else {
    auto make = [=] { return ScratchArray<float>(length); };
    ParallelForWithScratch(layout.rows, GrainOf(layout), make,
                           [&](int64_t begin, int64_t end, const ScratchArray<float>& d) {
                             Dispatch([&]() __attribute__((always_inline)) {
                               for (int64_t r = begin; r < end; r++)
                                 GradientOfRow(layout, arrays, r, r * length, centered, eps,
                                               d.data());
                             });
                           });
  }
}

// dscale and dbias, sums over all rows; `scale` gives the number of channels.
template <class T>
void RowNormalizeSums(const DLArray* x, const DLArray* scale, const DLArray* dy, int64_t length,
                      int64_t inner, int64_t centered, float eps, DLArray* dscale, DLArray* dbias) {
  const char* op = "row_normalize_sums";
  const T* in = Input<T>(op, x);
  Check(op, scale);
  const Layout layout(op, x, scale, length, inner);
  CheckSameShape(op, x, dy);
  const T* gradients = Input<T>(op, dy);
  float* of_scale = ChannelResult(op, dscale, layout.channels.count);
  float* of_bias = ChannelResult(op, dbias, layout.channels.count);
  const ScratchArray<float> of_rows(2 * layout.rows);
  float* mean = of_rows.data();
  float* inverse = mean + layout.rows;
  ForRows(layout, [=](int64_t r, int64_t at) __attribute__((always_inline)) {
    const RowStatistics of = StatisticsOf(RowOf<T>{in + at, length, length}, centered, eps);
    mean[r] = of.mean;
    inverse[r] = of.inverse;
  });
  const int64_t per = length && inner ? length / inner : 1;
  ChannelSums(in, gradients, layout.channels, {mean, inverse, layout.groups, per}, of_scale,
              of_bias);
}

DLSYS_KERNEL_TYPED(cpu, row_normalize, RowNormalize);
DLSYS_KERNEL_TYPED(cpu, row_normalize_gradient, RowNormalizeGradient);
DLSYS_KERNEL_TYPED(cpu, row_normalize_sums, RowNormalizeSums);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
