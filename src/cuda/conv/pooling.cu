// Max and average pooling with their gradients. x and dx are (n * c, in), y, dy and the int32
// argmax (n * c, out); an argmax counts within its H x W. float32, contiguous; results overlap no
// input. One thread per output element, memory-bound.
//
// Gradients gather: the thread of an element of dx visits the windows that cover it in row-major
// order, so there are no atomics and the order of summation is fixed.
#include <algorithm>

#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/widened.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// What positions in an image are found by.
struct Extents {
  Divisor size, width;
  Extents(int64_t h, int64_t w)
      : size(std::max<int64_t>(h * w, 1)), width(std::max<int64_t>(w, 1)) {}
};

// Pool in 32-bit sizes. `padded` includes the padding at the end, where averages count padding.
struct Windows {
  int in_h, in_w, out_h, out_w, window_h, window_w, pad_h, pad_w;
  Divisor stride_h, stride_w;
  int padded_h, padded_w;
  bool count_padding;
  int dilation_h, dilation_w;
  Extents in, out;

  __device__ int InSize() const { return (int)in.size.value; }
  __device__ int OutSize() const { return (int)out.size.value; }
};

// The elements [begin, end) along one axis that a window covers.
struct Range {
  int begin, end;
};

__device__ __forceinline__ Range Seen(int window, int size, const Divisor& stride, int pad,
                                      int in) {
  const int first = window * (int)stride.value - pad;
  return {max(first, 0), min(first + size, in)};
}

// The window elements [begin, end) along one axis that lie within the input, `dilation` apart from
// `first` on.
struct DilatedRange {
  int first, begin, end;
};

__device__ __forceinline__ DilatedRange SeenDilated(int window, int size, const Divisor& stride,
                                                    int pad, int dilation, int in) {
  const int first = window * (int)stride.value - pad;
  return {first, first < 0 ? (dilation - 1 - first) / dilation : 0,
          min(size, (in - 1 - first) / dilation + 1)};
}

// The windows [begin, end) along one axis that cover an element.
__device__ __forceinline__ Range Covering(int at, int size, const Divisor& stride, int pad,
                                          int out) {
  const int padded = at + pad;
  return {padded < size ? 0 : (padded - size) / stride + 1, min(padded / stride + 1, out)};
}

// Coordinates of element k of (n * c, size), rows of `width`. Index is unsigned where it fits, for
// 64-bit division is slow.
struct Position {
  int64_t nc;
  int h, w;
};
template <class Index>
__device__ __forceinline__ Position PositionOf(Index k, const Extents& of) {
  int64_t nc;
  if constexpr (sizeof(Index) == sizeof(int))
    nc = (int)k / of.size;
  else
    nc = k / (Index)of.size.value;
  const int offset = (int)(k - (Index)nc * (Index)of.size.value), h = offset / of.width;
  return {nc, h, offset - h * (int)of.width.value};
}

template <class Index>
__global__ void MaxPoolKernel(const Windows p, const float* x, float* y, int32_t* argmax,
                              int64_t numel) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Position position = PositionOf((Index)k, p.out);
    const float* image = x + position.nc * p.InSize();
    const Range rows = Seen(position.h, p.window_h, p.stride_h, p.pad_h, p.in_h);
    const Range cols = Seen(position.w, p.window_w, p.stride_w, p.pad_w, p.in_w);
    int best = rows.begin * p.in_w + cols.begin;
    float largest = image[best];
    for (int i = rows.begin; i < rows.end; i++) {
      for (int j = cols.begin; j < cols.end; j++) {
        const float value = image[i * p.in_w + j];
        if (!(value <= largest) && largest == largest) {  // NaN is larger than every other value
          largest = value;
          best = i * p.in_w + j;
        }
      }
    }
    y[k] = largest;
    argmax[k] = best;
  }
}

constexpr int kPoolLanes = 8;  // threads of a large window

// The larger of two elements at their positions, of equal ones and of NaNs the first.
struct Candidate {
  float value;
  int at;
};
__device__ __forceinline__ Candidate Larger(Candidate a, Candidate b) {
  const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
  const bool same = (a_is_nan && b_is_nan) || a.value == b.value;
  const bool first = same ? a.at < b.at : a_is_nan || a.value > b.value;
  return first && a.at >= 0 ? a : b.at >= 0 ? b : a;
}

