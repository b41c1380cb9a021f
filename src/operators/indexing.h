// Argument checks and index arithmetic that movement and indexing kernels share on both devices:
// strided views, one axis of an array, padding, and integer indices.
#pragma once

#include "math/functors.h"
#include "runtime/registry.h"

namespace dlsys {

// Fails unless `a` is a scalar (one element) of this dtype.
inline void CheckScalar(const char* op, const char* what, const DLArray* a, int dtype) {
  if (Numel(a) != 1 || a->dtype != dtype)
    Fail("%s: expected a %s of one %s, got %s of %s", op, what, DtypeText(dtype),
         ShapeText(a).c_str(), DtypeText(a->dtype));
}

// Calls f with a null pointer to an unsigned integer of the size of an element, for kernels that
// move bits only.
template <class F>
void WithElementBits(const DLArray* a, F&& f) {
  const int64_t nbytes = DtypeNbytes(a->dtype);
  if (nbytes == 1) return f((uint8_t*)nullptr);
  if (nbytes == 2) return f((uint16_t*)nullptr);
  if (nbytes == 4) return f((uint32_t*)nullptr);
  f((uint64_t*)nullptr);
}

inline void CheckSameDtypes(const char* op, const DLArray* x, const DLArray* y) {
  if (x->dtype != y->dtype)
    Fail("%s: dtypes differ: %s and %s", op, DtypeText(x->dtype), DtypeText(y->dtype));
}

// A transposition: axis k of the output is axis axes[k] of the input.
struct Permutation {
  int32_t axes[DL_MAX_NDIM];
};

inline std::string PermutationText(const Permutation& permutation, int ndim) {
  std::string text = "(";
  for (int k = 0; k < ndim; k++) text += (k ? ", " : "") + std::to_string(permutation.axes[k]);
  return text + ")";
}

// ---- strided views ----

constexpr int64_t kNoSteps[DL_MAX_NDIM] = {1, 1, 1, 1, 1, 1, 1, 1};

// Every `stride`-th element along each axis of an array, from `offset` on; counted in elements.
struct View {
  int64_t offset;
  int64_t stride[DL_MAX_NDIM];
};

// The view of `base` of the shape of `like` that starts at element `offset` and advances by `steps`
// along the axes, backward where they are negative.
inline View ViewOf(const char* op, const DLArray* base, int64_t offset, const int64_t* steps,
                   const DLArray* like) {
  bool inside = base->ndim == like->ndim;
  if (inside && Numel(like) == 0) return View{};
  inside = inside && offset >= 0 && offset < Numel(base);
  View found{offset, {}};
  int64_t stride = 1;
  for (int a = base->ndim - 1; inside && a >= 0; a--) {
    const int64_t extent = base->shape[a];
    const int64_t first = offset / stride % extent;
    // 128 bits, since a hostile step times an extent may overflow 64.
    const __int128 last = first + (__int128)steps[a] * (like->shape[a] - 1);
    inside = last >= 0 && last < extent;
    found.stride[a] = like->shape[a] == 1 ? 0 : steps[a] * stride;
    stride *= extent;
  }
  if (!inside)
    Fail("%s: a view of shape %s from element %lld on does not lie in %s", op,
         ShapeText(like).c_str(), (long long)offset, ShapeText(base).c_str());
  return found;
}

// The view of y that x fills in a concatenation along `axis`, from position `at` on.
inline View ConcatView(const char* op, const DLArray* x, int64_t axis, int64_t at,
                       const DLArray* y) {
  CheckSameDtypes(op, x, y);
  bool fits = x->ndim == y->ndim && axis >= 0 && axis < y->ndim;
  for (int a = 0; fits && a < y->ndim; a++)
    fits = a == axis ? at + x->shape[a] <= y->shape[a] : x->shape[a] == y->shape[a];
  if (!fits)
    Fail("%s: %s does not go into %s at position %lld of axis %lld", op, ShapeText(x).c_str(),
         ShapeText(y).c_str(), (long long)at, (long long)axis);
  int64_t inner = 1;
  for (int a = (int)axis + 1; a < y->ndim; a++) inner *= y->shape[a];
  return ViewOf(op, y, at * inner, kNoSteps, x);
}

// ---- one axis ----

// An array as (outer, n, inner), where n is the extent of one axis.
struct AxisSplit {
  int64_t outer = 1, n = 0, inner = 1;

