// Batch normalization on the CPU, forward and backward, and the channel sums that layer_norm.cc
// shares.
//
// x is (outer, channels, inner). A channel is reduced in parts whose bounds depend on the sizes
// only. A part fits the cache, so that its two-pass variance reads memory once; parts combine in
// order by the parallel variance formula of Chan, Golub and LeVeque (1979). The output of a map may
// be one of its inputs.
#include <cmath>
#include <type_traits>

#include "cpu/norm/channels.h"
#include "cpu/reduce/rows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

#define DLSYS_BODY [&]() __attribute__((always_inline))

Channels ChannelsOf(const char* op, const DLArray* x) {
  if (x->ndim < 2) Fail("%s: expected an array of (N, C, ...), got %s", op, ShapeText(x).c_str());
  Channels shape{x->shape[0], x->shape[1], 1};
  for (int a = 2; a < x->ndim; a++) shape.inner *= x->shape[a];
  return shape;
}

// ---- sums over channels ----

const int kWidth = 32;  // channels of a task where they are neighbors in memory

// Calls body(c, width, begin, end, partials) for blocks of channels c to c + width and parts of the
// outer axis, then done(c, partials of all parts combined in order).
template <class Partial, class Body, class Done>
void ReduceChannels(const Channels& shape, const Body& body, const Done& done) {
  const int64_t width = shape.inner == 1 ? kWidth : 1;
  const int64_t blocks = (shape.count + width - 1) / width;
  const int64_t rows = std::max<int64_t>(1, kGrain / std::max<int64_t>(shape.inner * width, 1));
  const int64_t parts = std::max<int64_t>(1, (shape.outer + rows - 1) / rows);
  const ScratchArray<Partial> of_parts(parts * shape.count);
  Partial* partials = of_parts.data();
  const int64_t work = std::min(rows, shape.outer) * shape.inner * width;
  ParallelFor(blocks * parts, RowGrain(work), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t part = task / blocks, c = task % blocks * width;
      body(c, (int)std::min(width, shape.count - c), part * rows,
           std::min(shape.outer, (part + 1) * rows), partials + part * shape.count + c);
    }
  });
  Serially([&] {
    for (int64_t c = 0; c < shape.count; c++) {
      Partial total = partials[c];
      for (int64_t part = 1; part < parts; part++) total.Combine(partials[part * shape.count + c]);
      done(c, total);
    }
  });
}

struct Moments {
  double count, mean, squares;  // squares: the sum of (x - mean)^2

  void Combine(const Moments& other) {
    const double both = count + other.count;
    if (both == 0) return;
    const double shift = other.mean - mean;
    squares += other.squares + shift * shift * (count * other.count / both);
    mean += shift * (other.count / both);
    count = both;
  }
};

DLSYS_INLINE double SumSquares(const Row& row, float mean) {
  return SumOf(row, mean,
               [=](float v) __attribute__((always_inline)) { return (v - mean) * (v - mean); });
}

// Moments of one channel, contiguous along inner.
void SegmentMoments(const float* x, const Channels& shape, int64_t c, int64_t begin, int64_t end,
                    Moments* out) {
  Dispatch(DLSYS_BODY {
    auto row = [&](int64_t n) __attribute__((always_inline)) {
      const int64_t at = (n * shape.count + c) * shape.inner;
      return Row{x + at, shape.inner, shape.Numel() - at};
    };
    const double count = (double)((end - begin) * shape.inner);
    double sum = 0, squares = 0;
    for (int64_t n = begin; n < end; n++) sum += SumOf(row(n));
    const double mean = count ? sum / count : 0;
    const float rounded = (float)mean;
    for (int64_t n = begin; n < end; n++) squares += SumSquares(row(n), rounded);
    *out = {count, mean, squares - count * (mean - rounded) * (mean - rounded)};
  });
}

