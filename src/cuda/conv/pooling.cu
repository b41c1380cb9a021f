// Pooling. x and dx are (planes, plane), y, dy and the int32 indices (planes, out); an index counts
// within its plane. Results overlap no input.
//
// A gradient is gathered: the thread of an element of dx walks over the windows that cover it in
// row-major order, so that no two threads add to one element and the order is always the same.
#include "cuda/runtime/launch.cuh"
#include "math/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Pool with 32-bit sizes; `after` is the padding behind the plane that a mean counts, if it does.
struct Windows {
  int plane_h, plane_w, out_h, out_w, size_h, size_w, stride_h, stride_w, before_h, before_w;
  int padded_h, padded_w;
  bool count_padding;
  int dilation_h, dilation_w;

  __device__ int Plane() const { return plane_h * plane_w; }
  __device__ int Out() const { return out_h * out_w; }
};

// The elements [begin, end) along one axis that a window covers.
struct Range {
  int begin, end;
};

__device__ __forceinline__ Range Seen(int window, int size, int stride, int before, int plane) {
  const int first = window * stride - before;
  return {max(first, 0), min(first + size, plane)};
}

// The taps [begin, end) along one axis that lie on the plane, `dilation` apart from `first` on.
struct Taps {
  int first, begin, end;
};

__device__ __forceinline__ Taps Met(int window, int size, int stride, int before, int dilation,
                                    int plane) {
  const int first = window * stride - before;
  return {first, first < 0 ? (dilation - 1 - first) / dilation : 0,
          min(size, (plane - 1 - first) / dilation + 1)};
}

// The windows [begin, end) along one axis that cover an element.
__device__ __forceinline__ Range Covering(int at, int size, int stride, int before, int out) {
  const int place = at + before;
  return {place < size ? 0 : (place - size) / stride + 1, min(place / stride + 1, out)};
}

// Where item k of planes of `size` elements, `width` across, lies. Index is unsigned when it fits,
// for 64-bit division is slow.
struct Spot {
  int64_t plane;
  int h, w;
};
template <class Index>
__device__ __forceinline__ Spot SpotOf(Index k, int size, int width) {
  const Index plane = k / (Index)size;
  const int place = (int)(k - plane * (Index)size);
  return {(int64_t)plane, place / width, place % width};
}

template <class Index>
__global__ void MaxPoolKernel(const Windows p, const float* x, float* y, int32_t* argmax,
                              int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Spot spot = SpotOf((Index)k, p.Out(), p.out_w);
    const float* plane = x + spot.plane * p.Plane();
    const Range rows = Seen(spot.h, p.size_h, p.stride_h, p.before_h, p.plane_h);
    const Range cols = Seen(spot.w, p.size_w, p.stride_w, p.before_w, p.plane_w);
    int best = rows.begin * p.plane_w + cols.begin;
    float largest = plane[best];
    for (int i = rows.begin; i < rows.end; i++) {
      for (int j = cols.begin; j < cols.end; j++) {
        const float value = plane[i * p.plane_w + j];
        if (!(value <= largest) && largest == largest) {  // NaN is larger than every number
          largest = value;
          best = i * p.plane_w + j;
        }
      }
    }
    y[k] = largest;
    argmax[k] = best;
  }
}