// The same of large windows, by several threads each.
__global__ void LargeMaxPoolKernel(const Windows p, const Divisor of_width, const float* x,
                                   float* y, int32_t* argmax, int64_t numel) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int lane = (int)threadIdx.x % kPoolLanes, size = p.window_h * p.window_w;
  for (int64_t k = FirstItem() / kPoolLanes; k < RoundUp(numel, 32 / kPoolLanes);
       k += ItemStep() / kPoolLanes) {
    const Position position = PositionOf((unsigned)min(k, numel - 1), p.out);
    const float* image = x + position.nc * p.InSize();
    const int top = position.h * (int)p.stride_h.value - p.pad_h;
    const int left = position.w * (int)p.stride_w.value - p.pad_w;
    Candidate best{0.f, -1};
#pragma unroll 4
    for (int at = lane; at < size; at += kPoolLanes) {
      const int i = at / of_width, h = top + i, w = left + at - i * p.window_w;
      const bool inside = (unsigned)h < (unsigned)p.in_h && (unsigned)w < (unsigned)p.in_w;
      const Candidate other{inside ? image[h * p.in_w + w] : 0.f, inside ? h * p.in_w + w : -1};
      best = Larger(best, other);
    }
#pragma unroll
    for (int to = kPoolLanes / 2; to > 0; to /= 2)
      best =
          Larger(best, {__shfl_xor_sync(~0u, best.value, to), __shfl_xor_sync(~0u, best.at, to)});
    if (lane > 0 || k >= numel) continue;
    y[k] = best.value;
    argmax[k] = best.at;
  }
}

// Max-pooling over dilated windows.
template <class Index>
__global__ void DilatedMaxPoolKernel(const Windows p, const float* x, float* y, int32_t* argmax,
                                     int64_t numel) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Position position = PositionOf((Index)k, p.out);
    const float* image = x + position.nc * p.InSize();
    const DilatedRange rows =
        SeenDilated(position.h, p.window_h, p.stride_h, p.pad_h, p.dilation_h, p.in_h);
    const DilatedRange cols =
        SeenDilated(position.w, p.window_w, p.stride_w, p.pad_w, p.dilation_w, p.in_w);
    int best = -1;
    float largest = 0.f;
    for (int i = rows.begin; i < rows.end; i++) {
      const int row = (rows.first + i * p.dilation_h) * p.in_w + cols.first;
      for (int j = cols.begin; j < cols.end; j++) {
        const float value = image[row + j * p.dilation_w];
        if (best < 0 || (!(value <= largest) && largest == largest)) {
          largest = value;
          best = row + j * p.dilation_w;
        }
      }
    }
    y[k] = largest;
    argmax[k] = best;
  }
}

// With dilation, window_h and window_w are extents: the walk also visits windows that skip the
// element, but none of those has its maximum there.
template <class Index>
__global__ void MaxPoolGradientKernel(const Windows p, const float* dy, const int32_t* argmax,
                                      float* dx, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Position position = PositionOf((Index)k, p.in);
    const int64_t first = position.nc * p.OutSize();
    const int mine = position.h * p.in_w + position.w;
    const Range rows = Covering(position.h, p.window_h, p.stride_h, p.pad_h, p.out_h);
    const Range cols = Covering(position.w, p.window_w, p.stride_w, p.pad_w, p.out_w);
    float sum = 0.f;
    for (int i = rows.begin; i < rows.end; i++) {
      for (int j = cols.begin; j < cols.end; j++) {
        const int64_t window = first + i * p.out_w + j;
        if (argmax[window] == mine) sum += dy[window];
      }
    }
    dx[k] = sum;
  }
}

// The gradient for 2 x 2 windows that tile the input, one thread per window; the last ones write
// the odd row and column. aligned2: two adjacent elements allow 8-byte stores.
template <class Index>
__global__ void MaxPoolTilesGradientKernel(const Windows p, const float* dy, const int32_t* argmax,
                                           float* dx, const Extents in_tiles, bool aligned2,
                                           int64_t tiles) {
  for (int64_t k = FirstItem(); k < tiles; k += ItemStep()) {
    const Position position = PositionOf((Index)k, in_tiles);
    const int64_t window = position.nc * p.OutSize() + position.h * p.out_w + position.w;
    const bool exists = position.h < p.out_h && position.w < p.out_w;
    const int best = exists ? argmax[window] : -1;
    const float gradient = exists ? dy[window] : 0.f;
    const int first = 2 * position.h * p.in_w + 2 * position.w;
#pragma unroll
    for (int row = 0; row < 2; row++) {
      if (2 * position.h + row >= p.in_h) break;
      const int at = first + row * p.in_w;
      float* to = dx + position.nc * p.InSize() + at;
      const float left = best == at ? gradient : 0.f, right = best == at + 1 ? gradient : 0.f;
      if (aligned2) {
        *(float2*)to = make_float2(left, right);
        continue;
      }
      to[0] = left;
      if (2 * position.w + 1 < p.in_w) to[1] = right;
    }
  }
}

