// Elementwise kernels over the functors of math/functors.h: y = f(x), f(x, c) with constants, and
// f(x, y) with numpy broadcasting.
//
// Arrays are contiguous, row-major, of one storage type. Four elements are read and written at once
// where alignment allows. Broadcasts
// of up to two folded axes are flat loops, all others strided ones. An output may be the buffer of
// an input of its own shape: a thread reads what it overwrites before it writes, and no other
// thread reads it. Memory bandwidth limits it.
#include "cuda/pointwise/loop.cuh"
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/launch.cuh"
#include "math/functors.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// y[n] = f(x[n]); the first 4 * nquads elements are accessed by quads.
template <class T, class F>
__global__ void MapKernel(const T* x, T* y, int64_t n, int64_t nquads, F f) {
  for (int64_t i = FirstItem(); i < nquads; i += ItemStep()) {
    const float4 v = LoadQuad(x + 4 * i);
    StoreQuad(y + 4 * i, make_float4(f(v.x), f(v.y), f(v.z), f(v.w)));
  }
  for (int64_t i = 4 * nquads + FirstItem(); i < n; i += ItemStep()) y[i] = T(f(x[i]));
}

// An operand of a flat loop is indexed by the index of the output, its column, its row, or as
// a scalar.
enum class Access { kSame, kColumn, kRow, kScalar };

template <class T>
struct Operand {
  const T* data;
  Access access;
  int64_t columns;  // of the output seen as (rows, columns)

  __device__ __forceinline__ float At(int64_t i) const {
    switch (access) {
      case Access::kSame:
        return data[i];
      case Access::kColumn:
        return data[i % columns];
      case Access::kRow:
        return data[i / columns];
      default:
        return data[0];
    }
  }
  // Elements i to i + 3, i a multiple of 4; `columns` is a multiple of 4 too where it matters.
  __device__ __forceinline__ float4 QuadAt(int64_t i) const {
    if (access == Access::kSame) return LoadQuad(data + i);
    if (access == Access::kColumn) return LoadQuad(data + i % columns);
    const float v = At(i);
    return make_float4(v, v, v, v);
  }
};

// out[n] = f(x, y), operands indexed by their access.
template <class T, class F>
__global__ void FlatKernel(Operand<T> x, Operand<T> y, T* out, int64_t n, int64_t nquads) {
  const F f;
  for (int64_t i = FirstItem(); i < nquads; i += ItemStep()) {
    const float4 a = x.QuadAt(4 * i);
    const float4 b = y.QuadAt(4 * i);
    StoreQuad(out + 4 * i, make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w)));
  }
  for (int64_t i = 4 * nquads + FirstItem(); i < n; i += ItemStep())
    out[i] = T(f(x.At(i), y.At(i)));
}

// out[n] = f(x, y), operands at their strides.
template <class T, class F>
__global__ void StridedKernel(const T* x, const T* y, T* out, int64_t n, Loop loop) {
  const F f;
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const Offsets at = Locate(loop, i);
    out[i] = T(f(x[at.x], y[at.y]));
  }
}

template <class F>
struct WithConstant {
  float c;
  __device__ float operator()(float x) const { return F()(x, c); }
};

template <class F>
struct WithTwoConstants {
  float c, d;
  __device__ float operator()(float x) const { return F()(x, c, d); }
};

// z[n] = F(x[n], y[n], c, d), all of one shape.
template <class T, class F>
__global__ void BinaryWithConstantsKernel(const T* x, const T* y, float c, float d, T* z, int64_t n,
                                          int64_t nquads) {
  const F f;
  for (int64_t i = FirstItem(); i < nquads; i += ItemStep()) {
    const float4 a = LoadQuad(x + 4 * i);
    const float4 b = LoadQuad(y + 4 * i);
    StoreQuad(z + 4 * i, make_float4(f(a.x, b.x, c, d), f(a.y, b.y, c, d), f(a.z, b.z, c, d),
                                     f(a.w, b.w, c, d)));
  }
  for (int64_t i = 4 * nquads + FirstItem(); i < n; i += ItemStep()) z[i] = T(f(x[i], y[i], c, d));
}

// ---- launchers ----

template <class T, class F>
void Map(const char* op, const DLArray* x, DLArray* y, F f, DLStream stream) {
  Enter(op, y, x);
  CheckSameShape(op, x, y);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  const int64_t n = Numel(y);
  const int64_t nquads = Aligned16(in) && Aligned16(out) ? n / 4 : 0;
  Launch(op, MapKernel<T, F>, Blocks(nquads ? nquads : n), kThreads, 0, stream, in, out, n, nquads,
         f);
}

