// Direct convolution, one kernel offset at a time: a row of x times one weight is added to a row of
// y, in SIMD along the row. It computes depthwise convolutions (one channel per group), which have
// no reduction over channels for GEMM, and the data gradient of any convolution. Threads split
// images and channels.
#include "cpu/conv/conv.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/int_math.h"

namespace dlsys {
namespace cpu {
namespace {

// The output positions [begin, end) along one axis at which a kernel offset meets the input, and
// the input coordinate it has at position 0, which may be outside.
struct Reach {
  int64_t begin, end, first;
};

Reach ReachOf(int64_t kernel_offset, int64_t in, int64_t out, int64_t stride, int64_t pad,
              int64_t dilation) {
  const int64_t first = kernel_offset * dilation - pad;
  const int64_t begin = first < 0 ? CeilDiv(-first, stride) : 0;
  const int64_t end = first < in ? (in - 1 - first) / stride + 1 : 0;
  return {begin, std::min(end, out), first};
}

Reach Down(const Conv& c, int64_t kernel_offset) {
  return ReachOf(kernel_offset, c.in.h, c.out.h, c.stride.h, c.pad.h, c.dilation.h);
}
Reach Across(const Conv& c, int64_t kernel_offset) {
  return ReachOf(kernel_offset, c.in.w, c.out.w, c.stride.w, c.pad.w, c.dilation.w);
}

// Calls row(kernel offset, y offset, x offset, n) for all rows in which a kernel offset meets the
// input; x advances by the stride.
template <class F>
DLSYS_INLINE void ForRows(const Conv& c, const F& row) {
  for (int64_t a = 0; a < c.kernel.h; a++)
    for (int64_t b = 0; b < c.kernel.w; b++) {
      const Reach down = Down(c, a), across = Across(c, b);
      if (across.begin >= across.end) continue;
      for (int64_t i = down.begin; i < down.end; i++)
        row(a * c.kernel.w + b, i * c.out.w + across.begin,
            (i * c.stride.h + down.first) * c.in.w + across.begin * c.stride.w + across.first,
            across.end - across.begin);
    }
}

}  // namespace

void DepthwiseForward(const Conv& c, const float* x, const float* f, const float* bias, float* y) {
  const int64_t multiple = c.GroupFilters(), kernel_size = Size(c.kernel);
  ParallelFor(c.n * c.o, RowGrain(Size(c.out) * kernel_size), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t p = begin; p < end; p++) {
        const int64_t o = p % c.o, channel = p / c.o * c.c + o / multiple;
        const float *from = x + channel * Size(c.in), *filter = f + o * kernel_size;
        float* to = y + p * Size(c.out);
        std::fill(to, to + Size(c.out), bias ? bias[o] : 0.f);
        ForRows(c, [&](int64_t kernel_offset, int64_t at_y, int64_t at_x, int64_t n)
                       __attribute__((always_inline)) {
                         const float weight = filter[kernel_offset];
                         float* row = to + at_y;
                         const float* in_row = from + at_x;
                         if (c.stride.w == 1)
                           for (int64_t j = 0; j < n; j++) row[j] += weight * in_row[j];
                         else
                           for (int64_t j = 0; j < n; j++)
                             row[j] += weight * in_row[j * c.stride.w];
                       });
      }
    });
  });
}

void DirectDataGradient(const Conv& c, const float* f, const float* dy, float* dx) {
  const int64_t multiple = c.GroupFilters(), channels = c.GroupChannels(),
                kernel_size = Size(c.kernel);
  ParallelFor(c.n * c.c, RowGrain(Size(c.out) * kernel_size), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t p = begin; p < end; p++) {
        float* to = dx + p * Size(c.in);
        std::fill(to, to + Size(c.in), 0.f);
        const int64_t channel = p % c.c, first = channel / channels * multiple;
        for (int64_t o = first; o < first + multiple; o++) {
          const float* from = dy + (p / c.c * c.o + o) * Size(c.out);
          const float* filter = f + (o * channels + channel % channels) * kernel_size;
          ForRows(c, [&](int64_t kernel_offset, int64_t at_y, int64_t at_x, int64_t n)
                         __attribute__((always_inline)) {
                           const float weight = filter[kernel_offset];
                           float* row = to + at_x;
                           const float* in_row = from + at_y;
                           if (c.stride.w == 1)
                             for (int64_t j = 0; j < n; j++) row[j] += weight * in_row[j];
                           else
                             for (int64_t j = 0; j < n; j++)
                               row[j * c.stride.w] += weight * in_row[j];
                         });
        }
      }
    });
  });
}

// One filter per task; row sums are added in double.
void DepthwiseFilterGradient(const Conv& c, const float* x, const float* dy, float* df) {
  const int64_t multiple = c.GroupFilters(), kernel_size = Size(c.kernel);
  ParallelFor(c.o, 1, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin * kernel_size; k < end * kernel_size; k++) {
        const int64_t o = k / kernel_size, kernel_offset = k % kernel_size;
        const Reach down = Down(c, kernel_offset / c.kernel.w),
                    across = Across(c, kernel_offset % c.kernel.w);
        double sum = 0;
        for (int64_t n = 0; n < c.n && across.begin < across.end; n++) {
          const float* from = x + (n * c.c + o / multiple) * Size(c.in);
          const float* gradient = dy + (n * c.o + o) * Size(c.out);
          for (int64_t i = down.begin; i < down.end; i++) {
            const float* in_row = from + (i * c.stride.h + down.first) * c.in.w + across.first;
            const float* row = gradient + i * c.out.w;
            float row_sum = 0;
            for (int64_t j = across.begin; j < across.end; j++)
              row_sum += row[j] * in_row[j * c.stride.w];
            sum += row_sum;
          }
        }
        df[k] = (float)sum;
      }
    });
  });
}

}  // namespace cpu
}  // namespace dlsys
