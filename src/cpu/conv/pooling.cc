// Max and average pooling with their gradients; threads split the images and channels. Within a row
// of windows each window element is one pass, so that inner loops are long. Gradients scatter:
// windows do not cross channels, so each channel has one writer. Outputs overlap no input. Memory
// bandwidth limits them.
#include <cstring>
#include <limits>

#include "cpu/reduce/rows.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "cpu/runtime/widened.h"
#include "math/int_math.h"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cpu {
namespace {

// The elements [begin, end) of window k that lie within the input, and the coordinate of element 0.
struct Seen {
  int64_t begin, end, first;
};

DLSYS_INLINE Seen SeenBy(int64_t k, int64_t size, int64_t stride, int64_t pad, int64_t in) {
  const int64_t first = k * stride - pad;
  return {std::max<int64_t>(0, -first), std::min(size, in - first), first};
}

// The elements that a dilated window sees.
DLSYS_INLINE Seen SeenBy(int64_t k, int64_t size, int64_t stride, int64_t pad, int64_t in,
                         int64_t dilation) {
  const int64_t first = k * stride - pad;
  return {first < 0 ? (dilation - 1 - first) / dilation : 0,
          std::min(size, (in - 1 - first) / dilation + 1), first};
}

const int32_t* Indices(const char* op, const DLArray* a) {
  Check(op, a);
  if (a->dtype != DL_INT32) Fail("%s: expected int32 indices, got %s", op, DtypeText(a->dtype));
  return (const int32_t*)a->data;
}

template <class F>
void ForImages(const Pool& p, const F& body) {
  const int64_t work = std::max(Size(p.in), Size(p.out) * Size(p.window));
  ParallelFor(p.nc, RowGrain(work), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) body(k);
  });
}

// First largest element of a window, NaN being larger than every other value. Dilation is a
// constant where there is none.
DLSYS_INLINE int64_t FindMax(const Pool& p, const float* x, const Seen& down, const Seen& across,
                             HW dilation) {
  int64_t best =
      (down.first + down.begin * dilation.h) * p.in.w + across.first + across.begin * dilation.w;
  float largest = x[best];
  for (int64_t a = down.begin; a < down.end; a++) {
    const int64_t row = (down.first + a * dilation.h) * p.in.w + across.first;
    for (int64_t b = across.begin; b < across.end; b++) {
      const int64_t at = row + b * dilation.w;
      const float value = x[at];
      const bool larger = !(value <= largest) && largest == largest;
      largest = larger ? value : largest;
      best = larger ? at : best;
    }
  }
  return best;
}

// The largest of n values, n > 0, and whether NaN, which is passed over, is among them.
struct Largest {
  float value;
  bool with_nan;
};

DLSYS_INLINE Largest LargestOf(const float* x, int64_t n) {
  constexpr int kWidth = 2 * kLanes;  // hides the latency of a maximum
  float max[kWidth];
  int nan[kWidth] = {};
  for (int j = 0; j < kWidth; j++) max[j] = -std::numeric_limits<float>::infinity();
  int64_t k = 0;
  for (; k + kWidth <= n; k += kWidth)
    for (int j = 0; j < kWidth; j++) {
      max[j] = x[k + j] > max[j] ? x[k + j] : max[j];
      nan[j] |= x[k + j] != x[k + j];
    }
  float lane[kLanes];
  int any = 0;
  for (int j = 0; j < kLanes; j++) {
    lane[j] = max[j + kLanes] > max[j] ? max[j + kLanes] : max[j];
    any |= nan[j] | nan[j + kLanes];
  }
  for (int64_t i = k; i < n; i++) any |= x[i] != x[i];
  float value = MaxOf(Row{lane, kLanes, kLanes});
  if (k < n) {
    const float left = MaxOf(Row{x + k, n - k, n - k});
    value = left > value ? left : value;
  }
  return {value, any != 0};
}

// The maximum of a wide window without dilation: runs by their maxima, then the position in the
// run.
constexpr int64_t kWide = 16;
constexpr int64_t kRun = 512;  // elements that are searched for the position