// Moments of several channels with inner == 1, a SIMD lane each.
void ColumnMoments(const float* x, const Channels& shape, int64_t c, int width, int64_t begin,
                   int64_t end, Moments* out) {
  Dispatch(DLSYS_BODY {
    double mean[kWidth] = {}, squares[kWidth] = {};
    const double count = (double)(end - begin);
    for (int64_t n = begin; n < end; n++)
      for (int j = 0; j < width; j++) mean[j] += x[n * shape.count + c + j];
    for (int j = 0; j < width; j++) mean[j] = count ? mean[j] / count : 0;
    for (int64_t n = begin; n < end; n++)
      for (int j = 0; j < width; j++) {
        const double d = x[n * shape.count + c + j] - mean[j];
        squares[j] += d * d;
      }
    for (int j = 0; j < width; j++) out[j] = {count, mean[j], squares[j]};
  });
}

void BatchStatistics(const DLArray* x, DLArray* mean, DLArray* variance) {
  const char* op = "batch_statistics";
  const float* in = Input(op, x);
  const Channels shape = ChannelsOf(op, x);
  float* means = ChannelResult(op, mean, shape.count);
  float* variances = ChannelResult(op, variance, shape.count);
  auto body = [&](int64_t c, int width, int64_t begin, int64_t end, Moments* out) {
    if (shape.inner == 1) return ColumnMoments(in, shape, c, width, begin, end, out);
    SegmentMoments(in, shape, c, begin, end, out);
  };
  ReduceChannels<Moments>(shape, body, [&](int64_t c, const Moments& total) {
    means[c] = total.count ? (float)total.mean : NAN;  // of no values, as in numpy
    variances[c] = (float)(total.squares / total.count);
  });
}

struct Sums {
  double scale, bias;  // of dy * (x - mean) * inverse, of dy

  void Combine(const Sums& other) {
    scale += other.scale;
    bias += other.bias;
  }
};

void SegmentSums(const float* x, const float* dy, const Channels& shape, const Statistics& stats,
                 int64_t c, int64_t begin, int64_t end, Sums* out) {
  Dispatch(DLSYS_BODY {
    Sums total{0, 0};
    for (int64_t n = begin; n < end; n++) {
      const int64_t at = (n * shape.count + c) * shape.inner, stat = stats.At(n, c);
      const float mean = stats.mean[stat];
      const Row values{x + at, shape.inner, shape.Numel() - at};
      const Row gradients{dy + at, shape.inner, shape.Numel() - at};
      auto term = [=](float v, float g) __attribute__((always_inline)) { return (v - mean) * g; };
      total.scale += SumOf(values, mean, gradients, 0.f, term) * stats.inverse[stat];
      total.bias += SumOf(gradients);
    }
    *out = total;
  });
}

// Sums of several channels with inner == 1, a SIMD lane each; the statistics of channel j at n have
// index of(n, j). Columns add 16 terms in float32, whose sums are carried in double.
template <class Width, class Of>
DLSYS_INLINE void AddColumns(const float* x, const float* dy, const Channels& shape,
                             const Statistics& stats, int64_t begin, int64_t end, Width width,
                             const Of& of, Sums* out) {
  double scale[kWidth] = {}, bias[kWidth] = {};
  for (int64_t n = begin; n < end;) {
    float scales[kWidth] = {}, biases[kWidth] = {};
    for (const int64_t last = std::min(end, n + 16); n < last; n++) {
      const float* values = x + n * shape.count;
      const float* gradients = dy + n * shape.count;
      for (int j = 0; j < width; j++) {
        const int64_t stat = of(n, j);
        scales[j] += (values[j] - stats.mean[stat]) * stats.inverse[stat] * gradients[j];
        biases[j] += gradients[j];
      }
    }
    for (int j = 0; j < width; j++) {
      scale[j] += scales[j];
      bias[j] += biases[j];
    }
  }
  for (int j = 0; j < width; j++) out[j] = {scale[j], bias[j]};
}

