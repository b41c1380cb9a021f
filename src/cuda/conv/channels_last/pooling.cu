// Max-pooling of images with channels last, and its gradient: x and dx (n, in, c), y and dy and the
// uint8 places of the largest elements (n, out, c). A place counts within its window, row by row,
// which has at most 256 elements. Contiguous; results overlap no input. A thread has the channels
// of 16 bytes of an output element where there are such, and small windows are unrolled, so that
// their loads are in flight at once; memory-bound.
//
// The gradient gathers, in float32: a thread visits the windows that cover its element in row-major
// order, so there are no atomics and the order of summation is fixed.
#include <algorithm>

#include "cuda/pointwise/vector.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace {

struct Windows {
  int in_h, in_w, out_h, out_w, window_h, window_w, pad_h, pad_w, channels;
  Divisor stride_h, stride_w;
  Divisor by_vectors, by_w, by_h;  // vectors of channels; the extents of what threads are for
  int64_t items;
};

// An item's image, position and first channel.
struct Item {
  int64_t image;
  int h, w, c;
};
template <int kVector>
__device__ __forceinline__ Item ItemOf(const Windows& p, int k) {
  const int position = k / p.by_vectors, line = position / p.by_w, image = line / p.by_h;
  return {image, line - image * (int)p.by_h.value, position - line * (int)p.by_w.value,
          (k - position * (int)p.by_vectors.value) * kVector};
}

using Place = uint8_t;
constexpr int64_t kMostPlaces = 256;

// `width` elements a row or, where it is not 0, kWidth; calls f(row, column, exists) for the square
// that is known, whose elements exist inside of [first, last), else for those elements alone.
struct Range {
  int first, last;
};
template <int kWidth, class F>
__device__ __forceinline__ void ForSquare(const Range& rows, const Range& columns, const F& f) {
  if constexpr (kWidth > 0) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
#pragma unroll
      for (int j = 0; j < kWidth; j++)
        f(i, j, i >= rows.first && i < rows.last && j >= columns.first && j < columns.last);
    }
  } else {
    for (int i = rows.first; i < rows.last; i++)
      for (int j = columns.first; j < columns.last; j++) f(i, j, true);
  }
}

// Of windows of kWidth x kWidth elements, or any.
template <class T, int kVector, int kWidth>
__global__ void MaxPoolKernel(const Windows p, const T* x, T* y, Place* places) {
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item item = ItemOf<kVector>(p, (int)k);
    const T* image = x + item.image * p.in_h * p.in_w * p.channels + item.c;
    const int top = item.h * (int)p.stride_h.value - p.pad_h,
              left = item.w * (int)p.stride_w.value - p.pad_w;
    const Range rows{max(-top, 0), min(p.window_h, p.in_h - top)};
    const Range columns{max(-left, 0), min(p.window_w, p.in_w - left)};
    const auto read = [&](int i, int j) {
      return Read<kVector>(image + ((int64_t)(top + i) * p.in_w + left + j) * p.channels);
    };
    float largest[kVector] = {};
    int best[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++) best[e] = -1;
    const auto compare = [&](const Vec<T, kVector>& values, int place) {
#pragma unroll
      for (int e = 0; e < kVector; e++) {
        // NaN is larger than every other value.
        const bool larger = !(values[e] <= largest[e]) && largest[e] == largest[e];
        if (best[e] >= 0 && !larger) continue;
        largest[e] = values[e];
        best[e] = place;
      }
    };
    if constexpr (kWidth > 0) {
      Vec<T, kVector> values[kWidth * kWidth];
      ForSquare<kWidth>(rows, columns, [&](int i, int j, bool exists) {
        if (exists) values[i * kWidth + j] = read(i, j);
      });
      ForSquare<kWidth>(rows, columns, [&](int i, int j, bool exists) {
        if (exists) compare(values[i * kWidth + j], i * kWidth + j);
      });
    } else {
      ForSquare<0>(rows, columns,
                   [&](int i, int j, bool) { compare(read(i, j), i * p.window_w + j); });
    }
    Write<kVector>(y + k * kVector, largest);
    Vec<Place, kVector> of;
#pragma unroll
    for (int e = 0; e < kVector; e++) of.elements[e] = (Place)best[e];
    *(Vec<Place, kVector>*)(places + k * kVector) = of;
  }
}

// Of elements that at most kWidth x kWidth windows cover, or any number.
template <class T, int kVector, int kWidth>
__global__ void MaxPoolGradientKernel(const Windows p, const T* dy, const Place* places, T* dx) {
  struct Loaded {
    Vec<T, kVector> dy;
    Vec<Place, kVector> places;
  };
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item item = ItemOf<kVector>(p, (int)k);
    const int down = item.h + p.pad_h, right = item.w + p.pad_w;
    const int first_i = down < p.window_h ? 0 : (down - p.window_h) / p.stride_h + 1;
    const int first_j = right < p.window_w ? 0 : (right - p.window_w) / p.stride_w + 1;
    const Range rows{0, min(down / p.stride_h + 1, p.out_h) - first_i};
    const Range columns{0, min(right / p.stride_w + 1, p.out_w) - first_j};
    const int64_t corner = (item.image * p.out_h + first_i) * p.out_w + first_j;
    const auto load = [&](int i, int j) {
      const int64_t at = (corner + i * p.out_w + j) * p.channels + item.c;
      return Loaded{Read<kVector>(dy + at), *(const Vec<Place, kVector>*)(places + at)};
    };
    float sum[kVector] = {};
    const auto add = [&](const Loaded& window, int i, int j) {
      const int row = down - (first_i + i) * (int)p.stride_h.value;
      const int column = right - (first_j + j) * (int)p.stride_w.value;
      const int mine = row * p.window_w + column;
#pragma unroll
      for (int e = 0; e < kVector; e++)
        sum[e] += window.places.elements[e] == mine ? window.dy[e] : 0.f;
    };
    if constexpr (kWidth > 0) {
      Loaded windows[kWidth * kWidth];
      ForSquare<kWidth>(rows, columns, [&](int i, int j, bool exists) {
        if (exists) windows[i * kWidth + j] = load(i, j);
      });
      ForSquare<kWidth>(rows, columns, [&](int i, int j, bool exists) {
        if (exists) add(windows[i * kWidth + j], i, j);
      });
    } else {
      ForSquare<0>(rows, columns, [&](int i, int j, bool) { add(load(i, j), i, j); });
    }
    Write<kVector>(dx + k * kVector, sum);
  }
}

