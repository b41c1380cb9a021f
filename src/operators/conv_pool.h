// Convolution fused with bias, relu and a non-overlapping max-pool: y[n, o, p] is the largest
// element of window p of relu(x * f + bias), and code[n, o, p] its position within the window,
// row-major; kCut where relu cut it off, so that no gradient passes. Ties go to the first; NaN
// counts as larger than every other value.
//
// x (n, c, in), f (o, c, kernel), bias (o), y and code (n, o, out); stride 1, one group.
// Convolution outputs that no window covers are never computed.
#pragma once
#include "operators/conv_geometry.h"

namespace dlsys {

constexpr uint8_t kCut = 255;
constexpr int64_t kMaxKernel = 7;  // kernel elements along an axis
constexpr int64_t kMaxWindow = 3;  // window elements along an axis

struct ConvPool {
  Conv conv;  // conv.out is what the windows cover: out * window
  HW out;
  int64_t window;

  int64_t Pooled() const { return Size(out); }
  // An image has nothing to convolve.
  bool Empty() const { return conv.c < 1 || conv.o < 1 || Size(conv.in) < 1; }
};

inline uint8_t* Codes(const char* op, const DLArray* a) {
  if (a->dtype != DL_UINT8) Fail("%s: expected uint8 codes, got %s", op, DtypeText(a->dtype));
  return (uint8_t*)a->data;
}

inline ConvPool CheckedConvPool(const char* op, const DLArray* x, const DLArray* f,
                                const DLArray* y, const DLArray* code, HW pad, int64_t window) {
  CheckNchw(op, x);
  CheckNchw(op, f);
  CheckNchw(op, y);
  CheckSameShape(op, y, code);
  const HW kernel = SpatialOf(f), out = SpatialOf(y), in = SpatialOf(x);
  const bool fits =
      x->shape[0] == y->shape[0] && x->shape[1] == f->shape[1] && f->shape[0] == y->shape[1];
  if (!fits)
    Fail("%s: %s by %s does not give %s", op, ShapeText(x).c_str(), ShapeText(f).c_str(),
         ShapeText(y).c_str());
  if (kernel.h < 1 || kernel.w < 1 || kernel.h > kMaxKernel || kernel.w > kMaxKernel ||
      window < 2 || window > kMaxWindow)
    Fail("%s: expected filters of 1 to %ld and windows of 2 to %ld elements a side, got %s and %ld",
         op, (long)kMaxKernel, (long)kMaxWindow, ShapeText(f).c_str(), (long)window);
  // Padding is smaller than the kernel.
  if (pad.h < 0 || pad.w < 0 || pad.h >= kernel.h || pad.w >= kernel.w ||
      out.h * window >= in.h + pad.h + 1 || out.w * window >= in.w + pad.w + 1)
    Fail("%s: windows lie outside of the input: %s and %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  const HW one{1, 1};
  const Conv conv{
      x->shape[0], x->shape[1], f->shape[0], 1, in, kernel, {out.h * window, out.w * window},
      one,         pad,         one};
  return {conv, out, window};
}

}  // namespace dlsys