// The same where taps lie apart.
template <class Index>
__global__ void DilatedMaxPoolKernel(const Windows p, const float* x, float* y, int32_t* argmax,
                                     int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Spot spot = SpotOf((Index)k, p.Out(), p.out_w);
    const float* plane = x + spot.plane * p.Plane();
    const Taps rows = Met(spot.h, p.size_h, p.stride_h, p.before_h, p.dilation_h, p.plane_h);
    const Taps cols = Met(spot.w, p.size_w, p.stride_w, p.before_w, p.dilation_w, p.plane_w);
    int best = -1;
    float largest = 0.f;
    for (int i = rows.begin; i < rows.end; i++) {
      const int row = (rows.first + i * p.dilation_h) * p.plane_w + cols.first;
      for (int j = cols.begin; j < cols.end; j++) {
        const float value = plane[row + j * p.dilation_w];
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

// With dilation, size is the extent of a window: the walk then meets windows whose taps leave the
// element out, and none of these has found its maximum there.
template <class Index>
__global__ void MaxPoolGradientKernel(const Windows p, const float* dy, const int32_t* argmax,
                                      float* dx, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Spot spot = SpotOf((Index)k, p.Plane(), p.plane_w);
    const int64_t first = spot.plane * p.Out();
    const int mine = spot.h * p.plane_w + spot.w;
    const Range rows = Covering(spot.h, p.size_h, p.stride_h, p.before_h, p.out_h);
    const Range cols = Covering(spot.w, p.size_w, p.stride_w, p.before_w, p.out_w);
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

// The same for windows of 2 x 2 that tile the plane, a thread a window; those past the last are the
// plane's odd row and column. pairs: two neighbours are aligned.
template <class Index>
__global__ void MaxPoolTilesGradientKernel(const Windows p, const float* dy, const int32_t* argmax,
                                           float* dx, bool pairs, int64_t tiles) {
  const int tiles_h = (p.plane_h + 1) / 2, tiles_w = (p.plane_w + 1) / 2;
  for (int64_t k = FirstItem(); k < tiles; k += ItemStep()) {
    const Spot spot = SpotOf((Index)k, tiles_h * tiles_w, tiles_w);
    const int64_t window = spot.plane * p.Out() + spot.h * p.out_w + spot.w;
    const bool exists = spot.h < p.out_h && spot.w < p.out_w;
    const int best = exists ? argmax[window] : -1;
    const float gradient = exists ? dy[window] : 0.f;
    const int first = 2 * spot.h * p.plane_w + 2 * spot.w;
#pragma unroll
    for (int row = 0; row < 2; row++) {
      if (2 * spot.h + row >= p.plane_h) break;
      const int at = first + row * p.plane_w;
      float* to = dx + spot.plane * p.Plane() + at;
      const float left = best == at ? gradient : 0.f, right = best == at + 1 ? gradient : 0.f;
      if (pairs) {
        *(float2*)to = make_float2(left, right);
        continue;
      }
      to[0] = left;
      if (2 * spot.w + 1 < p.plane_w) to[1] = right;
    }
  }
}

// y (planes, out) = x (planes, plane) at argmax; an index off the plane reads 0.
__global__ void MaxPoolReadKernel(const float* x, const int32_t* argmax, float* y, int64_t plane,
                                  int64_t out, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t at = argmax[k];
    y[k] = at >= 0 && at < plane ? x[k / out * plane + at] : 0.f;
  }
}

// By how many elements window (i, j) divides.
__device__ __forceinline__ float CountOf(const Windows& p, int i, int j) {
  if (p.count_padding) {
    const int first_h = i * p.stride_h - p.before_h, first_w = j * p.stride_w - p.before_w;
    return (float)min(p.size_h, p.padded_h - first_h) * (float)min(p.size_w, p.padded_w - first_w);
  }
  const Range rows = Seen(i, p.size_h, p.stride_h, p.before_h, p.plane_h);
  const Range cols = Seen(j, p.size_w, p.stride_w, p.before_w, p.plane_w);
  return (float)(rows.end - rows.begin) * (float)(cols.end - cols.begin);
}

template <class Index>
__global__ void AvgPoolKernel(const Windows p, const float* x, float* y, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Spot spot = SpotOf((Index)k, p.Out(), p.out_w);
    const float* plane = x + spot.plane * p.Plane();
    const Range rows = Seen(spot.h, p.size_h, p.stride_h, p.before_h, p.plane_h);
    const Range cols = Seen(spot.w, p.size_w, p.stride_w, p.before_w, p.plane_w);
    float sum = 0.f;
    for (int i = rows.begin; i < rows.end; i++) {
      float of_row = 0.f;  // sums of sums keep the error of large windows small
      for (int j = cols.begin; j < cols.end; j++) of_row += plane[i * p.plane_w + j];
      sum += of_row;
    }
    y[k] = sum / CountOf(p, spot.h, spot.w);
  }
}

template <class Index>
__global__ void AvgPoolGradientKernel(const Windows p, const float* dy, float* dx, int64_t numel) {
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const Spot spot = SpotOf((Index)k, p.Plane(), p.plane_w);
    const float* of_plane = dy + spot.plane * p.Out();
    const Range rows = Covering(spot.h, p.size_h, p.stride_h, p.before_h, p.out_h);
    const Range cols = Covering(spot.w, p.size_w, p.stride_w, p.before_w, p.out_w);
    float sum = 0.f;
    for (int i = rows.begin; i < rows.end; i++) {
      for (int j = cols.begin; j < cols.end; j++)
        sum += of_plane[i * p.out_w + j] / CountOf(p, i, j);
    }
    dx[k] = sum;
  }
}

// ---- launchers ----

Windows WindowsOf(const Pool& p, Pair after = {0, 0}, bool count_padding = false) {
  return {(int)p.plane.h,
          (int)p.plane.w,
          (int)p.out.h,
          (int)p.out.w,
          (int)p.size.h,
          (int)p.size.w,
          (int)p.stride.h,
          (int)p.stride.w,
          (int)p.before.h,
          (int)p.before.w,
          (int)(p.plane.h + after.h),
          (int)(p.plane.w + after.w),
          count_padding,
          (int)p.dilation.h,
          (int)p.dilation.w};
}

int32_t* Indices(const char* op, const DLArray* a) {
  if (a->dtype != DL_INT32) Fail("%s: expected int32 indices, got %s", op, DtypeText(a->dtype));
  return (int32_t*)a->data;
}

bool Fits32(int64_t numel) { return numel <= INT32_MAX; }

void MaxPool2d(const DLArray* x, DLArray* y, DLArray* argmax, int64_t size, int64_t stride,
               int64_t before, int64_t dilation, DLStream stream) {
  const char* op = "max_pool2d";
  Enter(op, y, x, argmax);
  CheckSameShape(op, y, argmax);
  const Pool p = CheckedPool(op, x, y, size, stride, before, dilation);
  const int64_t numel = Numel(y);
  auto kernel = Fits32(numel) ? MaxPoolKernel<unsigned> : MaxPoolKernel<int64_t>;
  if (p.Dilated())
    kernel = Fits32(numel) ? DilatedMaxPoolKernel<unsigned> : DilatedMaxPoolKernel<int64_t>;
  Launch(op, kernel, Blocks(numel), kThreads, 0, stream, WindowsOf(p), In(op, x), Out(op, y),
         Indices(op, argmax), numel);
}

void MaxPool2dGradient(const DLArray* dy, const DLArray* argmax, DLArray* dx, int64_t size,
                       int64_t stride, int64_t before, int64_t dilation, DLStream stream) {
  const char* op = "max_pool2d_gradient";
  Enter(op, dx, dy, argmax);
  CheckSameShape(op, dy, argmax);
  Pool p = CheckedPool(op, dx, dy, size, stride, before, dilation);
  const int64_t numel = Numel(dx);
  const Pair two{2, 2};
  if (p.size == two && p.stride == two && p.before == Pair{0, 0} && !p.Dilated()) {
    const int64_t tiles = p.planes * CeilDiv(p.plane.h, 2) * CeilDiv(p.plane.w, 2);
    const bool pairs = p.plane.w % 2 == 0 && (uintptr_t)dx->data % sizeof(float2) == 0;
    return Launch(
        op,
        Fits32(tiles) ? MaxPoolTilesGradientKernel<unsigned> : MaxPoolTilesGradientKernel<int64_t>,
        Blocks(tiles), kThreads, 0, stream, WindowsOf(p), In(op, dy), Indices(op, argmax),
        Out(op, dx), pairs, tiles);
  }
  p.size = p.Extent();
  Launch(op, Fits32(numel) ? MaxPoolGradientKernel<unsigned> : MaxPoolGradientKernel<int64_t>,
         Blocks(numel), kThreads, 0, stream, WindowsOf(p), In(op, dy), Indices(op, argmax),
         Out(op, dx), numel);
}

void MaxPool2dRead(const DLArray* x, const DLArray* argmax, DLArray* y, DLStream stream) {
  const char* op = "max_pool2d_read";
  Enter(op, y, x, argmax);
  CheckSameShape(op, argmax, y);
  CheckPlanes(op, x);
  CheckPlanes(op, y);
  if (x->shape[0] != y->shape[0] || x->shape[1] != y->shape[1])
    Fail("%s: shapes do not fit: %s and %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  const int64_t numel = Numel(y);
  Launch(op, MaxPoolReadKernel, Blocks(numel), kThreads, 0, stream, In(op, x), Indices(op, argmax),
         Out(op, y), Size(PlaneOf(x)), Size(PlaneOf(y)), numel);
}

void AvgPool2d(const DLArray* x, DLArray* y, int64_t size, int64_t stride, int64_t before,
               int64_t after, int64_t padding, DLStream stream) {
  const char* op = "avg_pool2d";
  Enter(op, y, x);
  const Pool p = CheckedPool(op, x, y, size, stride, before);
  const int64_t numel = Numel(y);
  Launch(op, Fits32(numel) ? AvgPoolKernel<unsigned> : AvgPoolKernel<int64_t>, Blocks(numel),
         kThreads, 0, stream, WindowsOf(p, Unpack(after), padding != 0), In(op, x), Out(op, y),
         numel);
}

void AvgPool2dGradient(const DLArray* dy, DLArray* dx, int64_t size, int64_t stride, int64_t before,
                       int64_t after, int64_t padding, DLStream stream) {
  const char* op = "avg_pool2d_gradient";
  Enter(op, dx, dy);
  const Pool p = CheckedPool(op, dx, dy, size, stride, before);
  const int64_t numel = Numel(dx);
  Launch(op, Fits32(numel) ? AvgPoolGradientKernel<unsigned> : AvgPoolGradientKernel<int64_t>,
         Blocks(numel), kThreads, 0, stream, WindowsOf(p, Unpack(after), padding != 0), In(op, dy),
         Out(op, dx), numel);
}

DLSYS_KERNEL(cuda, max_pool2d, MaxPool2d);
DLSYS_KERNEL(cuda, max_pool2d_gradient, MaxPool2dGradient);
DLSYS_KERNEL(cuda, max_pool2d_read, MaxPool2dRead);
DLSYS_KERNEL(cuda, avg_pool2d, AvgPool2d);
DLSYS_KERNEL(cuda, avg_pool2d_gradient, AvgPool2dGradient);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