void ColumnSums(const float* x, const float* dy, const Channels& shape, const Statistics& stats,
                int64_t c, int width, int64_t begin, int64_t end, Sums* out) {
  const int64_t first = stats.At(0, c), groups = stats.groups;
  const bool shared = stats.At(0, c + width - 1) == first, own = stats.per == 1;
  const std::integral_constant<int, kWidth> full;
  x += c, dy += c;
  Dispatch(DLSYS_BODY {
    auto of_all = [=](int64_t n, int) __attribute__((always_inline)) { return n * groups + first; };
    auto of_own = [=](int64_t n, int j)
                      __attribute__((always_inline)) { return n * groups + first + j; };
    auto of_any = [=](int64_t n, int j)
                      __attribute__((always_inline)) { return stats.At(n, c + j); };
    if (width == kWidth && shared)
      AddColumns(x, dy, shape, stats, begin, end, full, of_all, out);
    else if (width == kWidth && own)
      AddColumns(x, dy, shape, stats, begin, end, full, of_own, out);
    else
      AddColumns(x, dy, shape, stats, begin, end, width, of_any, out);
  });
}

}  // namespace

void ChannelSums(const float* x, const float* dy, const Channels& shape, const Statistics& stats,
                 float* dscale, float* dbias) {
  if (shape.Numel() == 0) {  // an empty sum is 0, though the deviation of no values is NaN
    return Serially([&] {
      std::fill_n(dscale, shape.count, 0.f);
      std::fill_n(dbias, shape.count, 0.f);
    });
  }
  auto body = [&](int64_t c, int width, int64_t begin, int64_t end, Sums* out) {
    if (shape.inner == 1) return ColumnSums(x, dy, shape, stats, c, width, begin, end, out);
    SegmentSums(x, dy, shape, stats, c, begin, end, out);
  };
  ReduceChannels<Sums>(shape, body, [&](int64_t c, const Sums& total) {
    dscale[c] = (float)total.scale;
    dbias[c] = (float)total.bias;
  });
}

namespace {

// ---- batch normalization ----

// One a channel.
class InverseDeviations {
 public:
  InverseDeviations(const float* variance, int64_t count, float eps) : inverse_(count) {
    Serially([&] {
      for (int64_t c = 0; c < count; c++) data()[c] = 1.f / std::sqrt(variance[c] + eps);
    });
  }
  float* data() const { return inverse_.data(); }

 private:
  const ScratchArray<float> inverse_;
};

// Runs map.Apply(map.Of(c), k) for every element k of channel c.
template <class Map>
void MapChannels(const Channels& shape, const Map& map) {
  const bool columns = shape.inner == 1;
  const int64_t rows = columns ? shape.outer : shape.outer * shape.count;
  const int64_t cols = columns ? shape.count : shape.inner;
  ParallelFor(rows, RowGrain(cols), [&](int64_t begin, int64_t end) {
    Dispatch([=]() __attribute__((always_inline)) {
      for (int64_t r = begin; r < end; r++) {
        const int64_t at = r * cols;
        if (columns) {
          DLSYS_IVDEP
          for (int64_t c = 0; c < cols; c++) map.Apply(map.Of(c), at + c);
        } else {
          const auto of_channel = map.Of(r % shape.count);
          DLSYS_IVDEP
          for (int64_t k = at; k < at + cols; k++) map.Apply(of_channel, k);
        }
      }
    });
  });
}

struct NormalizeMap {
  const float *x, *mean, *inverse, *scale, *bias;
  float* y;
  struct Channel {
    float mean, factor, bias;
  };
  DLSYS_INLINE Channel Of(int64_t c) const { return {mean[c], inverse[c] * scale[c], bias[c]}; }
  DLSYS_INLINE void Apply(const Channel& c, int64_t k) const {
    y[k] = (x[k] - c.mean) * c.factor + c.bias;
  }
};

void BatchNormalize(const DLArray* x, const DLArray* mean, const DLArray* variance,
                    const DLArray* scale, const DLArray* bias, float eps, DLArray* y) {
  const char* op = "batch_normalize";
  const float* in = Input(op, x);
  const Channels shape = ChannelsOf(op, x);
  const float* variances = PerChannel(op, variance, shape.count);
  CheckSameShape(op, x, y);
  const InverseDeviations inverse(variances, shape.count, eps);
  MapChannels(shape, NormalizeMap{in, PerChannel(op, mean, shape.count), inverse.data(),
                                  PerChannel(op, scale, shape.count),
                                  PerChannel(op, bias, shape.count), Output(op, y)});
}

void BatchNormalizeSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                        const DLArray* dy, float eps, DLArray* dscale, DLArray* dbias) {
  const char* op = "batch_normalize_sums";
  const float* in = Input(op, x);
  const Channels shape = ChannelsOf(op, x);
  const float* variances = PerChannel(op, variance, shape.count);
  CheckSameShape(op, x, dy);
  const InverseDeviations inverse(variances, shape.count, eps);
  const Statistics stats{PerChannel(op, mean, shape.count), inverse.data(), 0, 1};
  ChannelSums(in, Input(op, dy), shape, stats, ChannelResult(op, dscale, shape.count),
              ChannelResult(op, dbias, shape.count));
}