// ---- launchers ----

// Of images x and what is pooled from them, y; threads are for the elements of `out`.
Windows WindowsOf(const char* op, const DLArray* x, const DLArray* y, const DLArray* out,
                  const WindowOptions& options, int vector) {
  CheckNchw(op, x);
  CheckNchw(op, y);
  const int64_t *in = x->shape, *pooled = y->shape, *shape = out->shape;
  const bool dilated = options.dilation.h != 1 || options.dilation.w != 1;
  if (in[0] != pooled[0] || in[3] != pooled[3] || dilated || Numel(x) > INT32_MAX)
    Fail("%s: windows of %s do not give %s, or are dilated", op, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  return {(int)in[1],
          (int)in[2],
          (int)pooled[1],
          (int)pooled[2],
          (int)options.size.h,
          (int)options.size.w,
          (int)options.before.h,
          (int)options.before.w,
          (int)in[3],
          Divisor(options.stride.h),
          Divisor(options.stride.w),
          Divisor(std::max<int64_t>(in[3] / vector, 1)),
          Divisor(std::max<int64_t>(shape[2], 1)),
          Divisor(std::max<int64_t>(shape[1], 1)),
          Numel(out) / vector};
}

Place* PlacesOf(const char* op, const DLArray* a, const WindowOptions& options) {
  if (a->dtype != DL_UINT8) Fail("%s: expected uint8 places, got %s", op, DtypeText(a->dtype));
  if (Size(options.size) > kMostPlaces)
    Fail("%s: expected windows of at most %ld elements, got %ld x %ld", op, (long)kMostPlaces,
         (long)options.size.h, (long)options.size.w);
  return (Place*)a->data;
}

template <class T>
bool InVectors(const DLArray* images, const T* x, const T* y, const Place* places) {
  return images->shape[3] % kWide<T> == 0 && Aligned16(x) && Aligned16(y) && Aligned16(places);
}

// Calls run(vector, width), two std::integral_constant, of the width of a square that is known.
template <class T, class Run>
void WithWidth(bool vectors, int64_t height, int64_t width, Run&& run) {
  const auto with = [&](auto of_square) {
    vectors ? run(std::integral_constant<int, kWide<T>>(), of_square)
            : run(std::integral_constant<int, 1>(), of_square);
  };
  if (height == width && width == 2) return with(std::integral_constant<int, 2>());
  if (height == width && width == 3) return with(std::integral_constant<int, 3>());
  with(std::integral_constant<int, 0>());
}

template <class T>
void MaxPool(const DLArray* x, DLArray* y, DLArray* places, Struct<WindowOptions> windows,
             DLStream stream) {
  const char* op = "max_pool2d_channels_last";
  Enter(op, y, x, places);
  CheckSameShape(op, y, places);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  Place* of = PlacesOf(op, places, *windows);
  WithWidth<T>(InVectors(x, in, out, of), windows->size.h, windows->size.w,
               [&](auto vector, auto width) {
                 const Windows p = WindowsOf(op, x, y, y, *windows, vector);
                 Launch(op, MaxPoolKernel<T, vector, width>, Blocks(p.items), kThreads, 0, stream,
                        p, in, out, of);
               });
}

template <class T>
void MaxPoolGradient(const DLArray* dy, const DLArray* places, DLArray* dx,
                     Struct<WindowOptions> windows, DLStream stream) {
  const char* op = "max_pool2d_gradient_channels_last";
  Enter(op, dx, dy, places);
  CheckSameShape(op, dy, places);
  const T* in = In<T>(op, dy);
  T* out = Out<T>(op, dx);
  const Place* of = PlacesOf(op, places, *windows);
  // Windows that cover an element, along each axis.
  const HW size = windows->size, stride = windows->stride;
  WithWidth<T>(InVectors(dx, in, out, of), CeilDiv(size.h, stride.h), CeilDiv(size.w, stride.w),
               [&](auto vector, auto width) {
                 const Windows p = WindowsOf(op, dx, dy, dx, *windows, vector);
                 Launch(op, MaxPoolGradientKernel<T, vector, width>, Blocks(p.items), kThreads, 0,
                        stream, p, in, of, out);
               });
}

#define DLSYS_CHANNELS_LAST(name, Template)                            \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_FLOAT32, Template<float>);     \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_BFLOAT16, Template<bfloat16>); \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_FLOAT16, Template<float16>)
DLSYS_CHANNELS_LAST(max_pool2d_channels_last, MaxPool);
DLSYS_CHANNELS_LAST(max_pool2d_gradient_channels_last, MaxPoolGradient);
#undef DLSYS_CHANNELS_LAST

}  // namespace
}  // namespace cuda
}  // namespace dlsys
