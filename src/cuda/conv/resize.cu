// Nearest and bilinear resizing of images (batch, rows, cols), with gradients. Contiguous; the
// output overlaps no input. Memory-bound.
//
// A first launch tabulates per axis what each element reads and by which elements it is read; the
// second, one thread per element, uses the tables. The gradient gathers: no atomics, a fixed order
// of summation.
#include "cuda/runtime/launch.cuh"
#include "operators/resize.h"

namespace dlsys {
namespace cuda {
namespace {

// Tables in device memory.
struct Table {
  Lerp* lerps;       // (axis.m)
  Readers* readers;  // (axis.n)
};

// ---- kernels ----

__global__ void TableKernel(ResizedAxis axis, Table table) {
  for (int64_t i = FirstItem(); i < axis.m; i += ItemStep()) table.lerps[i] = axis.At(i);
  for (int64_t k = FirstItem(); k < axis.n; k += ItemStep()) table.readers[k] = axis.ReadersOf(k);
}

template <class T, bool kLinear>
__global__ void ResizeKernel(const T* x, T* y, int64_t n, Resize resize, Table rows, Table cols) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const int64_t line = i / resize.cols.m;
    const int64_t image = line / resize.rows.m;
    const Lerp row = rows.lerps[line - image * resize.rows.m];
    const Lerp col = cols.lerps[i - line * resize.cols.m];
    const T* low = x + (image * resize.rows.n + row.low) * resize.cols.n;
    if (!kLinear) {
      y[i] = low[col.low];
      continue;
    }
    const T* high = x + (image * resize.rows.n + row.high) * resize.cols.n;
    const float above = (1.f - col.weight) * low[col.low] + col.weight * low[col.high];
    const float below = (1.f - col.weight) * high[col.low] + col.weight * high[col.high];
    y[i] = T((1.f - row.weight) * above + row.weight * below);
  }
}

template <class T>
__global__ void ResizeGradientKernel(const T* dy, T* dx, int64_t n, Resize resize, Table rows,
                                     Table cols) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const int64_t line = i / resize.cols.n;
    const int64_t image = line / resize.rows.n;
    const int64_t r = line - image * resize.rows.n;
    const int64_t c = i - line * resize.cols.n;
    const Readers in_rows = rows.readers[r], in_cols = cols.readers[c];
    float total = 0.f;
    for (int64_t k = in_rows.first; k <= in_rows.last; k++) {
      const T* row = dy + (image * resize.rows.m + k) * resize.cols.m;
      float row_sum = 0.f;
      for (int64_t j = in_cols.first; j <= in_cols.last; j++)
        row_sum += cols.lerps[j].Of(c) * row[j];
      total += rows.lerps[k].Of(r) * row_sum;
    }
    dx[i] = T(total);
  }
}

// ---- launchers ----

// The tables of both axes in one block of device memory.
class Tables {
 public:
  Tables(const char* op, const Resize& resize, DLContext ctx, DLStream stream)
      : lerps_(resize.rows.m + resize.cols.m),
        scratch_(ctx,
                 lerps_ * (int64_t)sizeof(Lerp) +
                     (resize.rows.n + resize.cols.n) * (int64_t)sizeof(Readers),
                 stream) {
    Lerp* lerps = (Lerp*)scratch_.data();
    Readers* readers = (Readers*)(lerps + lerps_);
    rows = Table{lerps, readers};
    cols = Table{lerps + resize.rows.m, readers + resize.rows.n};
    for (const auto& [axis, table] : {std::pair(resize.rows, rows), std::pair(resize.cols, cols)})
      Launch(op, TableKernel, Blocks(axis.m > axis.n ? axis.m : axis.n), kThreads, 0, stream, axis,
             table);
  }

  Table rows, cols;

 private:
  int64_t lerps_;
  Scratch scratch_;
};

template <class T>
void Forward(const char* op, const DLArray* x, int64_t align, bool linear, DLArray* y,
             DLStream stream) {
  Enter(op, y, x);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  const int64_t n = Numel(y);
  if (n == 0 && Numel(x) == 0) return;
  const Resize resize = ResizeOf(op, x, align != 0, linear, y);
  const Tables tables(op, resize, y->ctx, stream);
  Launch(op, linear ? ResizeKernel<T, true> : ResizeKernel<T, false>, Blocks(n), kThreads, 0,
         stream, in, out, n, resize, tables.rows, tables.cols);
}

template <class T>
void Backward(const char* op, const DLArray* dy, int64_t align, bool linear, DLArray* dx,
              DLStream stream) {
  Enter(op, dx, dy);
  const T* in = In<T>(op, dy);
  T* out = Out<T>(op, dx);
  const int64_t n = Numel(dx);
  if (n == 0 && Numel(dy) == 0) return;
  const Resize resize = ResizeOf(op, dx, align != 0, linear, dy);
  const Tables tables(op, resize, dx->ctx, stream);
  Launch(op, ResizeGradientKernel<T>, Blocks(n), kThreads, 0, stream, in, out, n, resize,
         tables.rows, tables.cols);
}

template <class T>
void ResizeNearest(const DLArray* x, int64_t align, DLArray* y, DLStream stream) {
  Forward<T>("resize_nearest", x, align, false, y, stream);
}
template <class T>
void ResizeBilinear(const DLArray* x, int64_t align, DLArray* y, DLStream stream) {
  Forward<T>("resize_bilinear", x, align, true, y, stream);
}
template <class T>
void ResizeNearestGradient(const DLArray* dy, int64_t align, DLArray* dx, DLStream stream) {
  Backward<T>("resize_nearest_gradient", dy, align, false, dx, stream);
}
template <class T>
void ResizeBilinearGradient(const DLArray* dy, int64_t align, DLArray* dx, DLStream stream) {
  Backward<T>("resize_bilinear_gradient", dy, align, true, dx, stream);
}

DLSYS_KERNEL_TYPED(cuda, resize_nearest, ResizeNearest);
DLSYS_KERNEL_TYPED(cuda, resize_bilinear, ResizeBilinear);
DLSYS_KERNEL_TYPED(cuda, resize_nearest_gradient, ResizeNearestGradient);
DLSYS_KERNEL_TYPED(cuda, resize_bilinear_gradient, ResizeBilinearGradient);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
