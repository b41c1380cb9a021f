// Elementwise kernels on the CPU: vector loops over one functor of functors.h each, over arrays of
// one storage type. The output may be the buffer of an input of its shape. Memory bandwidth limits
// sums and products, arithmetic exp and its kind. To be compiled in reasonable time, most functors
// have loops over float32 alone: 16-bit floats are widened and rounded a block at a time, which the
// cache holds.
#include <type_traits>

#include "cpu/pointwise/map.h"
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/functors.h"
#include "math/storage.h"

namespace dlsys {
namespace cpu {
namespace {

constexpr int64_t kBlock = 1024;  // 16-bit floats that are widened at a time

// The type of the elements in a loop over F, for arrays of T. Where memory bandwidth is the limit,
// bfloat16 has loops of its own; of float16, whose conversion is long, compilers vectorize only
// conversions by themselves.
template <class F, class... Of>
inline constexpr bool kIsOneOf = (std::is_same_v<F, Of> || ...);
template <class T, class F>
using LoopType =
    std::conditional_t<std::is_same_v<T, bfloat16> &&
                           kIsOneOf<F, fn::Neg, fn::Abs, fn::Relu, fn::ReluGradient, fn::Add,
                                    fn::Sub, fn::Mul, fn::AddConst, fn::MulConst, fn::RsubConst>,
                       bfloat16, float>;

template <class From, class To>
void ConvertRun(const From* x, To* y, int64_t n) {
  Dispatch(DLSYS_SIMD {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = To((float)x[k]);
  });
}

// ---- one operand ----

// y = F(x, c, d), of which F may take fewer; y may be x.
template <class T>
using MapLoop = void(const T* x, float c, float d, T* y, int64_t n);

template <class T, class F>
void UnaryLoop(const T* x, float, float, T* y, int64_t n) {
  Dispatch(DLSYS_SIMD { MapRun<F>::Run(x, y, n); });
}
template <class T, class F>
void ConstLoop(const T* x, float c, float, T* y, int64_t n) {
  Dispatch(DLSYS_SIMD { ConstRun<F>::Run(x, c, y, n); });
}
template <class T, class F>
void TwoConstsLoop(const T* x, float c, float d, T* y, int64_t n) {
  Dispatch(DLSYS_SIMD {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) y[k] = T(F()(x[k], c, d));
  });
}

template <class T, class U>
void Map(const char* op, MapLoop<U>* loop, const DLArray* x, float c, float d, DLArray* y) {
  const T* in = Input<T>(op, x);
  T* out = Output<T>(op, y);
  CheckSameShape(op, x, y);
  ParallelFor(Numel(y), kGrain, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, U>) {
      loop(in + begin, c, d, out + begin, end - begin);
    } else {
      float block[kBlock];
      for (; begin < end; begin += kBlock) {
        const int64_t n = std::min(kBlock, end - begin);
        ConvertRun(in + begin, block, n);
        loop(block, c, d, block, n);
        ConvertRun(block, out + begin, n);
      }
    }
  });
}

template <class T, class F>
void Unary(const DLArray* x, DLArray* y) {
  Map<T, LoopType<T, F>>(F::name, UnaryLoop<LoopType<T, F>, F>, x, 0.f, 0.f, y);
}
template <class T, class F>
void UnaryWithConst(const DLArray* x, float c, DLArray* y) {
  Map<T, LoopType<T, F>>(F::name, ConstLoop<LoopType<T, F>, F>, x, c, 0.f, y);
}
template <class T, class F>
void UnaryWithTwoConsts(const DLArray* x, float c, float d, DLArray* y) {
  Map<T, LoopType<T, F>>(F::name, TwoConstsLoop<LoopType<T, F>, F>, x, c, d, y);
}

// ---- two operands ----

// Two operands broadcast to an output: rows of `cols` elements, along which an operand moves by
// its stride, 0 or 1. Long rows are cut into pieces.
struct Rows {
  Loop<2> outer;
  int64_t stride[2], cols, piece, pieces;

  // One row.
  Rows(int64_t x_stride, int64_t y_stride, int64_t n)
      : stride{x_stride, y_stride}, cols(n), piece(n), pieces(1) {}

  Rows(const DLArray* x, const DLArray* y, const DLArray* z) {
    for (int a = 0; a < z->ndim; a++)
      outer.Add(z->shape[a], {BroadcastStride(x, z->ndim, a), BroadcastStride(y, z->ndim, a)});
    cols = outer.PopInner(stride);
    piece = std::min(cols, kGrain);
    pieces = (cols - 1) / piece + 1;
  }

