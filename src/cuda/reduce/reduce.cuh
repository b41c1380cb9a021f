// SumAxis: the sum of one axis of a contiguous array of float32 or of a storage type, scaled, for
// kernels of other files that end in one (split-K, means, gradients of biases and filters). It is
// the reduction of axis.cuh with the monoid of sums: the order depends on the sizes only. The
// result is float32 or of a storage type and does not overlap the array. Memory bandwidth limits
// it.
#pragma once
#include "cuda/runtime/context.cuh"
#include "math/storage.h"

namespace dlsys {
namespace cuda {

// Where results go: floats of a storage type, or indices. Only the kernel's last statement looks at
// the type, so kernels are not compiled for each.
struct Output {
  void* data;
  int dtype;
  template <class T>
  __host__ __device__ Output(T* y) : data(y), dtype(kDtype<T>) {}
  __device__ __forceinline__ void Store(int64_t at, float value) const {
    if (dtype == DL_FLOAT32)
      ((float*)data)[at] = value;
    else if (dtype == DL_BFLOAT16)
      ((bfloat16*)data)[at] = bfloat16(value);
    else
      ((float16*)data)[at] = float16(value);
  }
  __device__ __forceinline__ void Store(int64_t at, int64_t index) const {
    ((int64_t*)data)[at] = index;
  }
};

// y (outer, inner) = scale * sum over n of x (outer, n, inner). The order of additions depends on
// the sizes only. It takes scratch where n is large and outer * inner is small.
void SumAxis(const char* op, DLContext ctx, const float* x, int64_t outer, int64_t n, int64_t inner,
             float scale, Output y, DLStream stream);
void SumAxis(const char* op, DLContext ctx, const bfloat16* x, int64_t outer, int64_t n,
             int64_t inner, float scale, Output y, DLStream stream);
void SumAxis(const char* op, DLContext ctx, const float16* x, int64_t outer, int64_t n,
             int64_t inner, float scale, Output y, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
