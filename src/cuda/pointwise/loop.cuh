// Strided loops over an output: broadcasting, transposes and general layouts as index arithmetic. A
// loop is built on the host and passed to kernels by value. Strides count elements; 0 broadcasts an
// operand along an axis.
#pragma once
#include <cuda_runtime.h>

#include "runtime/registry.h"

namespace dlsys {
namespace cuda {

struct Loop {
  int ndim = 0;
  int64_t shape[DL_MAX_NDIM];
  // Strides of the operands; a loop with one operand uses x.
  int64_t x[DL_MAX_NDIM], y[DL_MAX_NDIM];

  void Append(int64_t size, int64_t x_stride, int64_t y_stride) {
    shape[ndim] = size;
    x[ndim] = x_stride;
    y[ndim] = y_stride;
    ndim++;
  }
};

// Appends an axis, or folds it into the last one where both operands cross the two as one axis.
inline void AppendFolded(Loop* loop, int64_t size, int64_t x_stride, int64_t y_stride) {
  if (size == 1) return;
  const int last = loop->ndim - 1;
  if (last < 0 || loop->x[last] != x_stride * size || loop->y[last] != y_stride * size)
    return loop->Append(size, x_stride, y_stride);
  loop->shape[last] *= size;
  loop->x[last] = x_stride;
  loop->y[last] = y_stride;
}

// Folds a loop to as few axes as possible, without axes of size 1, but to one axis at least.
inline Loop Fold(const Loop& loop) {
  Loop folded;
  for (int k = 0; k < loop.ndim; k++) AppendFolded(&folded, loop.shape[k], loop.x[k], loop.y[k]);
  if (folded.ndim == 0) folded.Append(1, 0, 0);
  return folded;
}

// Strides of `a` along the axes of `out` by numpy's right-aligned rule; false when the shapes do
// not broadcast.
inline bool BroadcastStrides(const DLArray* a, const DLArray* out, int64_t* strides) {
  if (a->ndim > out->ndim) return false;
  int64_t stride = 1;
  for (int k = out->ndim - 1; k >= 0; k--) {
    const int axis = k - (out->ndim - a->ndim);
    const int64_t size = axis < 0 ? 1 : a->shape[axis];
    if (size != 1 && size != out->shape[k]) return false;
    strides[k] = size == 1 ? 0 : stride;
    stride *= size;
  }
  return true;
}

// The loop over `out` that reads x and y broadcast to its shape.
inline Loop BroadcastLoop(const char* op, const DLArray* x, const DLArray* y, const DLArray* out) {
  Loop loop;
  loop.ndim = out->ndim;
  for (int k = 0; k < out->ndim; k++) loop.shape[k] = out->shape[k];
  if (!BroadcastStrides(x, out, loop.x) || !BroadcastStrides(y, out, loop.y))
    Fail("%s: shapes %s and %s do not broadcast to %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str(), ShapeText(out).c_str());
  return Fold(loop);
}

struct Offsets {
  int64_t x, y;
};

// The offsets in the operands of element `index` of the output, in row-major order. Index is a type
// that holds the number of elements: 32 bits divide faster.
template <class Index = int64_t>
__host__ __device__ inline Offsets Locate(const Loop& loop, Index index) {
  Offsets offsets = {0, 0};
  for (int k = loop.ndim - 1; k > 0; k--) {
    const Index outer = index / (Index)loop.shape[k];
    const int64_t position = (int64_t)(index - outer * (Index)loop.shape[k]);
    offsets.x += position * loop.x[k];
    offsets.y += position * loop.y[k];
    index = outer;
  }
  offsets.x += (int64_t)index * loop.x[0];
  offsets.y += (int64_t)index * loop.y[0];
  return offsets;
}

}  // namespace cuda
}  // namespace dlsys