  // Calls body(offset in x, offset in y, offset in z, n) for the pieces [begin, end).
  template <class Body>
  DLSYS_INLINE void Each(int64_t begin, int64_t end, const Body& body) const {
    Cursor<2> row(outer, begin / pieces);
    for (int64_t k = begin; k < end; k++) {
      const int64_t at = k % pieces * piece;
      body(row.offset[0] + at * stride[0], row.offset[1] + at * stride[1], k / pieces * cols + at,
           std::min(piece, cols - at));
      if (at + piece >= cols) row.Next();
    }
  }
};

// The pieces [begin, end) of z = F(x, y, c, d), of which F may take fewer; z may be x or y.
template <class T>
using ZipLoop = void(const Rows& rows, int64_t begin, int64_t end, const T* x, const T* y, float c,
                     float d, T* z);

template <class F>
DLSYS_INLINE float Apply(float x, float y, float c, float d) {
  if constexpr (std::is_invocable_v<F, float, float>)
    return F()(x, y);
  else
    return F()(x, y, c, d);
}

template <class T, class F>
DLSYS_INLINE void ZipRun(const T* x, int64_t x_stride, const T* y, int64_t y_stride, float c,
                         float d, T* z, int64_t n) {
  if (x_stride && y_stride) {
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) z[k] = T(Apply<F>(x[k], y[k], c, d));
  } else if (x_stride) {
    const float right = *y;
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) z[k] = T(Apply<F>(x[k], right, c, d));
  } else {
    const float left = *x;
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) z[k] = T(Apply<F>(left, y_stride ? y[k] : *y, c, d));
  }
}

template <class T, class F>
void BinaryLoop(const Rows& rows, int64_t begin, int64_t end, const T* x, const T* y, float c,
                float d, T* z) {
  Dispatch([&]() __attribute__((always_inline)) {
    rows.Each(begin, end,
              [=, &rows](int64_t in_x, int64_t in_y, int64_t in_z,
                         int64_t n) __attribute__((always_inline)) {
                ZipRun<T, F>(x + in_x, rows.stride[0], y + in_y, rows.stride[1], c, d, z + in_z, n);
              });
  });
}

// A row of 16-bit floats, of which operands of stride 0 are one value.
template <class T>
void ZipNarrow(ZipLoop<float>* loop, const T* x, int64_t x_stride, const T* y, int64_t y_stride,
               float c, float d, T* z, int64_t n) {
  float left[kBlock], right[kBlock], to[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t count = std::min(kBlock, n - at);
    ConvertRun(x + at * x_stride, left, x_stride ? count : 1);
    ConvertRun(y + at * y_stride, right, y_stride ? count : 1);
    loop(Rows(x_stride, y_stride, count), 0, 1, left, right, c, d, to);
    ConvertRun(to, z + at, count);
  }
}

template <class T, class U>
void Zip(const char* op, ZipLoop<U>* loop, const DLArray* x, const DLArray* y, float c, float d,
         DLArray* z) {
  const T* left = Input<T>(op, x);
  const T* right = Input<T>(op, y);
  T* out = Output<T>(op, z);
  if (!BroadcastsTo(x, z) || !BroadcastsTo(y, z))
    Fail("%s: shapes %s and %s do not broadcast to %s", op, ShapeText(x).c_str(),
         ShapeText(y).c_str(), ShapeText(z).c_str());
  if (Numel(z) == 0) return;
  const Rows rows(x, y, z);
  const int64_t count = rows.outer.Count() * rows.pieces;
  ParallelFor(count, RowGrain(rows.piece), [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, U>) {
      loop(rows, begin, end, left, right, c, d, out);
    } else {
      rows.Each(begin, end, [&](int64_t in_x, int64_t in_y, int64_t in_z, int64_t n) {
        ZipNarrow(loop, left + in_x, rows.stride[0], right + in_y, rows.stride[1], c, d, out + in_z,
                  n);
      });
    }
  });
}

template <class T, class F>
void Binary(const DLArray* x, const DLArray* y, DLArray* z) {
  Zip<T, LoopType<T, F>>(F::name, BinaryLoop<LoopType<T, F>, F>, x, y, 0.f, 0.f, z);
}
template <class T, class F>
void BinaryWithTwoConsts(const DLArray* x, const DLArray* y, float c, float d, DLArray* z) {
  for (const DLArray* a : {x, y, (const DLArray*)z}) Check(F::name, a);
  CheckSameShape(F::name, x, z);
  CheckSameShape(F::name, y, z);
  Zip<T, LoopType<T, F>>(F::name, BinaryLoop<LoopType<T, F>, F>, x, y, c, d, z);
}
template <class T, class F>
void BinaryWithConst(const DLArray* x, const DLArray* y, float c, DLArray* z) {
  BinaryWithTwoConsts<T, F>(x, y, c, 0.f, z);
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
