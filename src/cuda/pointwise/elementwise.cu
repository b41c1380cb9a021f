// Elementwise kernels: y = f(x), f(x, c) and f(x, y) with numpy broadcasting, over the functors of
// functors.h.
//
// Arrays are float32, contiguous, row-major. An output may be the same buffer as an input of its
// own shape: every thread reads what it overwrites before it writes, and no other thread reads it.
// Sixteen bytes an access where addresses allow it.
#include "cuda/pointwise/loop.cuh"
#include "cuda/runtime/launch.cuh"
#include "math/functors.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// y[n] = f(x[n]); the first 4 * nquads elements go by quads.
template <class F>
__global__ void MapKernel(const float* x, float* y, int64_t n, int64_t nquads, F f) {
  for (int64_t i = FirstItem(); i < nquads; i += ItemStep()) {
    const float4 v = ((const float4*)x)[i];
    ((float4*)y)[i] = make_float4(f(v.x), f(v.y), f(v.z), f(v.w));
  }
  for (int64_t i = 4 * nquads + FirstItem(); i < n; i += ItemStep()) y[i] = f(x[i]);
}

// How an operand of a flat loop is indexed: by the output's index, its column, its row, or not at
// all.
enum class Access { kSame, kColumn, kRow, kScalar };

struct Operand {
  const float* data;
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
    if (access == Access::kSame) return *(const float4*)(data + i);
    if (access == Access::kColumn) return *(const float4*)(data + i % columns);
    const float v = At(i);
    return make_float4(v, v, v, v);
  }
};

// out[n] = f(x, y), operands indexed as they say.
template <class F>
__global__ void FlatKernel(Operand x, Operand y, float* out, int64_t n, int64_t nquads) {
  const F f;
  for (int64_t i = FirstItem(); i < nquads; i += ItemStep()) {
    const float4 a = x.QuadAt(4 * i);
    const float4 b = y.QuadAt(4 * i);
    ((float4*)out)[i] = make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
  }
  for (int64_t i = 4 * nquads + FirstItem(); i < n; i += ItemStep()) out[i] = f(x.At(i), y.At(i));
}

// out[n] = f(x, y), operands at their strides.
template <class F>
__global__ void StridedKernel(const float* x, const float* y, float* out, int64_t n, Loop loop) {
  const F f;
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const Offsets at = Locate(loop, i);
    out[i] = f(x[at.x], y[at.y]);
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
template <class F>
__global__ void PairKernel(const float* x, const float* y, float c, float d, float* z, int64_t n,
                           int64_t nquads) {
  const F f;
  for (int64_t i = FirstItem(); i < nquads; i += ItemStep()) {
    const float4 a = ((const float4*)x)[i];
    const float4 b = ((const float4*)y)[i];
    ((float4*)z)[i] =
        make_float4(f(a.x, b.x, c, d), f(a.y, b.y, c, d), f(a.z, b.z, c, d), f(a.w, b.w, c, d));
  }
  for (int64_t i = 4 * nquads + FirstItem(); i < n; i += ItemStep()) z[i] = f(x[i], y[i], c, d);
}

// ---- launchers ----

template <class F>
void Map(const char* op, const DLArray* x, DLArray* y, F f, DLStream stream) {
  Enter(op, y, x);
  CheckSameShape(op, x, y);
  const float* in = In(op, x);
  float* out = Out(op, y);
  const int64_t n = Numel(y);
  const int64_t nquads = Aligned16(in) && Aligned16(out) ? n / 4 : 0;
  Launch(op, MapKernel<F>, Blocks(nquads ? nquads : n), kThreads, 0, stream, in, out, n, nquads, f);
}

template <class F>
void Unary(const DLArray* x, DLArray* y, DLStream stream) {
  Map(F::name, x, y, F(), stream);
}

template <class F>
void Constant(const DLArray* x, float c, DLArray* y, DLStream stream) {
  Map(F::name, x, y, WithConstant<F>{c}, stream);
}

template <class F>
void TwoConstants(const DLArray* x, float c, float d, DLArray* y, DLStream stream) {
  Map(F::name, x, y, WithTwoConstants<F>{c, d}, stream);
}

template <class F>
void PairTwoConstants(const DLArray* x, const DLArray* y, float c, float d, DLArray* z,
                      DLStream stream) {
  const char* op = F::name;
  Enter(op, z, x, y);
  CheckSameShape(op, x, z);
  CheckSameShape(op, y, z);
  const float* left = In(op, x);
  const float* right = In(op, y);
  float* out = Out(op, z);
  const int64_t n = Numel(z);
  const bool aligned = Aligned16(left) && Aligned16(right) && Aligned16(out);
  const int64_t nquads = aligned ? n / 4 : 0;
  Launch(op, PairKernel<F>, Blocks(nquads ? nquads : n), kThreads, 0, stream, left, right, c, d,
         out, n, nquads);
}

template <class F>
void PairConstant(const DLArray* x, const DLArray* y, float c, DLArray* z, DLStream stream) {
  PairTwoConstants<F>(x, y, c, 0.f, z, stream);
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

bool AllowsQuads(const Operand& operand) {
  const bool by_quads = operand.access == Access::kSame || operand.access == Access::kColumn;
  const bool by_columns = operand.access == Access::kColumn || operand.access == Access::kRow;
  return (!by_quads || Aligned16(operand.data)) && (!by_columns || operand.columns % 4 == 0);
}

template <class F>
void Binary(const DLArray* x, const DLArray* y, DLArray* out, DLStream stream) {
  const char* op = F::name;
  Enter(op, out, x, y);
  const int64_t n = Numel(out);
  const Loop loop = BroadcastLoop(op, x, y, out);
  const int64_t columns = loop.shape[loop.ndim - 1];
  Operand a{In(op, x), Access::kSame, columns};
  Operand b{In(op, y), Access::kSame, columns};
  float* result = Out(op, out);
  if (!FlatAccess(loop, loop.x, &a.access) || !FlatAccess(loop, loop.y, &b.access))
    return Launch(op, StridedKernel<F>, Blocks(n), kThreads, 0, stream, a.data, b.data, result, n,
                  loop);
  const int64_t nquads = Aligned16(result) && AllowsQuads(a) && AllowsQuads(b) ? n / 4 : 0;
  Launch(op, FlatKernel<F>, Blocks(nquads ? nquads : n), kThreads, 0, stream, a, b, result, n,
         nquads);
}

// A kernel of every functor.
#define DLSYS_REGISTER_FUNCTORS
#define DLSYS_UNARY(Name, op, expression) DLSYS_KERNEL_NAMED(cuda, Name, op, Unary<fn::Name>);
#define DLSYS_BINARY(Name, op, expression) DLSYS_KERNEL_NAMED(cuda, Name, op, Binary<fn::Name>);
#define DLSYS_UNARY_CONST(Name, op, expression) \
  DLSYS_KERNEL_NAMED(cuda, Name, op, Constant<fn::Name>);
#define DLSYS_UNARY_CONSTS(Name, op, expression) \
  DLSYS_KERNEL_NAMED(cuda, Name, op, TwoConstants<fn::Name>);
#define DLSYS_BINARY_CONST(Name, op, expression) \
  DLSYS_KERNEL_NAMED(cuda, Name, op, PairConstant<fn::Name>);
#define DLSYS_BINARY_CONSTS(Name, op, expression) \
  DLSYS_KERNEL_NAMED(cuda, Name, op, PairTwoConstants<fn::Name>);
#include "math/functors.h"

}  // namespace
}  // namespace cuda
}  // namespace dlsys