DLSYS_INLINE int64_t FindMaxByRows(const Pool& p, const float* x, const Seen& down,
                                   const Seen& across) {
  int64_t n = across.end - across.begin, rows = down.end - down.begin;
  const float* row = x + (down.first + down.begin) * p.in.w + across.first + across.begin;
  if (n == p.in.w) n *= rows, rows = 1;  // rows are contiguous
  const float *best = nullptr, *end = nullptr;
  float largest = 0;
  for (; rows > 0; rows--, row += p.in.w)
    for (int64_t at = 0; at < n; at += kRun) {
      const int64_t length = std::min(kRun, n - at);
      const Largest of_run = LargestOf(row + at, length);
      if (of_run.with_nan) return FindMax(p, x, down, across, {1, 1});
      if (best && of_run.value <= largest) continue;
      best = row + at;
      end = best + length;
      largest = of_run.value;
    }
  for (; end - best >= kLanes; best += kLanes) {
    int found = 0;
    for (int j = 0; j < kLanes; j++) found |= best[j] == largest;
    if (found) break;
  }
  while (*best != largest) best++;
  return best - x;
}

// Windows of one row without dilation at stride 1 or 2, side by side in SIMD: a pass for each
// element of a window. Loops run over a multiple of kVector values and read all that lies between
// the first and the last, so that they are vectors altogether; a row that has not so many is
// copied.
constexpr int64_t kPiece = 64;            // windows at a time
constexpr int64_t kVector = 16;           // values of a vector
constexpr int64_t kRow = kPiece + kWide;  // values of a row that windows begin at, or reach

// The largest elements of windows so far, and their indices.
struct Maxima {
  float value[kPiece];
  int32_t at[kPiece];

  // Takes values that are larger than the best, whose indices are from, from + step, ….
  DLSYS_INLINE void Take(const float* values, int64_t padded, int32_t from, int32_t step) {
    DLSYS_IVDEP
    for (int64_t j = 0; j < padded; j++) {
      const float seen = values[j], best = value[j];
      const bool larger = !(seen <= best) & (best == best);
      value[j] = larger ? seen : best;
      at[j] = larger ? from + step * (int32_t)j : at[j];
    }
  }
};

// Windows [first, first + n) of a row, of images that end at x_end.
template <int64_t kStride>
DLSYS_INLINE void FindMaxOfPiece(const Pool& p, const float* x, const float* x_end,
                                 const Seen& down, int64_t first, int64_t n, float* y,
                                 int32_t* argmax) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  const int64_t left = first * kStride - p.pad.w, reach = (n - 1) * kStride + p.window.w;
  const int64_t padded = (n + kVector - 1) & -kVector;
  const int64_t count = (padded + p.window.w - 1 + kVector - 1) & -kVector;
  const int32_t corner = (int32_t)((down.first + down.begin) * p.in.w);
  Maxima best;
  for (int64_t j = 0; j < padded; j++) {
    best.value[j] = kLeast;
    best.at[j] = corner + std::max<int32_t>(0, (int32_t)(left + j * kStride));
  }
  float copied[kStride * kRow], phases[kStride][kRow];
  for (int64_t a = down.begin; a < down.end; a++) {
    const int64_t start = (down.first + a) * p.in.w + left;
    const float* row = x + start;
    if (left < 0 || left + reach > p.in.w || row + kStride * count > x_end) {
      const int64_t low = std::max<int64_t>(0, -left), high = std::min(reach, p.in.w - left);
      std::fill(copied, copied + kStride * count, kLeast);
      if (low < high) memcpy(copied + low, row + low, (high - low) * sizeof(float));
      row = copied;
    }
    if constexpr (kStride == 2)
      for (int64_t j = 0; j < count; j++) {
        phases[0][j] = row[2 * j];
        phases[1][j] = row[2 * j + 1];
      }
    for (int64_t b = 0; b < p.window.w; b++)
      best.Take(kStride == 1 ? row + b : phases[b % kStride] + b / kStride, padded,
                (int32_t)(start + b), kStride);
  }
  std::copy(best.value, best.value + n, y);
  std::copy(best.at, best.at + n, argmax);
}

// Row i of the windows of an image.
DLSYS_INLINE void FindMaxOfRow(const Pool& p, const float* x, const float* x_end, int64_t i,
                               float* y, int32_t* argmax) {
  const Seen down = SeenBy(i, p.window.h, p.stride.h, p.pad.h, p.in.h);
  for (int64_t j = 0; j < p.out.w; j += kPiece) {
    const int64_t n = std::min(kPiece, p.out.w - j);
    if (p.stride.w == 1)
      FindMaxOfPiece<1>(p, x, x_end, down, j, n, y + j, argmax + j);
    else
      FindMaxOfPiece<2>(p, x, x_end, down, j, n, y + j, argmax + j);
  }
}

