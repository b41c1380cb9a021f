// Elementwise kernels of int64 on the CPU, of the functors of math/integers.h, with numpy
// broadcasting: one vectorized loop for unary functors, pieces of rows (pieces.h) for binary ones.
// The output may be the buffer of an input of its shape. Memory bandwidth limits them, but for
// division, which has no vector instruction.
#include "math/integers.h"

#include "cpu/pointwise/pieces.h"

namespace dlsys {
namespace cpu {
namespace {

template <class F>
void Unary(const DLArray* x, DLArray* y) {
  const int64_t* in = Input<int64_t>(F::name, x);
  int64_t* out = Output<int64_t>(F::name, y);
  CheckSameShape(F::name, x, y);
  ParallelFor(Numel(y), kGrain, [=](int64_t begin, int64_t end) {
    DLSYS_IVDEP
    for (int64_t k = begin; k < end; k++) out[k] = F()(in[k]);
  });
}

template <class F>
void Binary(const DLArray* x, const DLArray* y, DLArray* z) {
  const int64_t *left = Input<int64_t>(F::name, x), *right = Input<int64_t>(F::name, y);
  int64_t* out = Output<int64_t>(F::name, z);
  ForPieces<2>(F::name, {x, y}, z,
               [=](const int64_t* offset, const int64_t* stride, int64_t at, int64_t n) {
                 const int64_t *a = left + offset[0], *b = right + offset[1];
                 const int64_t a_step = stride[0], b_step = stride[1];
                 DLSYS_IVDEP
                 for (int64_t k = 0; k < n; k++) out[at + k] = F()(a[k * a_step], b[k * b_step]);
               });
}

#define DLSYS_REGISTER(Name, op, expression) \
  DLSYS_KERNEL_OF(cpu, Name, op, DL_INT64, Unary<integers::Name>);
DLSYS_INTEGER_UNARY(DLSYS_REGISTER)
#undef DLSYS_REGISTER
#define DLSYS_REGISTER(Name, op, expression) \
  DLSYS_KERNEL_OF(cpu, Name, op, DL_INT64, Binary<integers::Name>);
DLSYS_INTEGER_BINARY(DLSYS_REGISTER)

}  // namespace
}  // namespace cpu
}  // namespace dlsys
