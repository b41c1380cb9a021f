// Elementwise kernels of int64, of the functors of math/integers.h, with numpy broadcasting. An
// output may be the buffer of an input of its own shape: a thread reads what it overwrites before
// it writes, and no other thread reads it. Memory bandwidth limits it.
#include "cuda/pointwise/loop.cuh"
#include "cuda/runtime/launch.cuh"
#include "math/integers.h"

namespace dlsys {
namespace cuda {
namespace {

template <class F>
__global__ void UnaryKernel(const int64_t* x, int64_t* y, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = F()(x[i]);
}

template <class F>
__global__ void BinaryKernel(const int64_t* x, const int64_t* y, int64_t* z, int64_t n, Loop loop) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const Offsets at = Locate(loop, i);
    z[i] = F()(x[at.x], y[at.y]);
  }
}

template <class F>
void Unary(const DLArray* x, DLArray* y, DLStream stream) {
  Enter(F::name, y, x);
  CheckSameShape(F::name, x, y);
  const int64_t n = Numel(y);
  Launch(F::name, UnaryKernel<F>, Blocks(n), kThreads, 0, stream, In<int64_t>(F::name, x),
         Out<int64_t>(F::name, y), n);
}

template <class F>
void Binary(const DLArray* x, const DLArray* y, DLArray* z, DLStream stream) {
  Enter(F::name, z, x, y);
  const int64_t n = Numel(z);
  Launch(F::name, BinaryKernel<F>, Blocks(n), kThreads, 0, stream, In<int64_t>(F::name, x),
         In<int64_t>(F::name, y), Out<int64_t>(F::name, z), n, BroadcastLoop(F::name, x, y, z));
}

#define DLSYS_REGISTER(Name, op, expression) \
  DLSYS_KERNEL_OF(cuda, Name, op, DL_INT64, Unary<integers::Name>);
DLSYS_INTEGER_UNARY(DLSYS_REGISTER)
#undef DLSYS_REGISTER
#define DLSYS_REGISTER(Name, op, expression) \
  DLSYS_KERNEL_OF(cuda, Name, op, DL_INT64, Binary<integers::Name>);
DLSYS_INTEGER_BINARY(DLSYS_REGISTER)

}  // namespace
}  // namespace cuda
}  // namespace dlsys
