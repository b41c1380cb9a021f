// take_along and put_along: elements along one axis at indices that are given for each column. x
// (outer, n, inner) and indices (outer, count, inner). Updates of one element are added in the
// order of the indices, by one thread a column; where the indices of a column are distinct, which
// the caller says, a thread takes an element. An index out of range gives 0xFF bytes, which are NaN
// in floats and -1 in integers, or is left out, and is reported (fault.cuh). Outputs overlap no
// input. Scattered accesses to memory limit it.
#include "cuda/runtime/fault.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/indexing.h"

namespace dlsys {
namespace cuda {
namespace {

struct Columns {
  int64_t outer, n, inner, count;
  Indices at;

  Columns(const char* op, const DLArray* x, const DLArray* indices, int64_t axis)
      : at(IndicesOf(op, indices)) {
    CheckSameExceptAxis(op, x, indices, axis);
    const AxisSplit split(op, x, axis);
    outer = split.outer, n = split.n, inner = split.inner;
    count = indices->shape[axis];
  }

  // The element of x that element k of the indices names; -1, which is reported, for none.
  __device__ __forceinline__ int64_t Find(int64_t k, const Faults& faults) const {
    const int64_t column = k / inner, index = at[k];
    if (index >= 0 && index < n) return (column / count * n + index) * inner + k % inner;
    faults.OutOfRange(index, k, n);
    return -1;
  }
};

template <class T>
__global__ void TakeKernel(const T* x, T* y, int64_t size, Columns columns, Faults faults) {
  for (int64_t k = FirstItem(); k < size; k += ItemStep()) {
    const int64_t at = columns.Find(k, faults);
    y[k] = at < 0 ? (T)~T(0) : x[at];
  }
}

template <class T>
__global__ void ZeroKernel(T* y, int64_t size) {
  for (int64_t k = FirstItem(); k < size; k += ItemStep()) y[k] = T(0.f);
}

// A thread takes `length` elements of a column, all of which it adds in order.
template <class T>
__global__ void PutKernel(const T* updates, T* y, int64_t items, int64_t length, Columns columns,
                          Faults faults) {
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    const int64_t o = item / columns.inner, i = item - o * columns.inner;
    for (int64_t j = 0; j < length; j++) {
      const int64_t k = (o * length + j) * columns.inner + i;
      const int64_t at = columns.Find(k, faults);
      if (at >= 0) y[at] = T((float)y[at] + (float)updates[k]);
    }
  }
}

void TakeAlong(const DLArray* x, const DLArray* indices, int64_t axis, DLArray* y,
               DLStream stream) {
  const char* op = "take_along";
  Enter(op, y, x, indices);
  CheckSameDtypes(op, x, y);
  CheckSameShape(op, indices, y);
  const Columns columns(op, x, indices, axis);
  const Faults faults = FaultsOf(op, "index", y->ctx.device_id);
  const int64_t size = Numel(y);
  WithElementBits(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Launch(op, TakeKernel<T>, Blocks(size), kThreads, 0, stream, (const T*)x->data, (T*)y->data,
           size, columns, faults);
  });
}

template <class T>
void PutAlong(const DLArray* updates, const DLArray* indices, int64_t axis, int64_t distinct,
              DLArray* y, DLStream stream) {
  const char* op = "put_along";
  Enter(op, y, updates, indices);
  const T* in = In<T>(op, updates);
  T* out = Out<T>(op, y);
  CheckSameShape(op, updates, indices);
  const Columns columns(op, y, indices, axis);
  const Faults faults = FaultsOf(op, "index", y->ctx.device_id);
  const int64_t size = Numel(y), length = distinct ? 1 : columns.count;
  Launch(op, ZeroKernel<T>, Blocks(size), kThreads, 0, stream, out, size);
  const int64_t items = length ? Numel(indices) / length : 0;
  Launch(op, PutKernel<T>, Blocks(items), kThreads, 0, stream, in, out, items, length, columns,
         faults);
}

DLSYS_KERNEL_ANY(cuda, take_along, TakeAlong);
DLSYS_KERNEL_TYPED(cuda, put_along, PutAlong);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