// The maxima of other windows, one after the other.
DLSYS_INLINE void FindMaxOneByOne(const Pool& p, const float* x, bool wide, int64_t i, float* y,
                                  int32_t* argmax) {
  const Seen down = SeenBy(i, p.window.h, p.stride.h, p.pad.h, p.in.h);
  for (int64_t j = 0; j < p.out.w; j++) {
    const Seen across = SeenBy(j, p.window.w, p.stride.w, p.pad.w, p.in.w);
    const int64_t best =
        wide ? FindMaxByRows(p, x, down, across) : FindMax(p, x, down, across, {1, 1});
    argmax[j] = (int32_t)best;
    y[j] = x[best];
  }
}

void MaxOfImages(const Pool& p, const float* x, float* y, int32_t* argmax) {
  const bool contiguous = p.window.w >= p.in.w;
  const bool wide = std::min(p.window.w, p.in.w) * (contiguous ? p.window.h : 1) >= kWide;
  const bool by_rows = !wide && p.window.w <= kWide && p.stride.w <= 2;
  const float* x_end = x + p.nc * Size(p.in);
  ForImages(p, [&](int64_t nc) {
    const float* data = x + nc * Size(p.in);
    float* values = y + nc * Size(p.out);
    int32_t* at = argmax + nc * Size(p.out);
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t i = 0; i < p.out.h; i++) {
        const int64_t k = i * p.out.w;
        if (by_rows)
          FindMaxOfRow(p, data, x_end, i, values + k, at + k);
        else
          FindMaxOneByOne(p, data, wide, i, values + k, at + k);
      }
    });
  });
}

void MaxOfDilated(const Pool& p, const float* x, float* y, int32_t* argmax) {
  ForImages(p, [&](int64_t nc) {
    const float* data = x + nc * Size(p.in);
    int64_t k = nc * Size(p.out);
    for (int64_t i = 0; i < p.out.h; i++) {
      const Seen down = SeenBy(i, p.window.h, p.stride.h, p.pad.h, p.in.h, p.dilation.h);
      for (int64_t j = 0; j < p.out.w; j++, k++) {
        const Seen across = SeenBy(j, p.window.w, p.stride.w, p.pad.w, p.in.w, p.dilation.w);
        const int64_t best = FindMax(p, data, down, across, p.dilation);
        y[k] = data[best];
        argmax[k] = (int32_t)best;
      }
    }
  });
}

void MaxPool2d(const DLArray* x, DLArray* y, DLArray* argmax, Struct<WindowOptions> windows) {
  const char* op = "max_pool2d";
  const float* from = Input(op, x);
  float* to = Output(op, y);
  int32_t* at = (int32_t*)Indices(op, argmax);
  CheckSameShape(op, y, argmax);
  const Pool p = CheckedPool(op, x, y, *windows);
  if (!Numel(y)) return;
  if (p.Dilated())
    MaxOfDilated(p, from, to, at);
  else
    MaxOfImages(p, from, to, at);
}

// An index outside the input is ignored.
void MaxPool2dGradient(const DLArray* dy, const DLArray* argmax, DLArray* dx,
                       Struct<WindowOptions> windows) {
  const char* op = "max_pool2d_gradient";
  const float* from = Input(op, dy);
  const int32_t* at = Indices(op, argmax);
  float* to = Output(op, dx);
  CheckSameShape(op, dy, argmax);
  const Pool p = CheckedPool(op, dx, dy, *windows);
  ForImages(p, [&](int64_t nc) {
    float* data = to + nc * Size(p.in);
    std::fill(data, data + Size(p.in), 0.f);
    for (int64_t k = nc * Size(p.out); k < (nc + 1) * Size(p.out); k++)
      if (at[k] >= 0 && at[k] < Size(p.in)) data[at[k]] += from[k];
  });
}

void MaxPool2dRead(const DLArray* x, const DLArray* argmax, DLArray* y) {
  const char* op = "max_pool2d_read";
  const float* from = Input(op, x);
  const int32_t* at = Indices(op, argmax);
  float* to = Output(op, y);
  CheckSameShape(op, argmax, y);
  CheckNchw(op, x);
  CheckNchw(op, y);
  if (x->shape[0] != y->shape[0] || x->shape[1] != y->shape[1])
    Fail("%s: shapes do not fit: %s and %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  const int64_t in_size = Size(SpatialOf(x)), out = Size(SpatialOf(y));
  ParallelFor(x->shape[0] * x->shape[1], RowGrain(out), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++)
      for (int64_t k = p * out; k < (p + 1) * out; k++)
        to[k] = at[k] >= 0 && at[k] < in_size ? from[p * in_size + at[k]] : 0.f;
  });
}

