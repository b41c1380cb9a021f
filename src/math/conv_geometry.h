// Windows that slide over planes: the geometry of convolution and pooling, the same on every
// device. Pairs are a height and a width.
#pragma once
#include <cstdint>
#include <numeric>

#include "runtime/registry.h"

namespace dlsys {

struct Pair {
  int64_t h, w;
};

// Two numbers in one kernel argument: the height in the high half.
inline Pair Unpack(int64_t packed) { return {packed >> 32, packed & 0xffffffff}; }

inline Pair PlaneOf(const DLArray* a) { return {a->shape[2], a->shape[3]}; }
inline int64_t Size(Pair p) { return p.h * p.w; }
inline bool operator==(Pair a, Pair b) { return a.h == b.h && a.w == b.w; }

// Coordinates of windows, padding included, are far within int.
constexpr int64_t kMostCoordinate = int64_t(1) << 29;

inline void CheckPlanes(const char* op, const DLArray* a) {
  if (a->ndim != 4) Fail("%s: expected four dimensions, got %s", op, ShapeText(a).c_str());
}

// The attributes and sizes of a convolution: x (n, c, plane), f (o, c / groups, size) and
// y (n, o, out). Padding behind the plane needs no number: `out` says how far windows go.
struct Conv {
  int64_t n, c, o, groups;
  Pair plane, size, out, stride, before, dilation;

  int64_t GroupChannels() const { return c / groups; }
  int64_t GroupFilters() const { return o / groups; }
  bool Depthwise() const { return groups > 1 && c == groups; }
};

inline void CheckAttributes(const char* op, Pair stride, Pair before, Pair reach, Pair out) {
  if (stride.h < 1 || stride.w < 1)
    Fail("%s: stride must be positive, got (%ld, %ld)", op, (long)stride.h, (long)stride.w);
  if (before.h < 0)
    Fail("%s: padding must not be negative, got (%ld, %ld)", op, (long)before.h, (long)before.w);
  if (before.h > kMostCoordinate || before.w > kMostCoordinate || reach.h > kMostCoordinate ||
      reach.w > kMostCoordinate || stride.h > kMostCoordinate / (out.h + 1) ||
      stride.w > kMostCoordinate / (out.w + 1))
    Fail("%s: planes, padding, dilation or stride are too large", op);
}

inline Conv CheckedConv(const char* op, const DLArray* x, const DLArray* f, const DLArray* y,
                        int64_t stride, int64_t before, int64_t dilation, int64_t groups) {
  CheckPlanes(op, x);
  CheckPlanes(op, f);
  CheckPlanes(op, y);
  Conv conv{x->shape[0], x->shape[1], f->shape[0],    groups,         PlaneOf(x),
            PlaneOf(f),  PlaneOf(y),  Unpack(stride), Unpack(before), Unpack(dilation)};
  const bool fits = groups > 0 && conv.c % groups == 0 && conv.o % groups == 0 &&
                    f->shape[1] == conv.c / groups && y->shape[0] == conv.n &&
                    y->shape[1] == conv.o;
  if (!fits)
    Fail("%s: %ld groups of %s by %s do not give %s", op, (long)groups, ShapeText(x).c_str(),
         ShapeText(f).c_str(), ShapeText(y).c_str());
  if (conv.dilation.h < 1 || conv.dilation.w < 1 || conv.dilation.h > kMostCoordinate ||
      conv.dilation.w > kMostCoordinate)
    Fail("%s: dilation must be positive, got (%ld, %ld)", op, (long)conv.dilation.h,
         (long)conv.dilation.w);
  const Pair reach{conv.plane.h + conv.size.h * conv.dilation.h,
                   conv.plane.w + conv.size.w * conv.dilation.w};
  CheckAttributes(op, conv.stride, conv.before, reach, conv.out);
  return conv;
}

// One axis of a sum over taps: result k sums filter taps tap_from + t * tap_by for t in [0, taps)
// with what lies at first + k * step + t * tap, as far as that is on the plane, and is stored at
// out_from + k * out_by.
struct Sweep {
  int64_t count, taps, first, step, tap, tap_from, tap_by, out_from, out_by;
};

inline Sweep ForwardSweep(int64_t out, int64_t size, int64_t stride, int64_t before,
                          int64_t dilation) {
  return {out, size, -before, stride, dilation, 0, 1, 0, 1};
}

// The gradient for the data, at the elements i with (i + before) % stride == phase: they see those
// taps only that lie a multiple of the stride away, so that nothing is multiplied by zeros between.
inline Sweep BackwardSweep(int64_t plane, int64_t size, int64_t stride, int64_t before,
                           int64_t dilation, int64_t phase) {
  const int64_t from = ((phase - before) % stride + stride) % stride;
  const int64_t by = stride / std::gcd(stride, dilation);
  int64_t tap = 0;
  while (tap < by && tap * dilation % stride != phase) tap++;
  Sweep s;
  s.count = from < plane ? (plane - 1 - from) / stride + 1 : 0;
  s.taps = tap < by && tap < size ? (size - 1 - tap) / by + 1 : 0;
  s.first = s.taps ? (from + before - tap * dilation) / stride : 0;
  s.step = 1;
  s.tap = -(by * dilation / stride);
  s.tap_from = tap;
  s.tap_by = by;
  s.out_from = from;
  s.out_by = stride;
  return s;
}

// out (images, groups, rows, out_plane) at the places that `down` and `across` name: sums over
// channels and taps of filter times x (images, groups, channels, plane), plus bias[row] where
// there is one. The convolution and its gradient for the data are both of this form.
struct Correlation {
  int64_t images, groups, rows, channels;
  Sweep down, across;
  Pair plane, out_plane;
  // The filter's strides.
  int64_t filter_group, filter_row, filter_channel, filter_width;
  const float *x, *filter, *bias;
  float* out;

