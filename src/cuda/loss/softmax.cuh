// Kernels that go along rows of logits (rows, classes) share this: the two-pass statistics of a
// stable softmax, the maximum of a row and then the sum of exp(x - max), which a thread group
// reduces (group.cuh), the labels of a row, and the checks of arguments. A label out of range is
// noted on the device (fault.cuh) and reported after the step. The second pass reads a short row
// from the cache, so memory bandwidth limits such kernels.
#pragma once
#include "cuda/reduce/group.cuh"
#include "cuda/runtime/fault.cuh"

namespace dlsys {
namespace cuda {

struct Stats {
  float max, sum;  // sum of exp(x - max)
};

// kUnroll is how far the loops over classes unroll; 1 where there are few rows, to keep code small.
template <int kGroup, int kUnroll = 4, class T>
__device__ Stats RowStats(const T* x, int64_t classes, int rank) {
  float max = -INFINITY;
#pragma unroll kUnroll
  for (int64_t c = rank; c < classes; c += kGroup) max = fmaxf(max, (float)x[c]);
  max = GroupReduce<MaxMonoid, kGroup>(max);
  float sum = 0.f;
#pragma unroll kUnroll
  for (int64_t c = rank; c < classes; c += kGroup) sum += expf(x[c] - max);
  return {max, GroupReduce<SumMonoid, kGroup>(sum)};
}

struct Labels {
  const void* data;  // (rows), int32, int64 or uint8
  int dtype;
  Faults faults;
  __device__ int64_t At(int64_t row) const {
    if (dtype == DL_INT32) return ((const int32_t*)data)[row];
    if (dtype == DL_INT64) return ((const int64_t*)data)[row];
    return ((const uint8_t*)data)[row];
  }
};

// One float a row, of a storage type.
struct RowFloats {
  const void* data;
  int dtype;
  __device__ __forceinline__ float At(int64_t row) const {
    if (dtype == DL_FLOAT32) return ((const float*)data)[row];
    if (dtype == DL_BFLOAT16) return ((const bfloat16*)data)[row];
    return ((const float16*)data)[row];
  }
};

struct Rows {
  int64_t count, classes;
  Rows(const char* op, const DLArray* x) {
    if (x->ndim < 1) Fail("%s: expected at least 1 dimension, got shape ()", op);
    classes = x->shape[x->ndim - 1];
    count = 1;
    for (int axis = 0; axis + 1 < x->ndim; axis++) count *= x->shape[axis];
  }
};

inline void CheckOneARow(const char* op, const char* what, const DLArray* a, const DLArray* x,
                         const Rows& rows) {
  if (Numel(a) != rows.count)
    Fail("%s: expected one %s a row: logits %s and %s %s", op, what, ShapeText(x).c_str(), what,
         ShapeText(a).c_str());
}

inline Labels CheckedLabels(const char* op, const DLArray* labels, const DLArray* x,
                            const Rows& rows) {
  const int dtype = labels->dtype;
  if (dtype != DL_INT32 && dtype != DL_INT64 && dtype != DL_UINT8)
    Fail("%s: expected labels of int32, int64 or uint8, got %s", op, DtypeText(dtype));
  CheckOneARow(op, "label", labels, x, rows);
  return Labels{labels->data, dtype, FaultsOf(op, "label", x->ctx.device_id)};
}

}  // namespace cuda
}  // namespace dlsys
