// quantize, dequantize and quantized_add on the CPU, element by element. Scales and zero points are
// one for a tensor, or one for each position of an axis: x is then (outer, n, inner). A product
// that is added is exact in float32, so that a compiler may contract it. The result overlaps no
// input. Memory bandwidth limits them.
#include <algorithm>
#include <cmath>

#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

// The position of a row of x (outer, n, inner), `inner` elements, among n scales.
struct Scales {
  int64_t rows, inner, n;
};

Scales CheckedScales(const char* op, const DLArray* x, const DLArray* scale, const DLArray* zero,
                     int64_t axis) {
  Scales s{1, Numel(x), 1};
  if (Numel(scale) != Numel(zero)) Fail("%s: as many scales as zero points", op);
  if (scale->ndim == 0) return s;
  if (axis < 0 || axis >= x->ndim || x->shape[axis] != Numel(scale))
    Fail("%s: %ld scales do not fit axis %ld of %s", op, (long)Numel(scale), (long)axis,
         ShapeText(x).c_str());
  s.inner = 1;
  for (int a = 0; a < x->ndim; a++) (a <= axis ? s.rows : s.inner) *= x->shape[a];
  s.n = x->shape[axis];
  return s;
}

// Calls body(begin, end, k) for pieces of rows that have scale k.
template <class F>
void ForRows(const Scales& s, const F& body) {
  if (s.rows == 1)
    return ParallelFor(s.inner, kGrain, [&](int64_t begin, int64_t end) { body(begin, end, 0); });
  ParallelFor(s.rows, RowGrain(s.inner), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) body(r * s.inner, (r + 1) * s.inner, r % s.n);
  });
}

// The loops: what they read is arguments, which the bytes that they write cannot alias.
DLSYS_INLINE void QuantizeLoop(const float* x, float step, float zero, uint8_t* q, int64_t n) {
  DLSYS_IVDEP
  for (int64_t j = 0; j < n; j++) {
    const float units = x[j] / step;
    const float low = units < -zero ? -zero : units;
    const float clipped = low > 255.f - zero ? 255.f - zero : low;
    q[j] = (uint8_t)(int32_t)(rintf(clipped == clipped ? clipped : 0.f) + zero);
  }
}

DLSYS_INLINE void AddLoop(const uint8_t* a, const uint8_t* b, float scale_a, float scale_b,
                          float offset, float low, float high, uint8_t* y, int64_t n) {
  DLSYS_IVDEP
  for (int64_t k = 0; k < n; k++) {
    const float sum = (float)(int32_t)a[k] * scale_a + (float)(int32_t)b[k] * scale_b;
    const float moved = sum + offset;
    const float above = moved < low ? low : moved;
    y[k] = (uint8_t)(int32_t)rintf(above > high ? high : above);
  }
}

void Quantize(const DLArray* x, const DLArray* scale, const DLArray* zero, int64_t axis,
              DLArray* q) {
  const char* op = "quantize";
  const float *from = Input(op, x), *factor = Input(op, scale);
  const uint8_t* offset = Input<uint8_t>(op, zero);
  uint8_t* to = Output<uint8_t>(op, q);
  CheckSameShape(op, x, q);
  ForRows(CheckedScales(op, x, scale, zero, axis), [=](int64_t begin, int64_t end, int64_t k) {
    const float step = factor[k], z = offset[k];
    Dispatch(DLSYS_SIMD { QuantizeLoop(from + begin, step, z, to + begin, end - begin); });
  });
}

template <class T>
void DequantizeAs(const DLArray* x, const DLArray* scale, const DLArray* zero, int64_t axis,
                  DLArray* y) {
  const char* op = "dequantize";
  const T *from = Input<T>(op, x), *offset = Input<T>(op, zero);
  const float* factor = Input(op, scale);
  float* to = Output(op, y);
  CheckSameShape(op, x, y);
  ForRows(CheckedScales(op, x, scale, zero, axis), [=](int64_t begin, int64_t end, int64_t k) {
    const float step = factor[k];
    const int64_t z = offset[k];
    Dispatch(DLSYS_SIMD {
      DLSYS_IVDEP
      for (int64_t j = begin; j < end; j++) to[j] = (float)(from[j] - z) * step;
    });
  });
}

void Dequantize(const DLArray* x, const DLArray* scale, const DLArray* zero, int64_t axis,
                DLArray* y) {
  if (x->dtype == DL_INT32)
    DequantizeAs<int32_t>(x, scale, zero, axis, y);
  else
    DequantizeAs<uint8_t>(x, scale, zero, axis, y);
}

void QuantizedAdd(const DLArray* a, const DLArray* b, float scale_a, float scale_b, float offset,
                  int64_t low, int64_t high, DLArray* y) {
  const char* op = "quantized_add";
  const uint8_t *left = Input<uint8_t>(op, a), *right = Input<uint8_t>(op, b);
  uint8_t* to = Output<uint8_t>(op, y);
  CheckSameShape(op, a, b);
  CheckSameShape(op, a, y);
  ParallelFor(Numel(y), kGrain, [=](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      AddLoop(left + begin, right + begin, scale_a, scale_b, offset, (float)low, (float)high,
              to + begin, end - begin);
    });
  });
}

DLSYS_KERNEL(cpu, quantize, Quantize);
DLSYS_KERNEL(cpu, dequantize, Dequantize);
DLSYS_KERNEL(cpu, quantized_add, QuantizedAdd);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
