// Sums of one axis on the device, for kernels that end in one.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// y (outer, inner) = scale * sum over n of x (outer, n, inner). The order of additions depends on
// the sizes only. Takes scratch from the allocator when n is large and the rest is small.
void SumAxis(const char* op, DLContext ctx, const float* x, int64_t outer, int64_t n, int64_t inner,
             float scale, float* y, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