  int64_t Count() const { return down.count * across.count; }
  int64_t Taps() const { return down.taps * across.taps; }
  int64_t Depth() const { return channels * Taps(); }
  bool Dense() const { return down.out_by == 1 && across.out_by == 1; }
};

inline Correlation Forward(const Conv& c, const float* x, const float* f, const float* bias,
                           float* y) {
  const int64_t channels = c.GroupChannels(), size = Size(c.size);
  return {c.n,
          c.groups,
          c.GroupFilters(),
          channels,
          ForwardSweep(c.out.h, c.size.h, c.stride.h, c.before.h, c.dilation.h),
          ForwardSweep(c.out.w, c.size.w, c.stride.w, c.before.w, c.dilation.w),
          c.plane,
          c.out,
          c.GroupFilters() * channels * size,
          channels * size,
          size,
          c.size.w,
          x,
          f,
          bias,
          y};
}

// One of stride.h * stride.w phases, which together write all of dx.
inline Correlation DataGradient(const Conv& c, const float* f, const float* dy, float* dx,
                                int64_t phase) {
  const int64_t channels = c.GroupChannels(), size = Size(c.size);
  const int64_t phase_h = phase / c.stride.w, phase_w = phase % c.stride.w;
  return {c.n,
          c.groups,
          channels,
          c.GroupFilters(),
          BackwardSweep(c.plane.h, c.size.h, c.stride.h, c.before.h, c.dilation.h, phase_h),
          BackwardSweep(c.plane.w, c.size.w, c.stride.w, c.before.w, c.dilation.w, phase_w),
          c.out,
          c.plane,
          c.GroupFilters() * channels * size,
          size,
          channels * size,
          c.size.w,
          dy,
          f,
          nullptr,
          dx};
}

// Windows of one size over planes (n, c, plane), giving (n, c, out).
struct Pool {
  int64_t planes;
  Pair plane, out, size, stride, before, dilation;

  bool Dilated() const { return dilation.h != 1 || dilation.w != 1; }
  Pair Extent() const { return {(size.h - 1) * dilation.h + 1, (size.w - 1) * dilation.w + 1}; }
};

// Whether each window has a tap on the plane, along one axis.
inline bool AllSee(int64_t out, int64_t size, int64_t stride, int64_t before, int64_t dilation,
                   int64_t plane) {
  for (int64_t k = 0; k < out; k++) {
    const int64_t first = k * stride - before;
    const int64_t tap = first < 0 ? (dilation - 1 - first) / dilation : 0;
    if (tap >= size || first + tap * dilation >= plane) return false;
  }
  return true;
}

inline Pool CheckedPool(const char* op, const DLArray* x, const DLArray* y, int64_t size,
                        int64_t stride, int64_t before, int64_t dilation = int64_t(1) << 32 | 1) {
  CheckPlanes(op, x);
  CheckPlanes(op, y);
  Pool p{x->shape[0] * x->shape[1],
         PlaneOf(x),
         PlaneOf(y),
         Unpack(size),
         Unpack(stride),
         Unpack(before),
         Unpack(dilation)};
  if (x->shape[0] != y->shape[0] || x->shape[1] != y->shape[1])
    Fail("%s: shapes do not fit: %s and %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  if (p.dilation.h < 1 || p.dilation.w < 1 || p.size.h > kMostCoordinate / p.dilation.h ||
      p.size.w > kMostCoordinate / p.dilation.w)
    Fail("%s: dilation must be positive and not too large, got (%ld, %ld)", op, (long)p.dilation.h,
         (long)p.dilation.w);
  const Pair extent = p.Extent();
  const Pair reach{p.plane.h + extent.h, p.plane.w + extent.w};
  CheckAttributes(op, p.stride, p.before, reach, p.out);
  // The first and the last window must meet the plane.
  if (Numel(y) && (p.before.h >= extent.h || p.before.w >= extent.w ||
                   (p.out.h - 1) * p.stride.h - p.before.h >= p.plane.h ||
                   (p.out.w - 1) * p.stride.w - p.before.w >= p.plane.w))
    Fail("%s: windows lie outside of the plane: %s and %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  if (Numel(y) && p.Dilated() &&
      !(AllSee(p.out.h, p.size.h, p.stride.h, p.before.h, p.dilation.h, p.plane.h) &&
        AllSee(p.out.w, p.size.w, p.stride.w, p.before.w, p.dilation.w, p.plane.w)))
    Fail("%s: dilated windows see nothing of the plane: %s and %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  if (p.plane.h > kMostCoordinate || p.plane.w > kMostCoordinate || Size(p.plane) > INT32_MAX)
    Fail("%s: a plane of %s is too large for its indices", op, ShapeText(x).c_str());
  return p;
}

}  // namespace dlsys
