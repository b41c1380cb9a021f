// argmax and argmin of the middle axis of x (outer, n, inner) -> (outer, inner) of int64, and the
// mask of the first element that equals its extreme: reductions by a monoid (axis.cuh). The first
// of equals counts, and NaN precedes all values.
#include "cuda/reduce/axis.cuh"
#include "runtime/dtypes.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- monoids ----

// Index -1 is that of no element. Integers are compared as int64.
template <class T>
struct Indexed {
  T value;
  int64_t index;
};

template <bool kMax, class T>
struct ArgMonoid {
  using State = Indexed<T>;
  static constexpr int kAccumulators = 1;
  __device__ State Identity(int64_t) const { return {T(0), -1}; }
  __device__ State Accumulate(State s, T x, int64_t index) const { return Combine(s, {x, index}); }
  static __device__ State Combine(State a, State b) {
    if (b.index < 0) return a;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    bool better = kMax ? b.value > a.value : b.value < a.value;
    if (a_nan || b_nan) better = b_nan && !a_nan;
    const bool equal = b.value == a.value || (a_nan && b_nan);
    return a.index < 0 || better || (equal && b.index < a.index) ? b : a;
  }
  __device__ int64_t Result(State s) const { return s.index; }
};

// The first element that equals the column's `target`; -1 where there is none.
template <class T>
struct FirstMatchMonoid {
  using State = Indexed<float>;
  static constexpr int kAccumulators = 1;
  const T* target;
  __device__ State Identity(int64_t column) const { return {target[column], -1}; }
  __device__ State Accumulate(State s, float x, int64_t index) const {
    const bool equal = x == s.value || (x != x && s.value != s.value);
    return {s.value, s.index < 0 && equal ? index : s.index};
  }
  static __device__ State Combine(State a, State b) {
    return b.index >= 0 && (a.index < 0 || b.index < a.index) ? b : a;
  }
  __device__ int64_t Result(State s) const { return s.index; }
};

// ---- kernels ----

// mask (outer, n, inner): 1 at the position that `first` (outer, inner) holds.
__global__ void MaskKernel(const int64_t* first, uint8_t* mask, int64_t total, int64_t n,
                           int64_t inner) {
  for (int64_t k = FirstItem(); k < total; k += ItemStep()) {
    const int64_t line = k / inner;
    const int64_t o = line / n;
    mask[k] = first[o * inner + (k - line * inner)] == line - o * n;
  }
}

// ---- launchers ----

template <bool kMax, class T>
void ArgOf(const char* op, const DLArray* x, const Extents& of, DLArray* y, DLStream stream) {
  using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, float>;
  ReduceAxis(op, y->ctx, ArgMonoid<kMax, Wide>{}, (const T*)x->data, of, (int64_t*)y->data, stream);
}

template <bool kMax>
void Arg(const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = kMax ? "argmax" : "argmin";
  Enter(op, y, x);
  const Extents of = CheckedExtents(op, x, y);
  if (y->dtype != DL_INT64) Fail("%s: expected int64, got %s", op, DtypeText(y->dtype));
  if (Numel(y) == 0) return;
  if (of.n == 0) Fail("%s: shape %s has no elements to choose from", op, ShapeText(x).c_str());
  WithComparable(op, x->dtype, [&](auto* type) {
    ArgOf<kMax, std::remove_pointer_t<decltype(type)>>(op, x, of, y, stream);
  });
}

template <class T>
void FirstMatch(const DLArray* x, const DLArray* y, DLArray* mask, DLStream stream) {
  const char* op = "first_match";
  Enter(op, mask, x, y);
  const Extents of = CheckedExtents(op, x, y);
  CheckedExtents(op, x, mask, true);
  if (mask->dtype != DL_BOOL) Fail("%s: expected bool, got %s", op, DtypeText(mask->dtype));
  const T* in = In<T>(op, x);
  const T* target = In<T>(op, y);
  const int64_t total = Numel(mask);
  if (total == 0) return;
  const Scratch first(mask->ctx, Numel(y) * (int64_t)sizeof(int64_t), stream);
  int64_t* const found = (int64_t*)first.data();
  ReduceAxis(op, mask->ctx, FirstMatchMonoid<T>{target}, in, of, found, stream);
  Launch(op, MaskKernel, Blocks(total), kThreads, 0, stream, (const int64_t*)found,
         (uint8_t*)mask->data, total, of.n, of.inner);
}

DLSYS_KERNEL_ANY(cuda, argmax, Arg<true>);
DLSYS_KERNEL_ANY(cuda, argmin, Arg<false>);
DLSYS_KERNEL_TYPED(cuda, first_match, FirstMatch);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
