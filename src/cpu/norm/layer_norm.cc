// Layer, group, instance and RMS normalization on the CPU, row-wise, forward and backward. The
// variance is two-pass; backward recomputes the statistics while the row is in the cache. dx may be
// dy.
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

DLSYS_INLINE double Squares(const Row& row, float mean) {
  return SumOf(row, mean,
               [=](float v) __attribute__((always_inline)) { return (v - mean) * (v - mean); });
}

DLSYS_INLINE RowStatistics StatisticsOf(const Row& row, bool centered, float eps) {
  const double n = (double)row.n;
  const double mean = centered ? SumOf(row) / n : 0;
  const float rounded = (float)mean;
  const double offset = mean - rounded;
  const double variance = Squares(row, rounded) / n - offset * offset;
  return {rounded, (float)(1 / std::sqrt(variance + eps))};
}

// Calls body(row, its offset), each row on some thread.
template <class Body>
void ForRows(const Layout& layout, const Body& body) {
  const int64_t grain = RowGrain((layout.length + kLanes) * 4);
  ParallelFor(layout.rows, grain, [&](int64_t begin, int64_t end) {
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

void RowNormalize(const DLArray* x, const DLArray* scale, const DLArray* bias, int64_t length,
                  int64_t inner, int64_t centered, float eps, DLArray* y) {
  const char* op = "row_normalize";
  const float* in = Input(op, x);
  const float* scales = Input(op, scale);
  const Layout layout(op, x, scale, length, inner);
  const float* biases = PerChannel(op, bias, layout.channels.count);
  CheckSameShape(op, x, y);
  float* out = Output(op, y);
  ForRows(layout, [&](int64_t r, int64_t at) __attribute__((always_inline)) {
    const RowStatistics of = StatisticsOf(Row{in + at, length, length}, centered, eps);
    ForElements(layout, r, at, [=](int64_t k, int64_t c) __attribute__((always_inline)) {
      out[k] = (in[k] - of.mean) * of.inverse * scales[c] + biases[c];
    });
  });
}

// With d = dy * scale: dx = (d - mean(d) - xhat * mean(d * xhat)) / deviation, without mean(d)
// where rows are not centered. dx holds d in between; it may be dy.
void RowNormalizeGradient(const DLArray* x, const DLArray* scale, const DLArray* dy, int64_t length,
                          int64_t inner, int64_t centered, float eps, DLArray* dx) {
  const char* op = "row_normalize_gradient";
  const float* in = Input(op, x);
  const float* scales = Input(op, scale);
  const float* gradients = Input(op, dy);
  const Layout layout(op, x, scale, length, inner);
  CheckSameShape(op, x, dy);
  CheckSameShape(op, x, dx);
  float* out = Output(op, dx);
  ForRows(layout, [&](int64_t r, int64_t at) __attribute__((always_inline)) {
    const Row values{in + at, length, length}, d{out + at, length, length};
    const RowStatistics of = StatisticsOf(values, centered, eps);
    ForElements(layout, r, at, [=](int64_t k, int64_t c) __attribute__((always_inline)) {
      out[k] = gradients[k] * scales[c];
    });
    auto term = [=](float v, float g) __attribute__((always_inline)) { return (v - of.mean) * g; };
    const double product = SumOf(values, of.mean, d, 0.f, term) * of.inverse / (double)length;
    const float projection = (float)(product * of.inverse);
    const float shift = centered ? (float)(SumOf(d) / (double)length) : 0.f;
    DLSYS_IVDEP
    for (int64_t k = at; k < at + length; k++)
      out[k] = (out[k] - (shift + (in[k] - of.mean) * projection)) * of.inverse;
  });
}

// dscale and dbias, sums over all rows; `scale` gives the number of channels.
void RowNormalizeSums(const DLArray* x, const DLArray* scale, const DLArray* dy, int64_t length,
                      int64_t inner, int64_t centered, float eps, DLArray* dscale, DLArray* dbias) {
  const char* op = "row_normalize_sums";
  const float* in = Input(op, x);
  Check(op, scale);
  const Layout layout(op, x, scale, length, inner);
  CheckSameShape(op, x, dy);
  const float* gradients = Input(op, dy);
  float* of_scale = ChannelResult(op, dscale, layout.channels.count);
  float* of_bias = ChannelResult(op, dbias, layout.channels.count);
  const ScratchArray<float> of_rows(2 * layout.rows);
  float* mean = of_rows.data();
  float* inverse = mean + layout.rows;
  ForRows(layout, [=](int64_t r, int64_t at) __attribute__((always_inline)) {
    const RowStatistics of = StatisticsOf(Row{in + at, length, length}, centered, eps);
    mean[r] = of.mean;
    inverse[r] = of.inverse;
  });
  const int64_t per = length && inner ? length / inner : 1;
  ChannelSums(in, gradients, layout.channels, {mean, inverse, layout.groups, per}, of_scale,
              of_bias);
}

DLSYS_KERNEL(cpu, row_normalize, RowNormalize);
DLSYS_KERNEL(cpu, row_normalize_gradient, RowNormalizeGradient);
DLSYS_KERNEL(cpu, row_normalize_sums, RowNormalizeSums);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
