// quantize, dequantize, quantized_add and quantized_max_pool2d on the GPU. Scales and zero points
// are one for a tensor, or one for each position of an axis. A product that is added is exact in
// float32, so that a compiler may contract it: all devices give the same bits. The result overlaps
// no input. A thread has four elements where there are fours; memory bandwidth limits them.
#include <algorithm>

#include "cuda/quantized/rounding.cuh"
#include "cuda/runtime/context.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace {

// The position of an element's scale among n: (k / inner) % n.
struct Scales {
  Divisor by_inner, by_n;

  __device__ __forceinline__ int Of(int k) const {
    const int row = k / by_inner;
    return row - row / by_n * (int)by_n.value;
  }
};

Scales CheckedScales(const char* op, const DLArray* x, const DLArray* scale, const DLArray* zero,
                     int64_t axis) {
  int64_t inner = 1;
  if (Numel(scale) != Numel(zero)) Fail("%s: as many scales as zero points", op);
  if (Numel(x) > INT32_MAX) Fail("%s: %s has too many elements", op, ShapeText(x).c_str());
  if (scale->ndim == 0) return {Divisor(1), Divisor(1)};
  if (axis < 0 || axis >= x->ndim || x->shape[axis] != Numel(scale))
    Fail("%s: %ld scales do not fit axis %ld of %s", op, (long)Numel(scale), (long)axis,
         ShapeText(x).c_str());
  for (int a = (int)axis + 1; a < x->ndim; a++) inner *= x->shape[a];
  return {Divisor(std::max<int64_t>(inner, 1)), Divisor(std::max<int64_t>(Numel(scale), 1))};
}

template <int kVector>
struct alignas(kVector) Bytes {
  uint8_t at[kVector];
};
template <int kVector>
struct alignas(4 * kVector) Floats {
  float at[kVector];
};

// Whether one scale serves all of x decides how many elements a thread takes.
template <int kVector>
__global__ void QuantizeKernel(const Scales scales, const float* x, const float* scale,
                               const uint8_t* zero, uint8_t* q, int64_t items) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int64_t k = FirstItem(); k < items; k += ItemStep()) {
    const int s = kVector > 1 ? 0 : scales.Of((int)k);
    const Floats<kVector> from = ((const Floats<kVector>*)x)[k];
    Bytes<kVector> to;
#pragma unroll
    for (int e = 0; e < kVector; e++) to.at[e] = QuantizedByte(from.at[e], scale[s], zero[s]);
    ((Bytes<kVector>*)q)[k] = to;
  }
}

template <int kVector, class T>
__global__ void DequantizeKernel(const Scales scales, const T* x, const float* scale, const T* zero,
                                 float* y, int64_t items) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int64_t k = FirstItem(); k < items; k += ItemStep()) {
    const int s = kVector > 1 ? 0 : scales.Of((int)k);
    const T* from = x + k * kVector;
    Floats<kVector> to;
#pragma unroll
    for (int e = 0; e < kVector; e++)
      to.at[e] = (float)((int64_t)from[e] - (int64_t)zero[s]) * scale[s];
    ((Floats<kVector>*)y)[k] = to;
  }
}

struct Sum {
  float scale_a, scale_b, offset, low, high;
};

template <int kVector>
__global__ void AddKernel(const Sum sum, const uint8_t* a, const uint8_t* b, uint8_t* y,
                          int64_t items) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int64_t k = FirstItem(); k < items; k += ItemStep()) {
    const auto left = ((const Bytes<kVector>*)a)[k], right = ((const Bytes<kVector>*)b)[k];
    Bytes<kVector> to;
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      to.at[e] = (uint8_t)AddedBytes(left.at[e], right.at[e], sum.scale_a, sum.scale_b, sum.offset,
                                     sum.low, sum.high);
    }
    ((Bytes<kVector>*)y)[k] = to;
  }
}

// Images (n, in, channels), whose windows see an element of the image each.
struct Pooling {
  int in_h, in_w, window_h, window_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int vectors;  // of channels
  Divisor by_vectors, by_w, by_h, by_window_w;
};

// Byte by byte.
__device__ __forceinline__ uint32_t LargerBytes(uint32_t a, uint32_t b) {
  uint32_t larger = 0;
#pragma unroll
  for (int e = 0; e < 32; e += 8) larger |= max(a >> e & 255, b >> e & 255) << e;
  return larger;
}