// y (n * c, out) = x (n * c, in) at argmax; an index outside the input reads 0.
__global__ void MaxPoolReadKernel(const float* x, const int32_t* argmax, float* y, int64_t in_size,
                                  int64_t out, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t at = argmax[k];
    y[k] = at >= 0 && at < in_size ? x[k / out * in_size + at] : 0.f;
  }
}

// The divisor of window (i, j).
__device__ __forceinline__ float DivisorOf(const Windows& p, int i, int j) {
  if (p.count_padding) {
    const int first_h = i * (int)p.stride_h.value - p.pad_h;
    const int first_w = j * (int)p.stride_w.value - p.pad_w;
    return (float)min(p.window_h, p.padded_h - first_h) *
           (float)min(p.window_w, p.padded_w - first_w);
  }
  const Range rows = Seen(i, p.window_h, p.stride_h, p.pad_h, p.in_h);
  const Range cols = Seen(j, p.window_w, p.stride_w, p.pad_w, p.in_w);
  return (float)(rows.end - rows.begin) * (float)(cols.end - cols.begin);
}

template <class Index>
__global__ void AvgPoolKernel(const Windows p, const float* x, float* y, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Position position = PositionOf((Index)k, p.out);
    const float* image = x + position.nc * p.InSize();
    const Range rows = Seen(position.h, p.window_h, p.stride_h, p.pad_h, p.in_h);
    const Range cols = Seen(position.w, p.window_w, p.stride_w, p.pad_w, p.in_w);
    float sum = 0.f;
    for (int i = rows.begin; i < rows.end; i++) {
      float row_sum = 0.f;  // sums of row sums keep the rounding error of large windows small
      for (int j = cols.begin; j < cols.end; j++) row_sum += image[i * p.in_w + j];
      sum += row_sum;
    }
    y[k] = sum / DivisorOf(p, position.h, position.w);
  }
}

template <class Index>
__global__ void AvgPoolGradientKernel(const Windows p, const float* dy, float* dx, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Position position = PositionOf((Index)k, p.in);
    const float* dy_image = dy + position.nc * p.OutSize();
    const Range rows = Covering(position.h, p.window_h, p.stride_h, p.pad_h, p.out_h);
    const Range cols = Covering(position.w, p.window_w, p.stride_w, p.pad_w, p.out_w);
    float sum = 0.f;
    for (int i = rows.begin; i < rows.end; i++) {
      for (int j = cols.begin; j < cols.end; j++)
        sum += dy_image[i * p.out_w + j] / DivisorOf(p, i, j);
    }
    dx[k] = sum;
  }
}

// ---- launchers ----

Windows WindowsOf(const Pool& p, HW after = {0, 0}, bool count_padding = false) {
  return {(int)p.in.h,
          (int)p.in.w,
          (int)p.out.h,
          (int)p.out.w,
          (int)p.window.h,
          (int)p.window.w,
          (int)p.pad.h,
          (int)p.pad.w,
          Divisor(p.stride.h),
          Divisor(p.stride.w),
          (int)(p.in.h + after.h),
          (int)(p.in.w + after.w),
          count_padding,
          (int)p.dilation.h,
          (int)p.dilation.w,
          Extents(p.in.h, p.in.w),
          Extents(p.out.h, p.out.w)};
}

int32_t* Indices(const char* op, const DLArray* a) {
  if (a->dtype != DL_INT32) Fail("%s: expected int32 indices, got %s", op, DtypeText(a->dtype));
  return (int32_t*)a->data;
}

bool Fits32(int64_t numel) { return numel <= INT32_MAX; }

void MaxPool2d(const DLArray* x, DLArray* y, DLArray* argmax, Struct<WindowOptions> windows,
               DLStream stream) {
  const char* op = "max_pool2d";
  Enter(op, y, x, argmax);
  CheckSameShape(op, y, argmax);
  const Pool p = CheckedPool(op, x, y, *windows);
  const int64_t numel = Numel(y);
  auto kernel = Fits32(numel) ? MaxPoolKernel<unsigned> : MaxPoolKernel<int64_t>;
  if (p.Dilated())
    kernel = Fits32(numel) ? DilatedMaxPoolKernel<unsigned> : DilatedMaxPoolKernel<int64_t>;
  constexpr int64_t kLarge = 2 * kPoolLanes;  // elements of a window
  constexpr int64_t kFew = int64_t{1} << 20;  // of all
  if (!p.Dilated() && Size(p.window) >= kLarge && numel <= kFew)
    return LaunchBeside(op, LargeMaxPoolKernel, Blocks(numel * kPoolLanes), 1, kThreads, 0, stream,
                        WindowsOf(p), Divisor(p.window.w), In(op, x), Out(op, y),
                        Indices(op, argmax), numel);
  LaunchBeside(op, kernel, Blocks(numel), 1, kThreads, 0, stream, WindowsOf(p), In(op, x),
               Out(op, y), Indices(op, argmax), numel);
}