  AxisSplit(const char* op, const DLArray* a, int64_t axis) {
    if (axis < 0 || axis >= a->ndim)
      Fail("%s: %s has no axis %lld", op, ShapeText(a).c_str(), (long long)axis);
    for (int k = 0; k < axis; k++) outer *= a->shape[k];
    n = a->shape[axis];
    for (int k = (int)axis + 1; k < a->ndim; k++) inner *= a->shape[k];
  }
};

// Fails unless the arrays have equal shapes except along the axis.
inline void CheckSameExceptAxis(const char* op, const DLArray* x, const DLArray* y, int64_t axis) {
  bool same = x->ndim == y->ndim;
  for (int a = 0; same && a < x->ndim; a++) same = a == axis || x->shape[a] == y->shape[a];
  if (!same)
    Fail("%s: shapes differ beside axis %lld: %s and %s", op, (long long)axis, ShapeText(x).c_str(),
         ShapeText(y).c_str());
}

// An axis of n positions padded to m, `before` of them in front. The padding repeats the border
// (edge) or mirrors the axis at the border (reflect).
struct Padding {
  int64_t n, m, before;
  bool reflect;

  // The source of position i of the padded axis.
  DLSYS_HD int64_t Source(int64_t i) const {
    int64_t k = i - before;
    if (reflect) {
      k = k < 0 ? -k : k;
      return k >= n ? 2 * (n - 1) - k : k;
    }
    return k < 0 ? 0 : k >= n ? n - 1 : k;
  }

  // Calls f(i) for every position i of the padded axis whose source is k.
  template <class F>
  DLSYS_HD void EachCopy(int64_t k, const F& f) const {
    if (reflect) {
      const int64_t right = before + 2 * (n - 1) - k;
      f(before + k);
      if (k >= 1 && k <= before) f(before - k);
      if (k <= n - 2 && right < m) f(right);
    } else {
      const int64_t last = k == n - 1 ? m - 1 : before + k;
      for (int64_t i = k == 0 ? 0 : before + k; i <= last; i++) f(i);
    }
  }
};

inline Padding PaddingOf(const char* op, const DLArray* x, int64_t axis, int64_t before,
                         bool reflect, const DLArray* y) {
  CheckSameDtypes(op, x, y);
  CheckSameExceptAxis(op, x, y, axis);
  const Padding padding{x->shape[axis], y->shape[axis], before, reflect};
  const int64_t after = padding.m - padding.n - before;
  const int64_t most = reflect ? padding.n - 1 : padding.n ? INT64_MAX : 0;
  if (before < 0 || after < 0 || before > most || after > most)
    Fail("%s: axis %lld of %s cannot be padded by %lld and %lld to %s", op, (long long)axis,
         ShapeText(x).c_str(), (long long)before, (long long)after, ShapeText(y).c_str());
  return padding;
}

// ---- indices ----

// Integers that choose positions along an axis.
struct Indices {
  const void* data;
  bool wide;  // int64, else int32
  DLSYS_HD int64_t operator[](int64_t k) const {
    return wide ? ((const int64_t*)data)[k] : ((const int32_t*)data)[k];
  }
};

inline Indices IndicesOf(const char* op, const DLArray* a) {
  if (a->dtype != DL_INT32 && a->dtype != DL_INT64)
    Fail("%s: expected indices of int32 or int64, got %s", op, DtypeText(a->dtype));
  return Indices{a->data, a->dtype == DL_INT64};
}

// Fails unless `taken` has the shape of x with `axis` replaced by the axes of the indices.
inline void CheckGathered(const char* op, const DLArray* x, int64_t axis, const DLArray* indices,
                          const DLArray* taken) {
  bool fits = taken->ndim == x->ndim - 1 + indices->ndim;
  for (int a = 0; fits && a < taken->ndim; a++) {
    const int from_x = a < axis ? a : a - indices->ndim + 1;
    const bool from_indices = a >= axis && a < axis + indices->ndim;
    fits = taken->shape[a] == (from_indices ? indices->shape[a - axis] : x->shape[from_x]);
  }
  if (!fits)
    Fail("%s: indices %s along axis %lld of %s do not give %s", op, ShapeText(indices).c_str(),
         (long long)axis, ShapeText(x).c_str(), ShapeText(taken).c_str());
}

inline void CheckOneHot(const DLArray* indices, const DLArray* y) {
  bool fits = y->ndim == indices->ndim + 1;
  for (int a = 0; fits && a < indices->ndim; a++) fits = y->shape[a] == indices->shape[a];
  if (!fits)
    Fail("one_hot: indices %s do not give %s", ShapeText(indices).c_str(), ShapeText(y).c_str());
}

}  // namespace dlsys
