// Elementwise kernels on the CPU: vector loops over one functor of functors.h each, over arrays of
// one storage type. The output may be the buffer of an input of its shape. Memory bandwidth limits
// sums and products, arithmetic exp and its kind.
#include "cpu/pointwise/map.h"
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/functors.h"

namespace dlsys {
namespace cpu {
namespace {

template <class T, class F>
void Unary(const DLArray* x, DLArray* y) {
  const T* in = Input<T>(F::name, x);
  T* out = Output<T>(F::name, y);
  CheckSameShape(F::name, x, y);
  ParallelFor(Numel(y), kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD { MapRun<F>::Run(in + begin, out + begin, end - begin); });
  });
}

template <class T, class F>
void UnaryWithConst(const DLArray* x, float c, DLArray* y) {
  const T* in = Input<T>(F::name, x);
  T* out = Output<T>(F::name, y);
  CheckSameShape(F::name, x, y);
  ParallelFor(Numel(y), kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD { ConstRun<F>::Run(in + begin, c, out + begin, end - begin); });
  });
}

template <class T, class F>
DLSYS_INLINE void TwoConstsRun(const T* x, float c, float d, T* y, int64_t n) {
  if constexpr (kConvertedApart<T>)
    return InFloat(x, y, n, DLSYS_IN_FLOAT { TwoConstsRun<float, F>(a, c, d, b, count); });
  DLSYS_IVDEP
  for (int64_t k = 0; k < n; k++) y[k] = T(F()(x[k], c, d));
}

template <class T, class F>
void UnaryWithTwoConsts(const DLArray* x, float c, float d, DLArray* y) {
  const T* in = Input<T>(F::name, x);
  T* out = Output<T>(F::name, y);
  CheckSameShape(F::name, x, y);
  ParallelFor(Numel(y), kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD { TwoConstsRun<T, F>(in + begin, c, d, out + begin, end - begin); });
  });
}

// Calls body(x, y, z, n) over blocks in float of the arrays; z may be one of the others.
template <class T, class Body>
DLSYS_INLINE void InFloat(const T* x, int64_t x_stride, const T* y, int64_t y_stride, T* z,
                          int64_t n, const Body& body) {
  float left[kConverted], right[kConverted], to[kConverted];
  for (int64_t at = 0; at < n; at += kConverted) {
    const int64_t count = std::min(kConverted, n - at);
    ConvertRun(x + at * x_stride, left, x_stride ? count : 1);
    ConvertRun(y + at * y_stride, right, y_stride ? count : 1);
    body(left, right, to, count);
    ConvertRun(to, z + at, count);
  }
}
#define DLSYS_TWO_IN_FLOAT                                             \
  [=](const float* left, const float* right, float* to, int64_t count) \
      __attribute__((always_inline))

template <class T, class F>
DLSYS_INLINE void BinaryTwoConstsRun(const T* x, const T* y, float c, float d, T* z, int64_t n) {
  if constexpr (kConvertedApart<T>)
    return InFloat(
        x, 1, y, 1, z, n,
        DLSYS_TWO_IN_FLOAT { BinaryTwoConstsRun<float, F>(left, right, c, d, to, count); });
  DLSYS_IVDEP
  for (int64_t k = 0; k < n; k++) z[k] = T(F()(x[k], y[k], c, d));
}

template <class T, class F>
void BinaryWithTwoConsts(const DLArray* x, const DLArray* y, float c, float d, DLArray* z) {
  const T* left = Input<T>(F::name, x);
  const T* right = Input<T>(F::name, y);
  T* out = Output<T>(F::name, z);
  CheckSameShape(F::name, x, z);
  CheckSameShape(F::name, y, z);
  ParallelFor(Numel(z), kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      BinaryTwoConstsRun<T, F>(left + begin, right + begin, c, d, out + begin, end - begin);
    });
  });
}