template <int kVector>
__global__ void MaxPoolKernel(const Pooling p, const uint8_t* x, uint8_t* y, int64_t items) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int64_t k = FirstItem(); k < items; k += ItemStep()) {
    const int position = (int)k / p.by_vectors, line = position / p.by_w, image = line / p.by_h;
    const int channel = (int)k - position * p.vectors;
    const int top = (line - image * (int)p.by_h.value) * p.stride_h - p.pad_h;
    const int left = (position - line * (int)p.by_w.value) * p.stride_w - p.pad_w;
    const auto* from = (const Bytes<kVector>*)x + (int64_t)image * p.in_h * p.in_w * p.vectors;
    Bytes<kVector> largest = {};
    for (int i = 0; i < p.window_h; i++) {
      const int h = top + i * p.dilation_h;
      if (h < 0 || h >= p.in_h) continue;
      for (int j = 0; j < p.window_w; j++) {
        const int w = left + j * p.dilation_w;
        if (w < 0 || w >= p.in_w) continue;
        const Bytes<kVector> seen = from[(int64_t)(h * p.in_w + w) * p.vectors + channel];
#pragma unroll
        for (int e = 0; e < kVector; e++) largest.at[e] = max(largest.at[e], seen.at[e]);
      }
    }
    ((Bytes<kVector>*)y)[k] = largest;
  }
}

constexpr int kPoolLanes = 8;  // threads of a large window

// Of large windows, by several threads each, over words of four channels.
__global__ void LargeMaxPoolKernel(const Pooling p, const uint8_t* x, uint8_t* y, int64_t items) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int lane = (int)threadIdx.x % kPoolLanes, size = p.window_h * p.window_w;
  for (int64_t k = FirstItem() / kPoolLanes; k < RoundUp(items, 32 / kPoolLanes);
       k += ItemStep() / kPoolLanes) {
    const int item = (int)min(k, items - 1), position = item / p.by_vectors;
    const int line = position / p.by_w, image = line / p.by_h;
    const int top = (line - image * (int)p.by_h.value) * p.stride_h - p.pad_h;
    const int left = (position - line * (int)p.by_w.value) * p.stride_w - p.pad_w;
    const uint32_t* from = (const uint32_t*)x + (int64_t)image * p.in_h * p.in_w * p.vectors +
                           (item - position * p.vectors);
    uint32_t largest = 0;
#pragma unroll 4
    for (int at = lane; at < size; at += kPoolLanes) {
      const int i = at / p.by_window_w, j = at - i * p.window_w;
      const int h = top + i * p.dilation_h, w = left + j * p.dilation_w;
      const bool inside = (unsigned)h < (unsigned)p.in_h && (unsigned)w < (unsigned)p.in_w;
      largest = LargerBytes(largest, inside ? from[(int64_t)(h * p.in_w + w) * p.vectors] : 0);
    }
#pragma unroll
    for (int to = kPoolLanes / 2; to > 0; to /= 2)
      largest = LargerBytes(largest, __shfl_xor_sync(~0u, largest, to));
    if (lane == 0 && k < items) ((uint32_t*)y)[k] = largest;
  }
}

// ---- launchers ----

bool InFours(int64_t n, const void* a, const void* b, const void* c) {
  return n % 4 == 0 && Aligned16(a) && Aligned16(b) && Aligned16(c);
}

void Quantize(const DLArray* x, const DLArray* scale, const DLArray* zero, int64_t axis, DLArray* q,
              DLStream stream) {
  const char* op = "quantize";
  Enter(op, q, x, scale, zero);
  CheckSameShape(op, x, q);
  const float *from = In(op, x), *factor = In(op, scale);
  const uint8_t* offset = In<uint8_t>(op, zero);
  uint8_t* to = Out<uint8_t>(op, q);
  const Scales scales = CheckedScales(op, x, scale, zero, axis);
  const bool fours = Numel(scale) == 1 && InFours(Numel(x), from, to, to);
  const int64_t items = Numel(x) / (fours ? 4 : 1);
  LaunchBeside(op, fours ? QuantizeKernel<4> : QuantizeKernel<1>, Blocks(items), 1, kThreads, 0,
               stream, scales, from, factor, offset, to, items);
}

