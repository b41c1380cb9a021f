// Geometry of convolution and pooling in NCHW, the same on every device: attributes, their checks,
// and the gather form in which convolution and data gradient are one algorithm.
#pragma once
#include <cstdint>
#include <numeric>

#include "runtime/registry.h"

namespace dlsys {

struct HW {
  int64_t h, w;
};

// Windows that slide over images, as arguments of kernels; pooling alone reads size and after.
struct WindowOptions {
  HW size, stride, before, after, dilation;
};

inline HW SpatialOf(const DLArray* a) { return {a->shape[2], a->shape[3]}; }
inline int64_t Size(HW p) { return p.h * p.w; }
inline bool operator==(HW a, HW b) { return a.h == b.h && a.w == b.w; }

// Coordinates, padding included, stay far within int.
constexpr int64_t kMaxCoordinate = int64_t(1) << 29;

inline void CheckNchw(const char* op, const DLArray* a) {
  if (a->ndim != 4) Fail("%s: expected four dimensions, got %s", op, ShapeText(a).c_str());
}

// A convolution of x (n, c, in) with f (o, c / groups, kernel) to y (n, o, out). Padding at the end
// is implied by `out`.
struct Conv {
  int64_t n, c, o, groups;
  HW in, kernel, out, stride, pad, dilation;

  int64_t GroupChannels() const { return c / groups; }
  int64_t GroupFilters() const { return o / groups; }
  bool Depthwise() const { return groups > 1 && c == groups; }
};

inline void CheckAttributes(const char* op, HW stride, HW pad, HW reach, HW out) {
  if (stride.h < 1 || stride.w < 1)
    Fail("%s: stride must be positive, got (%ld, %ld)", op, (long)stride.h, (long)stride.w);
  if (pad.h < 0 || pad.w < 0)
    Fail("%s: padding must not be negative, got (%ld, %ld)", op, (long)pad.h, (long)pad.w);
  if (pad.h > kMaxCoordinate || pad.w > kMaxCoordinate || reach.h > kMaxCoordinate ||
      reach.w > kMaxCoordinate || stride.h > kMaxCoordinate / (out.h + 1) ||
      stride.w > kMaxCoordinate / (out.w + 1))
    Fail("%s: input, padding, dilation or stride is too large", op);
}

inline Conv CheckedConv(const char* op, const DLArray* x, const DLArray* f, const DLArray* y,
                        const WindowOptions& windows, int64_t groups) {
  CheckNchw(op, x);
  CheckNchw(op, f);
  CheckNchw(op, y);
  Conv conv{x->shape[0],  x->shape[1],  f->shape[0],    groups,         SpatialOf(x),
            SpatialOf(f), SpatialOf(y), windows.stride, windows.before, windows.dilation};
  const bool fits = groups > 0 && conv.c % groups == 0 && conv.o % groups == 0 &&
                    f->shape[1] == conv.c / groups && y->shape[0] == conv.n &&
                    y->shape[1] == conv.o;
  if (!fits)
    Fail("%s: %ld groups of %s by %s do not give %s", op, (long)groups, ShapeText(x).c_str(),
         ShapeText(f).c_str(), ShapeText(y).c_str());
  if (conv.dilation.h < 1 || conv.dilation.w < 1 || conv.dilation.h > kMaxCoordinate ||
      conv.dilation.w > kMaxCoordinate)
    Fail("%s: dilation must be positive, got (%ld, %ld)", op, (long)conv.dilation.h,
         (long)conv.dilation.w);
  const HW reach{conv.in.h + conv.kernel.h * conv.dilation.h,
                 conv.in.w + conv.kernel.w * conv.dilation.w};
  CheckAttributes(op, conv.stride, conv.pad, reach, conv.out);
  return conv;
}

// One axis of a gather: output position k sums kernel offsets kernel_from + t * kernel_by, t <
// kernel_size, times the input at first + k * step + t * kernel_step (zero outside), and is stored
// at out_from + k * out_by.
struct ConvAxis {
  int64_t count, kernel_size, first, step, kernel_step, kernel_from, kernel_by, out_from, out_by;
};

inline ConvAxis ForwardAxis(int64_t out, int64_t kernel, int64_t stride, int64_t pad,
                            int64_t dilation) {
  return {out, kernel, -pad, stride, dilation, 0, 1, 0, 1};
}

// The data gradient at the elements i with (i + pad) % stride == phase. They meet only every
// (stride / gcd)-th kernel offset, so no work is spent on the zeros of a strided transposed
// convolution.
inline ConvAxis DataGradientAxis(int64_t in, int64_t kernel, int64_t stride, int64_t pad,
                                 int64_t dilation, int64_t phase) {
  const int64_t from = ((phase - pad) % stride + stride) % stride;
  const int64_t by = stride / std::gcd(stride, dilation);
  int64_t offset = 0;  // the first kernel offset that such elements meet
  while (offset < by && offset * dilation % stride != phase) offset++;
  ConvAxis s;
  s.count = from < in ? (in - 1 - from) / stride + 1 : 0;
  s.kernel_size = offset < by && offset < kernel ? (kernel - 1 - offset) / by + 1 : 0;
  s.first = s.kernel_size ? (from + pad - offset * dilation) / stride : 0;
  s.step = 1;
  s.kernel_step = -(by * dilation / stride);
  s.kernel_from = offset;
  s.kernel_by = by;
  s.out_from = from;
  s.out_by = stride;
  return s;
}

// Batched cross-correlation: out (images, groups, out_channels, out_hw) at the positions of axes h
// and w = sum over in_channels and kernel offsets of filter times x (images, groups, in_channels,
// in), plus bias[out_channel] or none. Convolution and data gradient both have this form.
struct Correlation {
  int64_t images, groups, out_channels, in_channels;
  ConvAxis h, w;
  HW in, out_hw;
  // The filter's strides.
  int64_t filter_group, filter_row, filter_channel, filter_width;
  const float *x, *filter, *bias;
  float* out;

