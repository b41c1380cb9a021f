// Pooling, a plane a task or more. Within a row of windows each tap is one pass, so that the inner
// loops are long.
#include <limits>

#include "cpu/reduce/rows.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/conv_geometry.h"

namespace dlsys {
namespace cpu {
namespace {

// The taps of window k that lie on the plane: [begin, end), and where tap 0 lies.
struct Seen {
  int64_t begin, end, first;
};

DLSYS_INLINE Seen SeenBy(int64_t k, int64_t size, int64_t stride, int64_t before, int64_t plane) {
  const int64_t first = k * stride - before;
  return {std::max<int64_t>(0, -first), std::min(size, plane - first), first};
}

// The same where the taps lie `dilation` apart.
DLSYS_INLINE Seen SeenBy(int64_t k, int64_t size, int64_t stride, int64_t before, int64_t plane,
                         int64_t dilation) {
  const int64_t first = k * stride - before;
  return {first < 0 ? (dilation - 1 - first) / dilation : 0,
          std::min(size, (plane - 1 - first) / dilation + 1), first};
}

const int32_t* Indices(const char* op, const DLArray* a) {
  Check(op, a);
  if (a->dtype != DL_INT32) Fail("%s: expected int32 indices, got %s", op, DtypeText(a->dtype));
  return (const int32_t*)a->data;
}

template <class F>
void ForPlanes(const Pool& p, const F& body) {
  const int64_t work = std::max(Size(p.plane), Size(p.out) * Size(p.size));
  ParallelFor(p.planes, RowGrain(work), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) body(k);
  });
}

// The first largest element of a window, where NaN is larger than every number. Dilation is a
// constant where there is none.
DLSYS_INLINE int64_t FindMax(const Pool& p, const float* x, const Seen& down, const Seen& across,
                             Pair dilation) {
  int64_t best =
      (down.first + down.begin * dilation.h) * p.plane.w + across.first + across.begin * dilation.w;
  float largest = x[best];
  for (int64_t a = down.begin; a < down.end; a++) {
    const int64_t row = (down.first + a * dilation.h) * p.plane.w + across.first;
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
  constexpr int kWidth = 2 * kLanes;  // hides how long a maximum takes
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

// The same for a wide window without dilation: runs by their largest elements, then the place in
// the run.
constexpr int64_t kWide = 16;
constexpr int64_t kRun = 512;  // elements that are looked through for the place

DLSYS_INLINE int64_t FindMaxByRows(const Pool& p, const float* x, const Seen& down,
                                   const Seen& across) {
  int64_t n = across.end - across.begin, rows = down.end - down.begin;
  const float* row = x + (down.first + down.begin) * p.plane.w + across.first + across.begin;
  if (n == p.plane.w) n *= rows, rows = 1;  // they lie one behind the other
  const float *best = nullptr, *end = nullptr;
  float largest = 0;
  for (; rows > 0; rows--, row += p.plane.w)
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

template <bool kDilated>
void MaxOfPlanes(const Pool& p, const float* x, float* y, int32_t* argmax) {
  ForPlanes(p, [&](int64_t plane) {
    const float* data = x + plane * Size(p.plane);
    int64_t k = plane * Size(p.out);
    for (int64_t i = 0; i < p.out.h; i++) {
      const Seen down = kDilated
                            ? SeenBy(i, p.size.h, p.stride.h, p.before.h, p.plane.h, p.dilation.h)
                            : SeenBy(i, p.size.h, p.stride.h, p.before.h, p.plane.h);
      for (int64_t j = 0; j < p.out.w; j++, k++) {
        const Seen across =
            kDilated ? SeenBy(j, p.size.w, p.stride.w, p.before.w, p.plane.w, p.dilation.w)
                     : SeenBy(j, p.size.w, p.stride.w, p.before.w, p.plane.w);
        int64_t best = 0;
        if (kDilated || across.end - across.begin < kWide)
          best = FindMax(p, data, down, across, kDilated ? p.dilation : Pair{1, 1});
        else
          Dispatch([&]() __attribute__((always_inline)) {
            best = FindMaxByRows(p, data, down, across);
          });
        y[k] = data[best];
        argmax[k] = (int32_t)best;
      }
    }
  });
}

void MaxPool2d(const DLArray* x, DLArray* y, DLArray* argmax, int64_t size, int64_t stride,
               int64_t before, int64_t dilation) {
  const char* op = "max_pool2d";
  const float* from = Input(op, x);
  float* to = Output(op, y);
  int32_t* at = (int32_t*)Indices(op, argmax);
  CheckSameShape(op, y, argmax);
  const Pool p = CheckedPool(op, x, y, size, stride, before, dilation);
  if (!Numel(y)) return;
  if (p.Dilated())
    MaxOfPlanes<true>(p, from, to, at);
  else
    MaxOfPlanes<false>(p, from, to, at);
}

// Where an index counts: windows do not cross planes, so a plane has one writer.
void MaxPool2dGradient(const DLArray* dy, const DLArray* argmax, DLArray* dx, int64_t size,
                       int64_t stride, int64_t before, int64_t dilation) {
  const char* op = "max_pool2d_gradient";
  const float* from = Input(op, dy);
  const int32_t* at = Indices(op, argmax);
  float* to = Output(op, dx);
  CheckSameShape(op, dy, argmax);
  const Pool p = CheckedPool(op, dx, dy, size, stride, before, dilation);
  ForPlanes(p, [&](int64_t plane) {
    float* data = to + plane * Size(p.plane);
    std::fill(data, data + Size(p.plane), 0.f);
    for (int64_t k = plane * Size(p.out); k < (plane + 1) * Size(p.out); k++)
      if (at[k] >= 0 && at[k] < Size(p.plane)) data[at[k]] += from[k];
  });
}

void MaxPool2dRead(const DLArray* x, const DLArray* argmax, DLArray* y) {
  const char* op = "max_pool2d_read";
  const float* from = Input(op, x);
  const int32_t* at = Indices(op, argmax);
  float* to = Output(op, y);
  CheckSameShape(op, argmax, y);
  CheckPlanes(op, x);
  CheckPlanes(op, y);
  if (x->shape[0] != y->shape[0] || x->shape[1] != y->shape[1])
    Fail("%s: shapes do not fit: %s and %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  const int64_t plane = Size(PlaneOf(x)), out = Size(PlaneOf(y));
  ParallelFor(x->shape[0] * x->shape[1], RowGrain(out), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++)
      for (int64_t k = p * out; k < (p + 1) * out; k++)
        to[k] = at[k] >= 0 && at[k] < plane ? from[p * plane + at[k]] : 0.f;
  });
}

// ---- mean ----

// By how many elements a window divides: with `padding` those of the padded plane that it covers.
DLSYS_INLINE int64_t Covered(const Seen& seen, int64_t size, int64_t padded, bool padding) {
  return padding ? std::min(size, padded - seen.first) : seen.end - seen.begin;
}

struct Mean {
  Pool pool;
  Pair padded;  // the plane with the padding behind it
  bool padding;

  double Share(const Seen& down, const Seen& across) const {
    const int64_t count = Covered(down, pool.size.h, padded.h, padding) *
                          Covered(across, pool.size.w, padded.w, padding);
    return 1. / (double)count;
  }
};

Mean CheckedMean(const char* op, const DLArray* x, const DLArray* y, int64_t size, int64_t stride,
                 int64_t before, int64_t after, int64_t padding) {
  const Pool p = CheckedPool(op, x, y, size, stride, before);
  const Pair behind = Unpack(after);
  return {p, {p.plane.h + behind.h, p.plane.w + behind.w}, padding != 0};
}

// Calls window(k, down, across) for each window k of a plane.
template <class F>
DLSYS_INLINE void ForWindows(const Pool& p, const F& window) {
  int64_t k = 0;
  for (int64_t i = 0; i < p.out.h; i++) {
    const Seen down = SeenBy(i, p.size.h, p.stride.h, p.before.h, p.plane.h);
    for (int64_t j = 0; j < p.out.w; j++, k++)
      window(k, down, SeenBy(j, p.size.w, p.stride.w, p.before.w, p.plane.w));
  }
}

void AvgPool2d(const DLArray* x, DLArray* y, int64_t size, int64_t stride, int64_t before,
               int64_t after, int64_t padding) {
  const char* op = "avg_pool2d";
  const float* from = Input(op, x);
  float* to = Output(op, y);
  const Mean mean = CheckedMean(op, x, y, size, stride, before, after, padding);
  const Pool& p = mean.pool;
  if (!Numel(y)) return;
  ForPlanes(p, [&](int64_t plane) {
    const float* data = from + plane * Size(p.plane);
    float* out = to + plane * Size(p.out);
    ForWindows(p, [&](int64_t k, const Seen& down, const Seen& across) {
      double sum = 0;
      for (int64_t a = down.begin; a < down.end; a++)
        for (int64_t b = across.begin; b < across.end; b++)
          sum += data[(down.first + a) * p.plane.w + across.first + b];
      out[k] = (float)(sum * mean.Share(down, across));
    });
  });
}

void AvgPool2dGradient(const DLArray* dy, DLArray* dx, int64_t size, int64_t stride, int64_t before,
                       int64_t after, int64_t padding) {
  const char* op = "avg_pool2d_gradient";
  const float* from = Input(op, dy);
  float* to = Output(op, dx);
  const Mean mean = CheckedMean(op, dx, dy, size, stride, before, after, padding);
  const Pool& p = mean.pool;
  ForPlanes(p, [&](int64_t plane) {
    float* data = to + plane * Size(p.plane);
    const float* gradient = from + plane * Size(p.out);
    std::fill(data, data + Size(p.plane), 0.f);
    ForWindows(p, [&](int64_t k, const Seen& down, const Seen& across) {
      const float share = (float)(gradient[k] * mean.Share(down, across));
      for (int64_t a = down.begin; a < down.end; a++)
        for (int64_t b = across.begin; b < across.end; b++)
          data[(down.first + a) * p.plane.w + across.first + b] += share;
    });
  });
}

DLSYS_KERNEL(cpu, max_pool2d, MaxPool2d);
DLSYS_KERNEL(cpu, max_pool2d_gradient, MaxPool2dGradient);
DLSYS_KERNEL(cpu, max_pool2d_read, MaxPool2dRead);
DLSYS_KERNEL(cpu, avg_pool2d, AvgPool2d);
DLSYS_KERNEL(cpu, avg_pool2d_gradient, AvgPool2dGradient);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