template <class T, class F>
void Unary(const DLArray* x, DLArray* y, DLStream stream) {
  Map<T>(F::name, x, y, F(), stream);
}

template <class T, class F>
void UnaryWithConstant(const DLArray* x, float c, DLArray* y, DLStream stream) {
  Map<T>(F::name, x, y, WithConstant<F>{c}, stream);
}

template <class T, class F>
void UnaryWithTwoConstants(const DLArray* x, float c, float d, DLArray* y, DLStream stream) {
  Map<T>(F::name, x, y, WithTwoConstants<F>{c, d}, stream);
}

template <class T, class F>
void BinaryWithTwoConstants(const DLArray* x, const DLArray* y, float c, float d, DLArray* z,
                            DLStream stream) {
  const char* op = F::name;
  Enter(op, z, x, y);
  CheckSameShape(op, x, z);
  CheckSameShape(op, y, z);
  const T* left = In<T>(op, x);
  const T* right = In<T>(op, y);
  T* out = Out<T>(op, z);
  const int64_t n = Numel(z);
  const bool aligned = Aligned16(left) && Aligned16(right) && Aligned16(out);
  const int64_t nquads = aligned ? n / 4 : 0;
  Launch(op, BinaryWithConstantsKernel<T, F>, Blocks(nquads ? nquads : n), kThreads, 0, stream,
         left, right, c, d, out, n, nquads);
}

template <class T, class F>
void BinaryWithConstant(const DLArray* x, const DLArray* y, float c, DLArray* z, DLStream stream) {
  BinaryWithTwoConstants<T, F>(x, y, c, 0.f, z, stream);
}

// The access of an operand with these strides in a folded loop; false when it has none.
bool FlatAccess(const Loop& loop, const int64_t* strides, Access* access) {
  if (loop.ndim > 2) return false;
  const int64_t inner = strides[loop.ndim - 1];
  if (loop.ndim == 1) {
    *access = inner ? Access::kSame : Access::kScalar;
  } else {
    const int64_t outer = strides[0];
    *access = outer ? (inner ? Access::kSame : Access::kRow)
                    : (inner ? Access::kColumn : Access::kScalar);
  }
  return true;
}

template <class T>
bool AllowsQuads(const Operand<T>& operand) {
  const bool by_quads = operand.access == Access::kSame || operand.access == Access::kColumn;
  const bool by_columns = operand.access == Access::kColumn || operand.access == Access::kRow;
  return (!by_quads || Aligned16(operand.data)) && (!by_columns || operand.columns % 4 == 0);
}

template <class T, class F>
void Binary(const DLArray* x, const DLArray* y, DLArray* out, DLStream stream) {
  const char* op = F::name;
  Enter(op, out, x, y);
  const int64_t n = Numel(out);
  const Loop loop = BroadcastLoop(op, x, y, out);
  const int64_t columns = loop.shape[loop.ndim - 1];
  Operand<T> a{In<T>(op, x), Access::kSame, columns};
  Operand<T> b{In<T>(op, y), Access::kSame, columns};
  T* result = Out<T>(op, out);
  if (!FlatAccess(loop, loop.x, &a.access) || !FlatAccess(loop, loop.y, &b.access))
    return Launch(op, StridedKernel<T, F>, Blocks(n), kThreads, 0, stream, a.data, b.data, result,
                  n, loop);
  const int64_t nquads = Aligned16(result) && AllowsQuads(a) && AllowsQuads(b) ? n / 4 : 0;
  Launch(op, FlatKernel<T, F>, Blocks(nquads ? nquads : n), kThreads, 0, stream, a, b, result, n,
         nquads);
}

// A kernel of every functor.
#define DLSYS_REGISTER_FUNCTORS
#define DLSYS_UNARY(Name, op, expression) DLSYS_KERNEL_TYPED_NAMED(cuda, Name, op, Unary, fn::Name);
#define DLSYS_BINARY(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cuda, Name, op, Binary, fn::Name);
#define DLSYS_UNARY_CONST(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cuda, Name, op, UnaryWithConstant, fn::Name);
#define DLSYS_UNARY_CONSTS(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cuda, Name, op, UnaryWithTwoConstants, fn::Name);
#define DLSYS_BINARY_CONST(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cuda, Name, op, BinaryWithConstant, fn::Name);
#define DLSYS_BINARY_CONSTS(Name, op, expression) \
  DLSYS_KERNEL_TYPED_NAMED(cuda, Name, op, BinaryWithTwoConstants, fn::Name);
#include "math/functors.h"

}  // namespace
}  // namespace cuda
}  // namespace dlsys
