// take_along and put_along: elements along one axis at indices that are given for each column, on
// the CPU. x (outer, n, inner) and indices (outer, count, inner). Updates of one element are added
// in the order of the indices. An index out of range fails. Outputs overlap no input. The latency
// of scattered reads and writes limits it.
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "operators/indexing.h"

namespace dlsys {
namespace cpu {
namespace {

struct Columns {
  int64_t outer, n, inner, count;
  Indices at;

  Columns(const char* op, const DLArray* x, const DLArray* indices, int64_t axis)
      : at(IndicesOf(op, indices)) {
    Check(op, indices);
    CheckSameExceptAxis(op, x, indices, axis);
    const AxisSplit split(op, x, axis);
    outer = split.outer, n = split.n, inner = split.inner;
    count = indices->shape[axis];
    Serially([&] {
      for (int64_t k = 0, size = Numel(indices); k < size; k++)
        if (at[k] < 0 || at[k] >= n) FailOutOfRange(op, "index", at[k], k, n);
    });
  }

  // Calls body(element of the indices, element of x that it names) for each, those of a column in
  // order and on one thread.
  template <class F>
  void Each(const F& body) const {
    ParallelFor(outer * inner, RowGrain(count), [&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < count; k++)
        for (int64_t column = begin; column < end; column++) {
          const int64_t o = column / inner, i = column - o * inner;
          const int64_t from = (o * count + k) * inner + i;
          body(from, (o * n + at[from]) * inner + i);
        }
    });
  }
};

void TakeAlong(const DLArray* x, const DLArray* indices, int64_t axis, DLArray* y) {
  const char* op = "take_along";
  Check(op, x);
  Check(op, y);
  CheckSameDtypes(op, x, y);
  CheckSameShape(op, indices, y);
  const Columns columns(op, x, indices, axis);
  WithElementBits(x, [&](auto* type) {
    const auto* in = (decltype(type))x->data;
    auto* out = (decltype(type))y->data;
    columns.Each([=](int64_t k, int64_t at) { out[k] = in[at]; });
  });
}

// y = zeros, with updates[k] added at indices[k].
template <class T>
void PutAlong(const DLArray* updates, const DLArray* indices, int64_t axis, int64_t, DLArray* y) {
  const char* op = "put_along";
  const T* in = Input<T>(op, updates);
  T* out = Output<T>(op, y);
  CheckSameShape(op, updates, indices);
  const Columns columns(op, y, indices, axis);
  Serially([&] { std::fill_n(out, Numel(y), T(0.f)); });
  columns.Each([=](int64_t k, int64_t at) { out[at] = T((float)out[at] + (float)in[k]); });
}

DLSYS_KERNEL_ANY(cpu, take_along, TakeAlong);
DLSYS_KERNEL_TYPED(cpu, put_along, PutAlong);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
