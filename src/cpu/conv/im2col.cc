// Convolution as a matrix product over a stored im2col matrix: what each kernel offset reads at
// each output position of an image, a row of K = (channel, kernel offset) each. Images go one after
// the other, so that the matrix is that of one image; the product is that of cpu/gemm. Limited by
// memory bandwidth: the matrix is as many times as large as the image as the kernel has offsets.
#include "cpu/conv/conv.h"
#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

// The im2col matrix (K, positions) of x (in_channels, in), one group of one image.
void FillColumns(const Correlation& c, const float* x, float* columns) {
  const int64_t positions = c.Positions(), kernel = c.KernelSize();
  ParallelFor(c.K(), RowGrain(positions), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const float* from = x + k / kernel * Size(c.in);
      const int64_t t = k % kernel;
      const int64_t first_h = c.h.first + t / c.w.kernel_size * c.h.kernel_step;
      const int64_t first_w = c.w.first + t % c.w.kernel_size * c.w.kernel_step;
      float* to = columns + k * positions;
      for (int64_t i = 0; i < c.h.count; i++) {
        const int64_t h = first_h + i * c.h.step;
        for (int64_t j = 0; j < c.w.count; j++) {
          const int64_t w = first_w + j * c.w.step;
          const bool inside = h >= 0 && h < c.in.h && w >= 0 && w < c.in.w;
          *to++ = inside ? from[h * c.in.w + w] : 0;
        }
      }
    }
  });
}

// The filters of a group as a matrix (out_channels, K).
void FillFilters(const Correlation& c, int64_t group, float* to) {
  const int64_t kernel = c.KernelSize();
  Serially([&] {
    for (int64_t r = 0; r < c.out_channels; r++)
      for (int64_t k = 0; k < c.K(); k++) {
        const int64_t t = k % kernel;
        const int64_t row = c.h.kernel_from + t / c.w.kernel_size * c.h.kernel_by;
        const int64_t col = c.w.kernel_from + t % c.w.kernel_size * c.w.kernel_by;
        *to++ = c.filter[group * c.filter_group + r * c.filter_row + k / kernel * c.filter_channel +
                         row * c.filter_width + col];
      }
  });
}

// Stores (out_channels, positions), with the bias, where the axes say.
void StoreResults(const Correlation& c, int64_t group, const float* from, float* out) {
  ParallelFor(c.out_channels, RowGrain(c.Positions()), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const float bias = c.bias ? c.bias[group * c.out_channels + r] : 0;
      for (int64_t k = 0; k < c.Positions(); k++) {
        const int64_t row = c.h.out_from + k / c.w.count * c.h.out_by;
        const int64_t col = c.w.out_from + k % c.w.count * c.w.out_by;
        out[r * Size(c.out_hw) + row * c.out_hw.w + col] = from[r * c.Positions() + k] + bias;
      }
    }
  });
}

void Correlate(const Correlation& c) {
  if (!c.images || !c.out_channels || !c.groups || !c.Positions()) return;
  const ScratchArray<float> filters(c.out_channels * c.K());
  const ScratchArray<float> columns(c.K() * c.Positions());
  const ScratchArray<float> results(c.out_channels * c.Positions());
  for (int64_t group = 0; group < c.groups; group++) {
    FillFilters(c, group, filters.data());
    for (int64_t image = group; image < c.images * c.groups; image += c.groups) {
      FillColumns(c, c.x + image * c.in_channels * Size(c.in), columns.data());
      RunGemm({c.out_channels,
               c.Positions(),
               c.K(),
               {filters.data(), c.K(), 1},
               {columns.data(), c.Positions(), 1},
               results.data()});
      StoreResults(c, group, results.data(), c.out + image * c.out_channels * Size(c.out_hw));
      if (Workspace::Querying()) return;  // the others take as much
    }
  }
}

}  // namespace

void Im2colForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y) {
  Correlate(Forward(conv, x, f, bias, y));
}

void Im2colDataGradient(const Conv& conv, const float* f, const float* dy, float* dx) {
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    Correlate(DataGradient(conv, f, dy, dx, phase));
}

void Im2colFilterGradient(const Conv& conv, const float* x, const float* dy, float* df) {
  const Correlation c = Forward(conv, x, nullptr, nullptr, nullptr);
  const int64_t numel = c.out_channels * c.K();
  const ScratchArray<float> columns(c.K() * c.Positions()), of_image(numel);
  Serially([&] { std::fill(df, df + c.groups * numel, 0.f); });
  for (int64_t image = 0; image < c.images * c.groups; image++) {
    FillColumns(c, x + image * c.in_channels * Size(c.in), columns.data());
    RunGemm({c.out_channels,
             c.K(),
             c.Positions(),
             {dy + image * c.out_channels * c.Positions(), c.Positions(), 1},
             {columns.data(), 1, c.Positions()},
             of_image.data()});
    float* to = df + image % c.groups * numel;
    ParallelFor(numel, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; k++) to[k] += of_image.data()[k];
    });
    if (Workspace::Querying()) return;  // the others take as much
  }
}

}  // namespace cpu
}  // namespace dlsys