template <class T, class F>
void BinaryWithConst(const DLArray* x, const DLArray* y, float c, DLArray* z) {
  BinaryWithTwoConsts<T, F>(x, y, c, 0.f, z);
}

// z = F(x, y) for n elements; an operand of stride 0 is one value, broadcast.
template <class T, class F>
DLSYS_INLINE void ZipRun(const T* x, int64_t x_stride, const T* y, int64_t y_stride, T* z,
                         int64_t n) {
  if constexpr (kConvertedApart<T>)
    return InFloat(
        x, x_stride, y, y_stride, z, n,
        DLSYS_TWO_IN_FLOAT { ZipRun<float, F>(left, x_stride, right, y_stride, to, count); });
  if (x_stride && y_stride) {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) z[k] = T(F()(x[k], y[k]));
  } else if (x_stride) {
    const float right = *y;
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) z[k] = T(F()(x[k], right));
  } else {
    const float left = *x;
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) z[k] = T(F()(left, y_stride ? y[k] : *y));
  }
}

void CheckBroadcast(const char* op, const DLArray* x, const DLArray* y, const DLArray* z) {
  if (BroadcastsTo(x, z) && BroadcastsTo(y, z)) return;
  Fail("%s: shapes %s and %s do not broadcast to %s", op, ShapeText(x).c_str(),
       ShapeText(y).c_str(), ShapeText(z).c_str());
}

template <class T, class F>
void Binary(const DLArray* x, const DLArray* y, DLArray* z) {
  const T* left = Input<T>(F::name, x);
  const T* right = Input<T>(F::name, y);
  T* out = Output<T>(F::name, z);
  if (SameShape(x, z) && SameShape(y, z)) {
    return ParallelFor(Numel(z), kGrain, [&](int64_t begin, int64_t end) {
      Dispatch(DLSYS_SIMD {
        ZipRun<T, F>(left + begin, 1, right + begin, 1, out + begin, end - begin);
      });
    });
  }
  CheckBroadcast(F::name, x, y, z);
  if (Numel(z) == 0) return;
  Loop<2> rows;
  for (int a = 0; a < z->ndim; a++)
    rows.Add(z->shape[a], {BroadcastStride(x, z->ndim, a), BroadcastStride(y, z->ndim, a)});
  int64_t stride[2];
  const int64_t cols = rows.PopInner(stride);
  const int64_t piece = std::min(cols, kGrain);  // long rows are cut into pieces
  const int64_t pieces = (cols - 1) / piece + 1;
  ParallelFor(rows.Count() * pieces, RowGrain(piece), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      Cursor<2> row(rows, begin / pieces);
      for (int64_t k = begin; k < end; k++) {
        const int64_t at = k % pieces * piece;
        ZipRun<T, F>(left + row.offset[0] + at * stride[0], stride[0],
                     right + row.offset[1] + at * stride[1], stride[1],
                     out + k / pieces * cols + at, std::min(piece, cols - at));
        if (at + piece >= cols) row.Next();
      }
    });
  });
}

// A kernel of every functor.
#define DLSYS_REGISTER_FUNCTORS
#define DLSYS_UNARY(Name, op, expression) DLSYS_KERNEL_TYPED_NAMED(cpu, Name, op, Unary, fn::Name);
#define DLSYS_BINARY(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cpu, Name, op, Binary, fn::Name);
#define DLSYS_UNARY_CONST(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cpu, Name, op, UnaryWithConst, fn::Name);
#define DLSYS_UNARY_CONSTS(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cpu, Name, op, UnaryWithTwoConsts, fn::Name);
#define DLSYS_BINARY_CONST(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cpu, Name, op, BinaryWithConst, fn::Name);
#define DLSYS_BINARY_CONSTS(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cpu, Name, op, BinaryWithTwoConsts, fn::Name);
#include "math/functors.h"

}  // namespace
}  // namespace cpu
}  // namespace dlsys