template <class T>
void DequantizeAs(const DLArray* x, const DLArray* scale, const DLArray* zero, int64_t axis,
                  DLArray* y, DLStream stream) {
  const char* op = "dequantize";
  CheckSameShape(op, x, y);
  const T *from = In<T>(op, x), *offset = In<T>(op, zero);
  const float* factor = In(op, scale);
  float* to = Out(op, y);
  const Scales scales = CheckedScales(op, x, scale, zero, axis);
  const bool fours = Numel(scale) == 1 && InFours(Numel(x), from, to, to);
  const int64_t items = Numel(x) / (fours ? 4 : 1);
  LaunchBeside(op, fours ? DequantizeKernel<4, T> : DequantizeKernel<1, T>, Blocks(items), 1,
               kThreads, 0, stream, scales, from, factor, offset, to, items);
}

void Dequantize(const DLArray* x, const DLArray* scale, const DLArray* zero, int64_t axis,
                DLArray* y, DLStream stream) {
  Enter("dequantize", y, x, scale, zero);
  if (x->dtype == DL_INT32)
    DequantizeAs<int32_t>(x, scale, zero, axis, y, stream);
  else
    DequantizeAs<uint8_t>(x, scale, zero, axis, y, stream);
}

void QuantizedAdd(const DLArray* a, const DLArray* b, float scale_a, float scale_b, float offset,
                  int64_t low, int64_t high, DLArray* y, DLStream stream) {
  const char* op = "quantized_add";
  Enter(op, y, a, b);
  CheckSameShape(op, a, b);
  CheckSameShape(op, a, y);
  const uint8_t *left = In<uint8_t>(op, a), *right = In<uint8_t>(op, b);
  uint8_t* to = Out<uint8_t>(op, y);
  const bool fours = InFours(Numel(y), left, right, to);
  const int64_t items = Numel(y) / (fours ? 4 : 1);
  const Sum sum{scale_a, scale_b, offset, (float)low, (float)high};
  LaunchBeside(op, fours ? AddKernel<4> : AddKernel<1>, Blocks(items), 1, kThreads, 0, stream, sum,
               left, right, to, items);
}

void QuantizedMaxPool(const DLArray* x, Struct<WindowOptions> windows, DLArray* y,
                      DLStream stream) {
  const char* op = "quantized_max_pool2d";
  Enter(op, y, x);
  CheckNchw(op, x);
  CheckNchw(op, y);
  const int64_t *in = x->shape, *out = y->shape;
  const HW size = windows->size, dilation = windows->dilation;
  if (in[0] != out[0] || in[3] != out[3] || Numel(x) > INT32_MAX || Numel(y) > INT32_MAX)
    Fail("%s: windows do not take %s to %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  const HW reach{in[1] + size.h * dilation.h, in[2] + size.w * dilation.w};
  CheckAttributes(op, windows->stride, windows->before, reach, {out[1], out[2]});
  const uint8_t* from = In<uint8_t>(op, x);
  uint8_t* to = Out<uint8_t>(op, y);
  const bool fours = InFours(in[3], from, to, to);
  const int64_t vectors = in[3] / (fours ? 4 : 1), items = Numel(y) / (fours ? 4 : 1);
  const Pooling p{(int)in[1],
                  (int)in[2],
                  (int)size.h,
                  (int)size.w,
                  (int)windows->stride.h,
                  (int)windows->stride.w,
                  (int)windows->before.h,
                  (int)windows->before.w,
                  (int)dilation.h,
                  (int)dilation.w,
                  (int)vectors,
                  Divisor(std::max<int64_t>(vectors, 1)),
                  Divisor(std::max<int64_t>(out[2], 1)),
                  Divisor(std::max<int64_t>(out[1], 1)),
                  Divisor(size.w)};
  constexpr int64_t kLarge = 2 * kPoolLanes;  // elements of a window
  if (fours && size.h * size.w >= kLarge)
    return LaunchBeside(op, LargeMaxPoolKernel, Blocks(items * kPoolLanes), 1, kThreads, 0, stream,
                        p, from, to, items);
  LaunchBeside(op, fours ? MaxPoolKernel<4> : MaxPoolKernel<1>, Blocks(items), 1, kThreads, 0,
               stream, p, from, to, items);
}

DLSYS_KERNEL(cuda, quantize, Quantize);
DLSYS_KERNEL(cuda, dequantize, Dequantize);
DLSYS_KERNEL(cuda, quantized_add, QuantizedAdd);
DLSYS_KERNEL(cuda, quantized_max_pool2d, QuantizedMaxPool);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