// ---- mean ----

// The divisor of a window along one axis: with `padding`, of the padded input.
DLSYS_INLINE int64_t Covered(const Seen& seen, int64_t size, int64_t padded, bool padding) {
  return padding ? std::min(size, padded - seen.first) : seen.end - seen.begin;
}

struct Mean {
  Pool pool;
  HW padded;  // the input with the padding at its end
  bool padding;

  double Share(const Seen& down, const Seen& across) const {
    const int64_t count = Covered(down, pool.window.h, padded.h, padding) *
                          Covered(across, pool.window.w, padded.w, padding);
    return 1. / (double)count;
  }
};

Mean CheckedMean(const char* op, const DLArray* x, const DLArray* y, const WindowOptions& windows,
                 int64_t padding) {
  const Pool p = CheckedPool(op, x, y, windows);
  return {p, {p.in.h + windows.after.h, p.in.w + windows.after.w}, padding != 0};
}

// Calls window(k, down, across) for each window k of an image.
template <class F>
DLSYS_INLINE void ForWindows(const Pool& p, const F& window) {
  int64_t k = 0;
  for (int64_t i = 0; i < p.out.h; i++) {
    const Seen down = SeenBy(i, p.window.h, p.stride.h, p.pad.h, p.in.h);
    for (int64_t j = 0; j < p.out.w; j++, k++)
      window(k, down, SeenBy(j, p.window.w, p.stride.w, p.pad.w, p.in.w));
  }
}

void AvgPool2d(const DLArray* x, DLArray* y, Struct<WindowOptions> windows, int64_t padding) {
  const char* op = "avg_pool2d";
  const float* from = Input(op, x);
  float* to = Output(op, y);
  const Mean mean = CheckedMean(op, x, y, *windows, padding);
  const Pool& p = mean.pool;
  if (!Numel(y)) return;
  ForImages(p, [&](int64_t nc) {
    const float* data = from + nc * Size(p.in);
    float* out = to + nc * Size(p.out);
    ForWindows(p, [&](int64_t k, const Seen& down, const Seen& across) {
      double sum = 0;
      for (int64_t a = down.begin; a < down.end; a++)
        for (int64_t b = across.begin; b < across.end; b++)
          sum += data[(down.first + a) * p.in.w + across.first + b];
      out[k] = (float)(sum * mean.Share(down, across));
    });
  });
}

void AvgPool2dGradient(const DLArray* dy, DLArray* dx, Struct<WindowOptions> windows,
                       int64_t padding) {
  const char* op = "avg_pool2d_gradient";
  const float* from = Input(op, dy);
  float* to = Output(op, dx);
  const Mean mean = CheckedMean(op, dx, dy, *windows, padding);
  const Pool& p = mean.pool;
  ForImages(p, [&](int64_t nc) {
    float* data = to + nc * Size(p.in);
    const float* gradient = from + nc * Size(p.out);
    std::fill(data, data + Size(p.in), 0.f);
    ForWindows(p, [&](int64_t k, const Seen& down, const Seen& across) {
      const float share = (float)(gradient[k] * mean.Share(down, across));
      for (int64_t a = down.begin; a < down.end; a++)
        for (int64_t b = across.begin; b < across.end; b++)
          data[(down.first + a) * p.in.w + across.first + b] += share;
    });
  });
}

DLSYS_KERNEL(cpu, max_pool2d, MaxPool2d);
DLSYS_KERNEL_WIDENED(cpu, max_pool2d, MaxPool2d);
DLSYS_KERNEL(cpu, max_pool2d_gradient, MaxPool2dGradient);
DLSYS_KERNEL_WIDENED(cpu, max_pool2d_gradient, MaxPool2dGradient);
DLSYS_KERNEL(cpu, max_pool2d_read, MaxPool2dRead);
DLSYS_KERNEL_WIDENED(cpu, max_pool2d_read, MaxPool2dRead);
DLSYS_KERNEL(cpu, avg_pool2d, AvgPool2d);
DLSYS_KERNEL_WIDENED(cpu, avg_pool2d, AvgPool2d);
DLSYS_KERNEL(cpu, avg_pool2d_gradient, AvgPool2dGradient);
DLSYS_KERNEL_WIDENED(cpu, avg_pool2d_gradient, AvgPool2dGradient);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