struct GradientMap {
  const float *x, *mean, *inverse, *scale, *dscale, *dbias, *dy;
  float share;  // 1 / count
  float* dx;
  struct Channel {
    float mean, factor, shift, projection;
  };
  DLSYS_INLINE Channel Of(int64_t c) const {
    return {mean[c], inverse[c] * scale[c], dbias[c] * share, inverse[c] * dscale[c] * share};
  }
  DLSYS_INLINE void Apply(const Channel& c, int64_t k) const {
    dx[k] = (dy[k] - (c.shift + (x[k] - c.mean) * c.projection)) * c.factor;
  }
};

void BatchNormalizeGradient(const DLArray* x, const DLArray* mean, const DLArray* variance,
                            const DLArray* scale, const DLArray* dscale, const DLArray* dbias,
                            const DLArray* dy, float eps, DLArray* dx) {
  const char* op = "batch_normalize_gradient";
  const float* in = Input(op, x);
  const Channels shape = ChannelsOf(op, x);
  const int64_t count = shape.count;
  const float* variances = PerChannel(op, variance, count);
  CheckSameShape(op, x, dy);
  CheckSameShape(op, x, dx);
  const float share = (float)(1.0 / (double)std::max<int64_t>(shape.outer * shape.inner, 1));
  const InverseDeviations inverse(variances, count, eps);
  MapChannels(shape,
              GradientMap{in, PerChannel(op, mean, count), inverse.data(),
                          PerChannel(op, scale, count), PerChannel(op, dscale, count),
                          PerChannel(op, dbias, count), Input(op, dy), share, Output(op, dx)});
}

// mean = keep * mean + by_mean * batch mean, and likewise the variance, for layers that share these
// weights: states has all means, then all variances, and batch those of this batch, in that order.
// A weight of zero drops its term even where the term is NaN or infinite.
void RunningUpdate(DLArrayList* states, const DLArrayList* batch, float keep, float by_mean,
                   float by_variance) {
  const char* op = "running_update";
  if (states->count != batch->count || states->count % 2)
    Fail("%s: expected batch means and variances for %ld states, got %ld", op, (long)states->count,
         (long)batch->count);
  for (int64_t k = 0; k < states->count; k++) {
    const float by = k < states->count / 2 ? by_mean : by_variance;
    float* to = Output(op, states->arrays[k]);
    const int64_t count = Numel(states->arrays[k]);
    const float* from = PerChannel(op, batch->arrays[k], count);
    if (by == 0.f) continue;
    Serially([=] {
      for (int64_t c = 0; c < count; c++)
        to[c] = keep == 0.f ? by * from[c] : keep * to[c] + by * from[c];
    });
  }
}

DLSYS_KERNEL(cpu, batch_statistics, BatchStatistics);
DLSYS_KERNEL(cpu, batch_normalize, BatchNormalize);
DLSYS_KERNEL(cpu, batch_normalize_sums, BatchNormalizeSums);
DLSYS_KERNEL(cpu, batch_normalize_gradient, BatchNormalizeGradient);
DLSYS_KERNEL(cpu, running_update, RunningUpdate);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
