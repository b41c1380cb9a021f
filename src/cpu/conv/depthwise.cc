// Depthwise convolution: one channel a group, so there is no product to block. A tap is a row of x
// times a number, added to a row of y. The gradient for the data is that of any convolution.
#include "cpu/conv/conv.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

// The windows along one axis in which a tap lies on the plane: [begin, end), and what it meets in
// window 0, which may be off the plane.
struct Reach {
  int64_t begin, end, first;
};

Reach ReachOf(int64_t tap, int64_t plane, int64_t out, int64_t stride, int64_t before,
              int64_t dilation) {
  const int64_t first = tap * dilation - before;
  const int64_t begin = first < 0 ? (-first + stride - 1) / stride : 0;
  const int64_t end = first < plane ? (plane - 1 - first) / stride + 1 : 0;
  return {begin, std::min(end, out), first};
}

Reach Down(const Conv& c, int64_t tap) {
  return ReachOf(tap, c.in.h, c.out.h, c.stride.h, c.pad.h, c.dilation.h);
}
Reach Across(const Conv& c, int64_t tap) {
  return ReachOf(tap, c.in.w, c.out.w, c.stride.w, c.pad.w, c.dilation.w);
}

// Calls row(tap, y offset, x offset, n) for all rows in which a tap meets the plane; x steps by the
// stride.
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
  const int64_t multiple = c.GroupFilters(), taps = Size(c.kernel);
  ParallelFor(c.n * c.o, RowGrain(Size(c.out) * taps), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t p = begin; p < end; p++) {
        const int64_t o = p % c.o, channel = p / c.o * c.c + o / multiple;
        const float *from = x + channel * Size(c.in), *filter = f + o * taps;
        float* to = y + p * Size(c.out);
        std::fill(to, to + Size(c.out), bias ? bias[o] : 0.f);
        ForRows(c, [&](int64_t tap, int64_t at_y, int64_t at_x, int64_t n)
                       __attribute__((always_inline)) {
                         const float factor = filter[tap];
                         float* row = to + at_y;
                         const float* seen = from + at_x;
                         if (c.stride.w == 1)
                           for (int64_t j = 0; j < n; j++) row[j] += factor * seen[j];
                         else
                           for (int64_t j = 0; j < n; j++) row[j] += factor * seen[j * c.stride.w];
                       });
      }
    });
  });
}

void DirectDataGradient(const Conv& c, const float* f, const float* dy, float* dx) {
  const int64_t multiple = c.GroupFilters(), channels = c.GroupChannels(), taps = Size(c.kernel);
  ParallelFor(c.n * c.c, RowGrain(Size(c.out) * taps), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t p = begin; p < end; p++) {
        float* to = dx + p * Size(c.in);
        std::fill(to, to + Size(c.in), 0.f);
        const int64_t channel = p % c.c, first = channel / channels * multiple;
        for (int64_t o = first; o < first + multiple; o++) {
          const float* from = dy + (p / c.c * c.o + o) * Size(c.out);
          const float* filter = f + (o * channels + channel % channels) * taps;
          ForRows(c, [&](int64_t tap, int64_t at_y, int64_t at_x, int64_t n)
                         __attribute__((always_inline)) {
                           const float factor = filter[tap];
                           float* row = to + at_x;
                           const float* seen = from + at_y;
                           if (c.stride.w == 1)
                             for (int64_t j = 0; j < n; j++) row[j] += factor * seen[j];
                           else
                             for (int64_t j = 0; j < n; j++)
                               row[j * c.stride.w] += factor * seen[j];
                         });
        }
      }
    });
  });
}

// One filter a task, with its sums over rows in double.
void DepthwiseFilterGradient(const Conv& c, const float* x, const float* dy, float* df) {
  const int64_t multiple = c.GroupFilters(), taps = Size(c.kernel);
  ParallelFor(c.o, 1, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t k = begin * taps; k < end * taps; k++) {
        const int64_t o = k / taps, tap = k % taps;
        const Reach down = Down(c, tap / c.kernel.w), across = Across(c, tap % c.kernel.w);
        double sum = 0;
        for (int64_t n = 0; n < c.n && across.begin < across.end; n++) {
          const float* from = x + (n * c.c + o / multiple) * Size(c.in);
          const float* gradient = dy + (n * c.o + o) * Size(c.out);
          for (int64_t i = down.begin; i < down.end; i++) {
            const float* seen = from + (i * c.stride.h + down.first) * c.in.w + across.first;
            const float* row = gradient + i * c.out.w;
            float part = 0;
            for (int64_t j = across.begin; j < across.end; j++)
              part += row[j] * seen[j * c.stride.w];
            sum += part;
          }
        }
        df[k] = (float)sum;
      }
    });
  });
}

}  // namespace cpu
}  // namespace dlsys
