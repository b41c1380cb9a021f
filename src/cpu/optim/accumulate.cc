// Compensated accumulation over many steps: total (2, n) holds sums and their rounding errors
// (Knuth's two-sum), both float32, read and written; x (n) is of any storage type, only read, and
// overlaps no total. Memory bandwidth limits it.
#include "math/accumulate.h"

#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

// total (2, n) += x (n,): row 0 has the sums, row 1 their rounding errors.
template <class T>
void Accumulate(DLArray* total, const DLArray* x) {
  float* sums = Output("accumulate", total);
  const T* terms = Input<T>("accumulate", x);
  const int64_t n = Numel(x);
  if (total->ndim != 2 || total->shape[0] != 2 || total->shape[1] != n)
    Fail("accumulate: expected a total (2, %ld), got %s", (long)n, ShapeText(total).c_str());
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) AddTerm(terms[k], sums + k, sums + n + k);
  });
}

DLSYS_KERNEL_TYPED(cpu, accumulate, Accumulate);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
