// Extents: what a kernel along one axis sees of an array; and the checks of a reduction's shapes.
#pragma once
#include "runtime/registry.h"

namespace dlsys {

// An array as (outer, n, inner), of which axis n is reduced.
struct Extents {
  int64_t outer, n, inner;
};

// Checks x (outer, n, inner) against a result of shape (outer, inner), or of x's shape.
inline Extents CheckedExtents(const char* op, const DLArray* x, const DLArray* y,
                              bool keeps_shape = false) {
  bool fits = x->ndim == 3 && y->ndim == (keeps_shape ? 3 : 2);
  fits = fits && y->shape[0] == x->shape[0] && y->shape[y->ndim - 1] == x->shape[2];
  if (!fits || (keeps_shape && y->shape[1] != x->shape[1]))
    Fail("%s: %s does not reduce to %s: expected (outer, n, inner) and %s", op,
         ShapeText(x).c_str(), ShapeText(y).c_str(), keeps_shape ? "the same" : "(outer, inner)");
  return {x->shape[0], x->shape[1], x->shape[2]};
}

// Checks that y has the shape of x less the axes in the mask; axes of size 1 do not count.
inline void CheckReduced(const char* op, const DLArray* x, int64_t axes, const DLArray* y) {
  if (axes < 0 || axes >> x->ndim)
    Fail("%s: axes %#lx name an axis that shape %s does not have", op, (long)axes,
         ShapeText(x).c_str());
  int at = 0;
  bool fits = true;
  for (int axis = 0; axis < x->ndim; axis++) {
    if ((axes >> axis & 1) || x->shape[axis] == 1) continue;
    while (at < y->ndim && y->shape[at] == 1) at++;
    fits = fits && at < y->ndim && y->shape[at] == x->shape[axis];
    at++;
  }
  for (; at < y->ndim; at++) fits = fits && y->shape[at] == 1;
  if (!fits)
    Fail("%s: shape %s reduced over axes %#lx does not give shape %s", op, ShapeText(x).c_str(),
         (long)axes, ShapeText(y).c_str());
}

}  // namespace dlsys
