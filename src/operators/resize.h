// Resizing along one axis, the same on every device: source positions are decided in integers, and
// the only rounding is that of the weight.
#pragma once
#include "math/functors.h"
#include "runtime/registry.h"

namespace dlsys {

// A resized element: (1 - weight) * x[low] + weight * x[high].
struct Lerp {
  int64_t low, high;
  float weight;

  // The weight of position k.
  DLSYS_HD float Of(int64_t k) const {
    return (k == low ? 1.f - weight : 0.f) + (k == high ? weight : 0.f);
  }
};

// The resized elements that read one source element: first to last, none where last < first.
struct Readers {
  int64_t first, last;
};

// An axis of n elements resized to m. Coordinates are centers of equal cells (0.5, 1.5, ...), or
// with `align` (align_corners) evenly spaced from the first to the last element.
struct ResizedAxis {
  int64_t n, m;
  bool align, linear;

  DLSYS_HD Lerp At(int64_t i) const {
    if (align && m == 1) return Lerp{0, 0, 0.f};
    const int64_t unit = align ? m - 1 : 2 * m;
    int64_t at = align ? i * (n - 1) : (2 * i + 1) * n - m;  // the coordinate, in units
    if (!linear) {  // nearest: ties to the lower, or the cell that i lies in
      at = align ? (2 * at + unit - 1) / (2 * unit) : (at + m) / unit;
      return Lerp{at, at, 0.f};
    }
    at = at < 0 ? 0 : at;
    const int64_t low = at / unit;
    if (low >= n - 1) return Lerp{n - 1, n - 1, 0.f};
    return Lerp{low, low + 1, (float)(at % unit) / (float)unit};
  }

  // First resized element whose `high` is at least k; `high` never descends.
  DLSYS_HD int64_t FirstAt(int64_t k) const {
    int64_t from = 0, to = m;
    while (from < to) {
      const int64_t middle = from + (to - from) / 2;
      if (At(middle).high < k)
        from = middle + 1;
      else
        to = middle;
    }
    return from;
  }

  // Last resized element whose `low` is at most k.
  DLSYS_HD int64_t LastAt(int64_t k) const {
    int64_t from = 0, to = m;
    while (from < to) {
      const int64_t middle = from + (to - from) / 2;
      if (At(middle).low <= k)
        from = middle + 1;
      else
        to = middle;
    }
    return from - 1;
  }

  DLSYS_HD Readers ReadersOf(int64_t k) const { return Readers{FirstAt(k), LastAt(k)}; }
};

// Images x (batch, rows.n, cols.n) and y (batch, rows.m, cols.m).
struct Resize {
  int64_t batch;
  ResizedAxis rows, cols;
};

inline Resize ResizeOf(const char* op, const DLArray* x, bool align, bool linear,
                       const DLArray* y) {
  const int lead = x->ndim - 2;
  bool fits = lead >= 0 && x->ndim == y->ndim;
  Resize resize{1, {}, {}};
  for (int a = 0; fits && a < lead; a++) {
    fits = x->shape[a] == y->shape[a];
    resize.batch *= x->shape[a];
  }
  // Coordinates in units are below 4 * n * m.
  const int64_t most = int64_t(1) << 30;
  for (int a = lead; fits && a < x->ndim; a++)
    fits = x->shape[a] > 0 && y->shape[a] > 0 && x->shape[a] < most && y->shape[a] < most;
  if (!fits) Fail("%s: %s cannot be resized to %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  resize.rows = ResizedAxis{x->shape[lead], y->shape[lead], align, linear};
  resize.cols = ResizedAxis{x->shape[lead + 1], y->shape[lead + 1], align, linear};
  return resize;
}

}  // namespace dlsys