  int64_t Positions() const { return h.count * w.count; }
  int64_t KernelSize() const { return h.kernel_size * w.kernel_size; }
  int64_t K() const { return in_channels * KernelSize(); }
  bool UnitStride() const { return h.out_by == 1 && w.out_by == 1; }
};

inline Correlation Forward(const Conv& c, const float* x, const float* f, const float* bias,
                           float* y) {
  const int64_t in_channels = c.GroupChannels(), kernel = Size(c.kernel);
  return {c.n,
          c.groups,
          c.GroupFilters(),
          in_channels,
          ForwardAxis(c.out.h, c.kernel.h, c.stride.h, c.pad.h, c.dilation.h),
          ForwardAxis(c.out.w, c.kernel.w, c.stride.w, c.pad.w, c.dilation.w),
          c.in,
          c.out,
          c.GroupFilters() * in_channels * kernel,
          in_channels * kernel,
          kernel,
          c.kernel.w,
          x,
          f,
          bias,
          y};
}

// One of stride.h * stride.w phases, which together write all of dx.
inline Correlation DataGradient(const Conv& c, const float* f, const float* dy, float* dx,
                                int64_t phase) {
  const int64_t in_channels = c.GroupChannels(), kernel = Size(c.kernel);
  const int64_t phase_h = phase / c.stride.w, phase_w = phase % c.stride.w;
  return {c.n,
          c.groups,
          in_channels,
          c.GroupFilters(),
          DataGradientAxis(c.in.h, c.kernel.h, c.stride.h, c.pad.h, c.dilation.h, phase_h),
          DataGradientAxis(c.in.w, c.kernel.w, c.stride.w, c.pad.w, c.dilation.w, phase_w),
          c.out,
          c.in,
          c.GroupFilters() * in_channels * kernel,
          kernel,
          in_channels * kernel,
          c.kernel.w,
          dy,
          f,
          nullptr,
          dx};
}

// Pooling of x (nc, in) to (nc, out).
struct Pool {
  int64_t nc;
  HW in, out, window, stride, pad, dilation;

  bool Dilated() const { return dilation.h != 1 || dilation.w != 1; }
  HW Extent() const { return {(window.h - 1) * dilation.h + 1, (window.w - 1) * dilation.w + 1}; }
};

// Every window must see at least one input element along the axis.
inline bool AllWindowsSeeInput(int64_t out, int64_t window, int64_t stride, int64_t pad,
                               int64_t dilation, int64_t in) {
  for (int64_t k = 0; k < out; k++) {
    const int64_t first = k * stride - pad;
    const int64_t offset = first < 0 ? (dilation - 1 - first) / dilation : 0;
    if (offset >= window || first + offset * dilation >= in) return false;
  }
  return true;
}

inline Pool CheckedPool(const char* op, const DLArray* x, const DLArray* y,
                        const WindowOptions& windows) {
  CheckNchw(op, x);
  CheckNchw(op, y);
  Pool p{x->shape[0] * x->shape[1],
         SpatialOf(x),
         SpatialOf(y),
         windows.size,
         windows.stride,
         windows.before,
         windows.dilation};
  if (x->shape[0] != y->shape[0] || x->shape[1] != y->shape[1])
    Fail("%s: shapes do not fit: %s and %s", op, ShapeText(x).c_str(), ShapeText(y).c_str());
  if (p.dilation.h < 1 || p.dilation.w < 1 || p.window.h > kMaxCoordinate / p.dilation.h ||
      p.window.w > kMaxCoordinate / p.dilation.w)
    Fail("%s: dilation must be positive and not too large, got (%ld, %ld)", op, (long)p.dilation.h,
         (long)p.dilation.w);
  const HW extent = p.Extent();
  const HW reach{p.in.h + extent.h, p.in.w + extent.w};
  CheckAttributes(op, p.stride, p.pad, reach, p.out);
  // The first and the last window must overlap the input.
  if (Numel(y) && (p.pad.h >= extent.h || p.pad.w >= extent.w ||
                   (p.out.h - 1) * p.stride.h - p.pad.h >= p.in.h ||
                   (p.out.w - 1) * p.stride.w - p.pad.w >= p.in.w))
    Fail("%s: windows lie outside of the input: %s and %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  if (Numel(y) && p.Dilated() &&
      !(AllWindowsSeeInput(p.out.h, p.window.h, p.stride.h, p.pad.h, p.dilation.h, p.in.h) &&
        AllWindowsSeeInput(p.out.w, p.window.w, p.stride.w, p.pad.w, p.dilation.w, p.in.w)))
    Fail("%s: dilated windows see nothing of the input: %s and %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str());
  if (p.in.h > kMaxCoordinate || p.in.w > kMaxCoordinate || Size(p.in) > INT32_MAX)
    Fail("%s: the H x W of %s is too large for int32 indices", op, ShapeText(x).c_str());
  return p;
}

}  // namespace dlsys
