// SumAxis: the sum of one axis of a device array, for kernels that end in one (split-K, means).
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// y (outer, inner) = scale * sum over n of x (outer, n, inner). The order of additions depends on
// the sizes only. It takes scratch where n is large and outer * inner is small.
void SumAxis(const char* op, DLContext ctx, const float* x, int64_t outer, int64_t n, int64_t inner,
             float scale, float* y, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
