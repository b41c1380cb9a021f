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
    float largest[kVector];
    int best[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++)
      largest[e] = -INFINITY, best[e] = rows.first * p.window_w + columns.first;
    const auto compare = [&](const Vec<T, kVector>& values, int place) {
#pragma unroll
      for (int e = 0; e < kVector; e++) {
        // NaN is larger than every other value.
        const bool larger = !(values[e] <= largest[e]) && largest[e] == largest[e];
        if (!larger) continue;
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

// A thread makes a cell of kStride x kStride elements, which windows of kWindow x kWindow elements
// begin at; of those it reads all that cover one of its elements, once. Places, which are below
// 128, are compared four at a time.
template <class T, int kWindow, int kStride>
__global__ void MaxPoolGradientKernel(const Windows p, const T* dy, const Place* places, T* dx) {
  constexpr int kCover = (kWindow + kStride - 1) / kStride;  // windows of a cell along each axis
  constexpr int kVector = kWide<T>, kOfWord = 4 / (int)sizeof(T), kFours = kVector / 4;
  struct Loaded {
    uint32_t dy[4], places[kFours];

    __device__ __forceinline__ Vec<T, kVector> Where(int place) const {
      uint32_t kept[4];
#pragma unroll
      for (int k = 0; k < kFours; k++) {
        const uint32_t off = places[k] ^ (uint32_t)place * 0x01010101u;
        const uint32_t equal = ((0x80808080u - off) >> 7 & 0x01010101u) * 0xFFu;  // bytes of ones
#pragma unroll
        for (int e = 0; e < 4; e += kOfWord) {
          const int word = (4 * k + e) / kOfWord;
          kept[word] = dy[word] & __byte_perm(equal, 0, 0x0011 * e + 0x1100 * (e + kOfWord - 1));
        }
      }
      Vec<T, kVector> v;
      memcpy(&v, kept, sizeof v);
      return v;
    }
  };
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item cell = ItemOf<kVector>(p, (int)k);
    const int top = cell.h * kStride - p.pad_h, left = cell.w * kStride - p.pad_w;
    Loaded windows[kCover][kCover];
#pragma unroll
    for (int i = 0; i < kCover; i++) {
#pragma unroll
      for (int j = 0; j < kCover; j++) {
        const int of_h = cell.h - kCover + 1 + i, of_w = cell.w - kCover + 1 + j;
        const bool exists =
            (unsigned)of_h < (unsigned)p.out_h && (unsigned)of_w < (unsigned)p.out_w;
        const int64_t at = ((cell.image * p.out_h + of_h) * p.out_w + of_w) * p.channels + cell.c;
        const int4 read = exists ? *(const int4*)(dy + at) : int4{};
        Loaded& to = windows[i][j];
        memcpy(to.dy, &read, sizeof read);
#pragma unroll
        for (int f = 0; f < kFours; f++)
          to.places[f] = exists ? *(const uint32_t*)(places + at + 4 * f) : 0;
      }
    }
#pragma unroll
    for (int r = 0; r < kStride; r++) {
#pragma unroll
      for (int s = 0; s < kStride; s++) {
        const int h = top + r, w = left + s;
        if ((unsigned)h >= (unsigned)p.in_h || (unsigned)w >= (unsigned)p.in_w) continue;
        float sum[kVector] = {};
#pragma unroll
        for (int i = 0; i < kCover; i++) {
#pragma unroll
          for (int j = 0; j < kCover; j++) {
            const int row = r + (kCover - 1 - i) * kStride, column = s + (kCover - 1 - j) * kStride;
            if (row >= kWindow || column >= kWindow) continue;
            const Vec<T, kVector> kept = windows[i][j].Where(row * kWindow + column);
#pragma unroll
            for (int e = 0; e < kVector; e++) sum[e] += kept[e];
          }
        }
        Write<kVector>(dx + ((cell.image * p.in_h + h) * p.in_w + w) * p.channels + cell.c, sum);
      }
    }
  }
}

// The same of any windows: a thread makes an element.
template <class T, int kVector>
__global__ void MaxPoolAnyGradientKernel(const Windows p, const T* dy, const Place* places, T* dx) {
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item item = ItemOf<kVector>(p, (int)k);
    const int down = item.h + p.pad_h, right = item.w + p.pad_w;
    const int first_i = down < p.window_h ? 0 : (down - p.window_h) / p.stride_h + 1;
    const int first_j = right < p.window_w ? 0 : (right - p.window_w) / p.stride_w + 1;
    const int last_i = min(down / p.stride_h + 1, p.out_h),
              last_j = min(right / p.stride_w + 1, p.out_w);
    float sum[kVector] = {};
    for (int i = first_i; i < last_i; i++) {
      for (int j = first_j; j < last_j; j++) {
        const int64_t at = ((item.image * p.out_h + i) * p.out_w + j) * p.channels + item.c;
        const int row = down - i * (int)p.stride_h.value;
        const int column = right - j * (int)p.stride_w.value;
        const Vec<T, kVector> of_dy = Read<kVector>(dy + at);
        const Vec<Place, kVector> of = *(const Vec<Place, kVector>*)(places + at);
#pragma unroll
        for (int e = 0; e < kVector; e++)
          sum[e] += of.elements[e] == row * p.window_w + column ? of_dy[e] : 0.f;
      }
    }
    Write<kVector>(dx + k * kVector, sum);
  }
}

