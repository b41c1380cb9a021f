// Small convolutions fused with what follows them: bias, relu and a max-pool whose windows do not
// overlap. y[n, o, p] is the largest element of window p of relu(x * f + bias), and `code` says
// which one it was, in row-major order within the window; kCut where relu cut it off, so that no
// gradient passes. A tie goes to the first, and NaN counts as larger than every number.
//
// x (n, c, plane), f (o, c, size), bias (o), y and code (n, o, out); stride 1, one group. Elements
// of the convolution that no window covers are never computed.
#pragma once
#include "math/conv_geometry.h"

namespace dlsys {

constexpr uint8_t kCut = 255;
constexpr int64_t kMostTaps = 7;    // of a filter along each axis
constexpr int64_t kMostWindow = 3;  // of the pool along each axis

struct ConvPool {
  Conv conv;  // conv.out is what the windows cover: out * window
  Pair out;
  int64_t window;

  int64_t Pooled() const { return Size(out); }
  // An image has nothing to convolve.
  bool Empty() const { return conv.c < 1 || conv.o < 1 || Size(conv.plane) < 1; }
};

inline uint8_t* Codes(const char* op, const DLArray* a) {
  if (a->dtype != DL_UINT8) Fail("%s: expected uint8 codes, got %s", op, DtypeText(a->dtype));
  return (uint8_t*)a->data;
}

inline ConvPool CheckedConvPool(const char* op, const DLArray* x, const DLArray* f,
                                const DLArray* y, const DLArray* code, int64_t before,
                                int64_t window) {
  CheckPlanes(op, x);
  CheckPlanes(op, f);
  CheckPlanes(op, y);
  CheckSameShape(op, y, code);
  const Pair size = PlaneOf(f), out = PlaneOf(y), pad = Unpack(before), plane = PlaneOf(x);
  const bool fits =
      x->shape[0] == y->shape[0] && x->shape[1] == f->shape[1] && f->shape[0] == y->shape[1];
  if (!fits)
    Fail("%s: %s by %s does not give %s", op, ShapeText(x).c_str(), ShapeText(f).c_str(),
         ShapeText(y).c_str());
  if (size.h < 1 || size.w < 1 || size.h > kMostTaps || size.w > kMostTaps || window < 2 ||
      window > kMostWindow)
    Fail("%s: expected filters of 1 to %ld and windows of 2 to %ld elements a side, got %s and %ld",
         op, (long)kMostTaps, (long)kMostWindow, ShapeText(f).c_str(), (long)window);
  // Padding is below the filter's size on either side.
  if (pad.h >= size.h || pad.w >= size.w || out.h * window >= plane.h + pad.h + 1 ||
      out.w * window >= plane.w + pad.w + 1)
    Fail("%s: windows lie outside of the planes: %s and %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  const Pair one{1, 1};
  const Conv conv{
      x->shape[0], x->shape[1], f->shape[0], 1, plane, size, {out.h * window, out.w * window},
      one,         pad,         one};
  return {conv, out, window};
}

}  // namespace dlsys
