// Max-pooling of images with channels last, and its gradient: x and dx (n, in, c), y and dy and the
// int32 argmax (n, out, c); an argmax counts within its H x W. Contiguous; results overlap no
// input. A thread has the channels of 16 bytes of an output element where there are such;
// memory-bound.
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

template <int kVector>
__device__ __forceinline__ void LoadIndices(const int32_t* from, int (&to)[kVector]) {
  if constexpr (kVector == 1) {
    to[0] = *from;
  } else {
#pragma unroll
    for (int q = 0; q < kVector / 4; q++) {
      const int4 v = ((const int4*)from)[q];
      to[4 * q] = v.x, to[4 * q + 1] = v.y, to[4 * q + 2] = v.z, to[4 * q + 3] = v.w;
    }
  }
}
template <int kVector>
__device__ __forceinline__ void StoreIndices(int32_t* to, const int (&from)[kVector]) {
  if constexpr (kVector == 1) {
    *to = from[0];
  } else {
#pragma unroll
    for (int q = 0; q < kVector / 4; q++)
      ((int4*)to)[q] = int4{from[4 * q], from[4 * q + 1], from[4 * q + 2], from[4 * q + 3]};
  }
}

template <class T, int kVector>
__global__ void MaxPoolKernel(const Windows p, const T* x, T* y, int32_t* argmax) {
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item item = ItemOf<kVector>(p, (int)k);
    const T* image = x + item.image * p.in_h * p.in_w * p.channels + item.c;
    const int top = item.h * (int)p.stride_h.value - p.pad_h,
              left = item.w * (int)p.stride_w.value - p.pad_w;
    float largest[kVector] = {};
    int best[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++) best[e] = -1;
    for (int i = max(top, 0); i < min(top + p.window_h, p.in_h); i++) {
      for (int j = max(left, 0); j < min(left + p.window_w, p.in_w); j++) {
        const int at = i * p.in_w + j;
        const auto values = Read<kVector>(image + (int64_t)at * p.channels);
#pragma unroll
        for (int e = 0; e < kVector; e++) {
          // NaN is larger than every other value.
          const bool larger = !(values[e] <= largest[e]) && largest[e] == largest[e];
          if (best[e] >= 0 && !larger) continue;
          largest[e] = values[e];
          best[e] = at;
        }
      }
    }
    Write<kVector>(y + k * kVector, largest);
    StoreIndices<kVector>(argmax + k * kVector, best);
  }
}

template <class T, int kVector>
__global__ void MaxPoolGradientKernel(const Windows p, const T* dy, const int32_t* argmax, T* dx) {
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item item = ItemOf<kVector>(p, (int)k);
    const int mine = item.h * p.in_w + item.w, down = item.h + p.pad_h, right = item.w + p.pad_w;
    const int first_i = down < p.window_h ? 0 : (down - p.window_h) / p.stride_h + 1;
    const int first_j = right < p.window_w ? 0 : (right - p.window_w) / p.stride_w + 1;
    const int last_i = min(down / p.stride_h + 1, p.out_h);
    const int last_j = min(right / p.stride_w + 1, p.out_w);
    float sum[kVector] = {};
    for (int i = first_i; i < last_i; i++) {
      for (int j = first_j; j < last_j; j++) {
        const int64_t window = (item.image * p.out_h + i) * p.out_w + j;
        const int64_t at = window * p.channels + item.c;
        const auto values = Read<kVector>(dy + at);
        int best[kVector];
        LoadIndices<kVector>(argmax + at, best);
#pragma unroll
        for (int e = 0; e < kVector; e++) sum[e] += best[e] == mine ? values[e] : 0.f;
      }
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

int32_t* Indices(const char* op, const DLArray* a) {
  if (a->dtype != DL_INT32) Fail("%s: expected int32 indices, got %s", op, DtypeText(a->dtype));
  return (int32_t*)a->data;
}

template <class T>
bool InVectors(const DLArray* images, const T* x, const T* y, const void* argmax) {
  return images->shape[3] % kWide<T> == 0 && Aligned16(x) && Aligned16(y) && Aligned16(argmax);
}

template <class T>
void MaxPool(const DLArray* x, DLArray* y, DLArray* argmax, Struct<WindowOptions> windows,
             DLStream stream) {
  const char* op = "max_pool2d_channels_last";
  Enter(op, y, x, argmax);
  CheckSameShape(op, y, argmax);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  const bool vectors = InVectors(x, in, out, argmax->data);
  const Windows p = WindowsOf(op, x, y, y, *windows, vectors ? kWide<T> : 1);
  Launch(op, vectors ? MaxPoolKernel<T, kWide<T>> : MaxPoolKernel<T, 1>, Blocks(p.items), kThreads,
         0, stream, p, in, out, Indices(op, argmax));
}

template <class T>
void MaxPoolGradient(const DLArray* dy, const DLArray* argmax, DLArray* dx,
                     Struct<WindowOptions> windows, DLStream stream) {
  const char* op = "max_pool2d_gradient_channels_last";
  Enter(op, dx, dy, argmax);
  CheckSameShape(op, dy, argmax);
  const T* in = In<T>(op, dy);
  T* out = Out<T>(op, dx);
  const bool vectors = InVectors(dx, in, out, argmax->data);
  const Windows p = WindowsOf(op, dx, dy, dx, *windows, vectors ? kWide<T> : 1);
  Launch(op, vectors ? MaxPoolGradientKernel<T, kWide<T>> : MaxPoolGradientKernel<T, 1>,
         Blocks(p.items), kThreads, 0, stream, p, in, Indices(op, argmax), out);
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