// ---- launchers ----

// Of images x and what is pooled from them, y; threads are for so many elements of images.
Windows WindowsOf(const char* op, const DLArray* x, const DLArray* y, HW threads,
                  const WindowOptions& options, int vector) {
  CheckNchw(op, x);
  CheckNchw(op, y);
  const int64_t *in = x->shape, *pooled = y->shape;
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
          Divisor(std::max<int64_t>(threads.w, 1)),
          Divisor(std::max<int64_t>(threads.h, 1)),
          in[0] * Size(threads) * in[3] / vector};
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

template <int kValue>
using Number = std::integral_constant<int, kValue>;

// Calls run(vector), a Number.
template <class T, class Run>
void WithVector(bool vectors, Run&& run) {
  vectors ? run(Number<kWide<T>>()) : run(Number<1>());
}
// Height and width of an image (n, h, w, c).
HW ExtentsOf(const DLArray* images) { return {images->shape[1], images->shape[2]}; }

template <class T>
void MaxPool(const DLArray* x, DLArray* y, DLArray* places, Struct<WindowOptions> windows,
             DLStream stream) {
  const char* op = "max_pool2d_channels_last";
  Enter(op, y, x, places);
  CheckSameShape(op, y, places);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  Place* of = PlacesOf(op, places, *windows);
  WithVector<T>(InVectors(x, in, out, of), [&](auto vector) {
    const Windows p = WindowsOf(op, x, y, ExtentsOf(y), *windows, vector);
    const auto launch = [&](auto kernel) {
      Launch(op, kernel, Blocks(p.items), kThreads, 0, stream, p, in, out, of);
    };
    if (windows->size == HW{2, 2}) return launch(MaxPoolKernel<T, vector, 2>);
    if (windows->size == HW{3, 3}) return launch(MaxPoolKernel<T, vector, 3>);
    launch(MaxPoolKernel<T, vector, 0>);
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
  const auto run = [&](HW threads, auto kernel, int vector) {
    const Windows p = WindowsOf(op, dx, dy, threads, *windows, vector);
    Launch(op, kernel, Blocks(p.items), kThreads, 0, stream, p, in, of, out);
  };
  const HW size = windows->size, stride = windows->stride, before = windows->before;
  const HW extents = ExtentsOf(dx);
  const HW cells{CeilDiv(extents.h + before.h, stride.h), CeilDiv(extents.w + before.w, stride.w)};
  const bool vectors = InVectors(dx, in, out, of);
  const auto is = [&](int64_t of_size, int64_t of_stride) {
    return vectors && size == HW{of_size, of_size} && stride == HW{of_stride, of_stride};
  };
  if (is(2, 2)) return run(cells, MaxPoolGradientKernel<T, 2, 2>, kWide<T>);
  if (is(3, 2)) return run(cells, MaxPoolGradientKernel<T, 3, 2>, kWide<T>);
  if (is(3, 1)) return run(cells, MaxPoolGradientKernel<T, 3, 1>, kWide<T>);
  WithVector<T>(vectors,
                [&](auto vector) { run(extents, MaxPoolAnyGradientKernel<T, vector>, vector); });
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