void MaxPool2dGradient(const DLArray* dy, const DLArray* argmax, DLArray* dx,
                       Struct<WindowOptions> windows, DLStream stream) {
  const char* op = "max_pool2d_gradient";
  Enter(op, dx, dy, argmax);
  CheckSameShape(op, dy, argmax);
  Pool p = CheckedPool(op, dx, dy, *windows);
  const int64_t numel = Numel(dx);
  const HW two{2, 2};
  if (p.window == two && p.stride == two && p.pad == HW{0, 0} && !p.Dilated()) {
    const int64_t tiles = p.nc * CeilDiv(p.in.h, 2) * CeilDiv(p.in.w, 2);
    const bool aligned2 = p.in.w % 2 == 0 && (uintptr_t)dx->data % sizeof(float2) == 0;
    return Launch(
        op,
        Fits32(tiles) ? MaxPoolTilesGradientKernel<unsigned> : MaxPoolTilesGradientKernel<int64_t>,
        Blocks(tiles), kThreads, 0, stream, WindowsOf(p), In(op, dy), Indices(op, argmax),
        Out(op, dx), Extents(CeilDiv(p.in.h, 2), CeilDiv(p.in.w, 2)), aligned2, tiles);
  }
  p.window = p.Extent();
  Launch(op, Fits32(numel) ? MaxPoolGradientKernel<unsigned> : MaxPoolGradientKernel<int64_t>,
         Blocks(numel), kThreads, 0, stream, WindowsOf(p), In(op, dy), Indices(op, argmax),
         Out(op, dx), numel);
}

void MaxPool2dRead(const DLArray* x, const DLArray* argmax, DLArray* y, DLStream stream) {
  const char* op = "max_pool2d_read";
  Enter(op, y, x, argmax);
  CheckSameShape(op, argmax, y);
  CheckNchw(op, x);
  CheckNchw(op, y);
  if (x->shape[0] != y->shape[0] || x->shape[1] != y->shape[1])
    Fail("%s: shapes do not fit: %s and %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  const int64_t numel = Numel(y);
  Launch(op, MaxPoolReadKernel, Blocks(numel), kThreads, 0, stream, In(op, x), Indices(op, argmax),
         Out(op, y), Size(SpatialOf(x)), Size(SpatialOf(y)), numel);
}

void AvgPool2d(const DLArray* x, DLArray* y, Struct<WindowOptions> windows, int64_t padding,
               DLStream stream) {
  const char* op = "avg_pool2d";
  Enter(op, y, x);
  const Pool p = CheckedPool(op, x, y, *windows);
  const int64_t numel = Numel(y);
  Launch(op, Fits32(numel) ? AvgPoolKernel<unsigned> : AvgPoolKernel<int64_t>, Blocks(numel),
         kThreads, 0, stream, WindowsOf(p, windows->after, padding != 0), In(op, x), Out(op, y),
         numel);
}

void AvgPool2dGradient(const DLArray* dy, DLArray* dx, Struct<WindowOptions> windows,
                       int64_t padding, DLStream stream) {
  const char* op = "avg_pool2d_gradient";
  Enter(op, dx, dy);
  const Pool p = CheckedPool(op, dx, dy, *windows);
  const int64_t numel = Numel(dx);
  Launch(op, Fits32(numel) ? AvgPoolGradientKernel<unsigned> : AvgPoolGradientKernel<int64_t>,
         Blocks(numel), kThreads, 0, stream, WindowsOf(p, windows->after, padding != 0), In(op, dy),
         Out(op, dx), numel);
}

DLSYS_KERNEL(cuda, max_pool2d, MaxPool2d);
DLSYS_KERNEL_WIDENED(cuda, max_pool2d, MaxPool2d);
DLSYS_KERNEL(cuda, max_pool2d_gradient, MaxPool2dGradient);
DLSYS_KERNEL_WIDENED(cuda, max_pool2d_gradient, MaxPool2dGradient);
DLSYS_KERNEL(cuda, max_pool2d_read, MaxPool2dRead);
DLSYS_KERNEL_WIDENED(cuda, max_pool2d_read, MaxPool2dRead);
DLSYS_KERNEL(cuda, avg_pool2d, AvgPool2d);
DLSYS_KERNEL_WIDENED(cuda, avg_pool2d, AvgPool2d);
DLSYS_KERNEL(cuda, avg_pool2d_gradient, AvgPool2dGradient);
DLSYS_KERNEL_WIDENED(cuda, avg_pool2d_gradient, AvgPool2dGradient);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
