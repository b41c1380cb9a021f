// Convolution as its definition says: a sum over channels and kernel offsets for each output
// position, one element after the other. Threads split the results. Nothing is reused in registers
// and nothing vectorized, so that every product waits for its loads.
#include "cpu/conv/conv.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

// The sum at one output position of one image (in_channels, in) under one filter.
float SumAt(const Correlation& c, const float* x, const float* filter, int64_t i, int64_t j) {
  float sum = 0;
  for (int64_t channel = 0; channel < c.in_channels; channel++)
    for (int64_t a = 0; a < c.h.kernel_size; a++)
      for (int64_t b = 0; b < c.w.kernel_size; b++) {
        const int64_t h = c.h.first + i * c.h.step + a * c.h.kernel_step;
        const int64_t w = c.w.first + j * c.w.step + b * c.w.kernel_step;
        if (h < 0 || h >= c.in.h || w < 0 || w >= c.in.w) continue;
        const int64_t row = c.h.kernel_from + a * c.h.kernel_by;
        const int64_t col = c.w.kernel_from + b * c.w.kernel_by;
        sum += x[channel * Size(c.in) + h * c.in.w + w] *
               filter[channel * c.filter_channel + row * c.filter_width + col];
      }
  return sum;
}

void Correlate(const Correlation& c) {
  const int64_t planes = c.images * c.groups * c.out_channels;
  const int64_t grain = RowGrain(c.Positions() * c.K());
  ParallelFor(planes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const int64_t image = plane / c.out_channels, channel = plane % c.out_channels;
      const int64_t group = image % c.groups;
      const float* x = c.x + image * c.in_channels * Size(c.in);
      const float* filter = c.filter + group * c.filter_group + channel * c.filter_row;
      const float bias = c.bias ? c.bias[group * c.out_channels + channel] : 0;
      for (int64_t i = 0; i < c.h.count; i++)
        for (int64_t j = 0; j < c.w.count; j++) {
          const int64_t row = c.h.out_from + i * c.h.out_by, col = c.w.out_from + j * c.w.out_by;
          c.out[plane * Size(c.out_hw) + row * c.out_hw.w + col] = SumAt(c, x, filter, i, j) + bias;
        }
    }
  });
}

}  // namespace

void NaiveForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y) {
  Correlate(Forward(conv, x, f, bias, y));
}

void NaiveDataGradient(const Conv& conv, const float* f, const float* dy, float* dx) {
  for (int64_t phase = 0; phase < conv.stride.h * conv.stride.w; phase++)
    Correlate(DataGradient(conv, f, dy, dx, phase));
}

// Sums over the positions of an image are float, over images double.
void NaiveFilterGradient(const Conv& c, const float* x, const float* dy, float* df) {
  const int64_t channels = c.GroupChannels(), kernel = Size(c.kernel);
  const int64_t grain = RowGrain(c.n * Size(c.out));
  ParallelFor(c.o * channels * kernel, grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const int64_t o = k / kernel / channels, group = o / c.GroupFilters();
      const int64_t channel = group * channels + k / kernel % channels;
      const int64_t a = k % kernel / c.kernel.w, b = k % c.kernel.w;
      double sum = 0;
      for (int64_t n = 0; n < c.n; n++) {
        float of_image = 0;
        for (int64_t i = 0; i < c.out.h; i++)
          for (int64_t j = 0; j < c.out.w; j++) {
            const int64_t h = i * c.stride.h + a * c.dilation.h - c.pad.h;
            const int64_t w = j * c.stride.w + b * c.dilation.w - c.pad.w;
            if (h >= 0 && h < c.in.h && w >= 0 && w < c.in.w)
              of_image += x[((n * c.c + channel) * c.in.h + h) * c.in.w + w] *
                          dy[((n * c.o + o) * c.out.h + i) * c.out.w + j];
          }
        sum += of_image;
      }
      df[k] = (float)sum;
    }
  });
}

}  // namespace cpu
}  // namespace dlsys
