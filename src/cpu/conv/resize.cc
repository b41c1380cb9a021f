// Nearest and bilinear resizing of images (..., H, W) on the CPU, with their gradients. Each axis
// is tabulated first: what a resized element reads, and which of them read an original one. Forward
// and gradient both gather, a row of the output after the other, so threads never add to one
// element. The output never overlaps the input. Memory bandwidth limits it.
#include "operators/resize.h"

#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

// The elements that each element of an axis reads, and those that read it.
struct Table {
  const ScratchArray<Lerp> of_resized;
  const ScratchArray<Readers> of_original;
  Lerp* const lerps;       // of the m resized positions
  Readers* const readers;  // of the n original ones

  explicit Table(const ResizedAxis& axis)
      : of_resized(axis.m),
        of_original(axis.n),
        lerps(of_resized.data()),
        readers(of_original.data()) {
    Serially([&] {
      for (int64_t i = 0; i < axis.m; i++) lerps[i] = axis.At(i);
      for (int64_t k = 0; k < axis.n; k++) readers[k] = axis.ReadersOf(k);
    });
  }
};

struct Tables {
  const Table rows, cols;
  explicit Tables(const Resize& resize) : rows(resize.rows), cols(resize.cols) {}
};

template <class T>
void ResizeForward(const char* op, const DLArray* x, int64_t align, bool linear, DLArray* y) {
  const T* in = Input<T>(op, x);
  T* out = Output<T>(op, y);
  if (Numel(y) == 0 && Numel(x) == 0) return;
  const Resize resize = ResizeOf(op, x, align != 0, linear, y);
  const Tables tables(resize);
  const int64_t height = resize.rows.m, width = resize.cols.m, x_width = resize.cols.n;
  ParallelFor(resize.batch * height, RowGrain(width), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const Lerp row = tables.rows.lerps[k % height];
      const T* image = in + k / height * resize.rows.n * x_width;
      const T* low = image + row.low * x_width;
      const T* high = image + row.high * x_width;
      for (int64_t j = 0; j < width; j++) {
        const Lerp col = tables.cols.lerps[j];
        if (!linear) {
          out[k * width + j] = low[col.low];
          continue;
        }
        const float above = (1.f - col.weight) * low[col.low] + col.weight * low[col.high];
        const float below = (1.f - col.weight) * high[col.low] + col.weight * high[col.high];
        out[k * width + j] = T((1.f - row.weight) * above + row.weight * below);
      }
    }
  });
}

// dx[r, c] = sum over the resized elements that read it of their weights times dy.
template <class T>
void ResizeBackward(const char* op, const DLArray* dy, int64_t align, bool linear, DLArray* dx) {
  const T* in = Input<T>(op, dy);
  T* out = Output<T>(op, dx);
  if (Numel(dx) == 0 && Numel(dy) == 0) return;
  const Resize resize = ResizeOf(op, dx, align != 0, linear, dy);
  const Tables tables(resize);
  const int64_t height = resize.rows.n, width = resize.cols.n, y_width = resize.cols.m;
  ParallelFor(resize.batch * height, RowGrain(width), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const Readers rows = tables.rows.readers[k % height];
      const T* image = in + k / height * resize.rows.m * y_width;
      for (int64_t c = 0; c < width; c++) {
        const Readers cols = tables.cols.readers[c];
        float total = 0;
        for (int64_t i = rows.first; i <= rows.last; i++) {
          float row_sum = 0;
          for (int64_t j = cols.first; j <= cols.last; j++)
            row_sum += tables.cols.lerps[j].Of(c) * image[i * y_width + j];
          total += tables.rows.lerps[i].Of(k % height) * row_sum;
        }
        out[k * width + c] = T(total);
      }
    }
  });
}

template <class T>
void ResizeNearest(const DLArray* x, int64_t align, DLArray* y) {
  ResizeForward<T>("resize_nearest", x, align, false, y);
}
template <class T>
void ResizeBilinear(const DLArray* x, int64_t align, DLArray* y) {
  ResizeForward<T>("resize_bilinear", x, align, true, y);
}
template <class T>
void ResizeNearestGradient(const DLArray* dy, int64_t align, DLArray* dx) {
  ResizeBackward<T>("resize_nearest_gradient", dy, align, false, dx);
}
template <class T>
void ResizeBilinearGradient(const DLArray* dy, int64_t align, DLArray* dx) {
  ResizeBackward<T>("resize_bilinear_gradient", dy, align, true, dx);
}

DLSYS_KERNEL_TYPED(cpu, resize_nearest, ResizeNearest);
DLSYS_KERNEL_TYPED(cpu, resize_bilinear, ResizeBilinear);
DLSYS_KERNEL_TYPED(cpu, resize_nearest_gradient, ResizeNearestGradient);
DLSYS_KERNEL_TYPED(cpu, resize_bilinear_gradient, ResizeBilinearGradient);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
