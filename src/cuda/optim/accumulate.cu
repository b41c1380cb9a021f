// Compensated accumulation over many steps: total (2, n) holds sums and their rounding errors
// (Knuth's two-sum), both float32, read and written; x (n) is of any storage type, only read, and
// overlaps no total. Memory bandwidth limits it.
#include "cuda/runtime/launch.cuh"
#include "math/accumulate.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// sums[n] + errors[n] += x[n]
template <class T>
__global__ void AccumulateKernel(float* sums, float* errors, const T* x, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) AddTerm(x[i], sums + i, errors + i);
}

// ---- launchers ----

template <class T>
void Accumulate(DLArray* total, const DLArray* x, DLStream stream) {
  const char* op = "accumulate";
  Enter(op, total, x);
  float* sums = Out(op, total);
  const int64_t n = Numel(x);
  if (total->ndim != 2 || total->shape[0] != 2 || total->shape[1] != n)
    Fail("accumulate: expected a total (2, %ld), got %s", (long)n, ShapeText(total).c_str());
  Launch(op, AccumulateKernel<T>, Blocks(n), kThreads, 0, stream, sums, sums + n, In<T>(op, x), n);
}

DLSYS_KERNEL_TYPED(cuda, accumulate, Accumulate);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
