// Scans along the middle axis of x (outer, n, inner): cumulative sums and products, the linear
// recurrence, and the product of all elements but one, from an exclusive prefix product and an
// exclusive suffix product.
//
// A cumulative sum or product over rows (inner == 1) takes a block a row, kThreads elements at a
// time: a block scan by warp shuffles, with the sum of the elements before carried from one chunk
// to the next. All else takes a thread a column. Sums and products are carried in double, in a
// fixed order. Outputs never overlap inputs. Latency limits long columns, memory bandwidth the
// rest.
#include "cuda/runtime/launch.cuh"
#include "math/scans.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;

// ---- kernels ----

// Inclusive scan over the block: the sum (or product) of this thread and those before it; `total`
// is that of all.
template <class Op, class Carry>
__device__ Carry BlockScan(Carry value, Carry* total) {
  __shared__ Carry warp_sums[kWarps];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Carry before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value = Op::Combine(before, value);
  }
  __syncthreads();  // the previous call's readers are done
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  Carry sum = Op::kIdentity, offset = Op::kIdentity;
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    if (w == warp) offset = sum;
    sum = Op::Combine(sum, warp_sums[w]);
  }
  *total = sum;
  return Op::Combine(offset, value);
}

// x (rows, n) -> y (rows, n), from the end of each row with `reverse`.
template <class T, class Op>
__global__ void RowKernel(const T* x, T* y, int64_t rows, int64_t n, bool reverse) {
  using Carry = scan::Carried<T>;
  // The bounds are uniform over the block, as the barriers of BlockScan require.
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t first = row * n;
    Carry carry = Op::kIdentity;
    for (int64_t k = 0; k < n; k += blockDim.x) {
      const int64_t i = k + threadIdx.x;
      const int64_t at = first + (reverse ? n - 1 - i : i);
      Carry total;
      const Carry own = BlockScan<Op>(i < n ? (Carry)x[at] : (Carry)Op::kIdentity, &total);
      if (i < n) y[at] = T(Op::Combine(carry, own));
      carry = Op::Combine(carry, total);
    }
  }
}

// x (outer, n, inner) -> y (outer, n, inner).
template <class T, class Op>
__global__ void ColumnKernel(const T* x, T* y, int64_t columns, int64_t n, int64_t inner,
                             bool reverse) {
  using Carry = scan::Carried<T>;
  for (int64_t column = FirstItem(); column < columns; column += ItemStep()) {
    const int64_t o = column / inner;
    const int64_t first = o * n * inner + (column - o * inner);
    Carry carry = Op::kIdentity;
    for (int64_t k = 0; k < n; k++) {
      const int64_t at = first + (reverse ? n - 1 - k : k) * inner;
      carry = Op::Combine(carry, (Carry)x[at]);
      y[at] = T(carry);
    }
  }
}

// y[k] = a[k] y[k - 1] + b[k], from the end with `reverse`; `initial` stands before the first.
template <class T>
__global__ void RecurrenceKernel(const T* a, const T* b, T* y, int64_t columns, int64_t n,
                                 int64_t inner, bool reverse, float initial) {
  for (int64_t column = FirstItem(); column < columns; column += ItemStep()) {
    const int64_t o = column / inner;
    const int64_t first = o * n * inner + (column - o * inner);
    double carry = initial;
    for (int64_t k = 0; k < n; k++) {
      const int64_t at = first + (reverse ? n - 1 - k : k) * inner;
      carry = carry * a[at] + b[at];
      y[at] = T(carry);
    }
  }
}

// y = the product of the other elements of the column. before (outer, n, inner) is workspace for
// the exclusive prefix products.
template <class T>
__global__ void ProdOthersKernel(const T* x, double* before, T* y, int64_t columns, int64_t n,
                                 int64_t inner) {
  for (int64_t column = FirstItem(); column < columns; column += ItemStep()) {
    const int64_t o = column / inner;
    const int64_t first = o * n * inner + (column - o * inner);
    double product = 1.0;
    for (int64_t k = 0; k < n; k++) {
      before[first + k * inner] = product;
      product *= x[first + k * inner];
    }
    product = 1.0;
    for (int64_t k = n - 1; k >= 0; k--) {  // suffix products
      y[first + k * inner] = T(before[first + k * inner] * product);
      product *= x[first + k * inner];
    }
  }
}

// A dual number: a product and its tangent (forward-mode derivative) along g.
struct Dual {
  double value, tangent;
};

// y as above, and its tangent dy along g.
template <class T>
__global__ void TangentKernel(const T* x, const T* g, Dual* before, T* y, T* dy, int64_t columns,
                              int64_t n, int64_t inner) {
  for (int64_t column = FirstItem(); column < columns; column += ItemStep()) {
    const int64_t o = column / inner;
    const int64_t first = o * n * inner + (column - o * inner);
    Dual product = {1.0, 0.0};
    const auto go_on = [&](int64_t at) {
      product.tangent = product.tangent * x[at] + product.value * g[at];
      product.value *= x[at];
    };
    for (int64_t k = 0; k < n; k++) {
      before[first + k * inner] = product;
      go_on(first + k * inner);
    }
    product = {1.0, 0.0};
    for (int64_t k = n - 1; k >= 0; k--) {  // suffix products
      const int64_t at = first + k * inner;
      y[at] = T(before[at].value * product.value);
      dy[at] = T(before[at].tangent * product.value + before[at].value * product.tangent);
      go_on(at);
    }
  }
}

// ---- launchers ----

void CheckShapes(const char* op, const DLArray* x, const DLArray* y) {
  CheckSameShape(op, x, y);
  if (x->ndim != 3) Fail("%s: expected (outer, n, inner), got %s", op, ShapeText(x).c_str());
}

template <class T, class Op>
void Cumulate(const DLArray* x, int64_t reverse, DLArray* y, DLStream stream) {
  const char* op = Op::name;
  Enter(op, y, x);
  CheckShapes(op, x, y);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  if (Numel(y) == 0) return;
  const int64_t outer = x->shape[0], n = x->shape[1], inner = x->shape[2];
  if (inner == 1 && n > 32)
    return Launch(op, RowKernel<T, Op>, Blocks(outer, 1), kThreads, 0, stream, in, out, outer, n,
                  reverse != 0);
  Launch(op, ColumnKernel<T, Op>, Blocks(outer * inner), kThreads, 0, stream, in, out,
         outer * inner, n, inner, reverse != 0);
}

template <class T>
void Recurrence(const DLArray* a, const DLArray* b, int64_t reverse, float initial, DLArray* y,
                DLStream stream) {
  const char* op = "recurrence";
  Enter(op, y, a, b);
  CheckShapes(op, a, y);
  CheckSameShape(op, a, b);
  const T *factor = In<T>(op, a), *term = In<T>(op, b);
  T* out = Out<T>(op, y);
  if (Numel(y) == 0) return;
  const int64_t columns = a->shape[0] * a->shape[2];
  Launch(op, RecurrenceKernel<T>, Blocks(columns), kThreads, 0, stream, factor, term, out, columns,
         a->shape[1], a->shape[2], reverse != 0, initial);
}

template <class T>
void ProdOthers(const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "prod_others";
  Enter(op, y, x);
  CheckShapes(op, x, y);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  if (Numel(y) == 0) return;
  const int64_t columns = x->shape[0] * x->shape[2];
  const Scratch before(x->ctx, Numel(y) * (int64_t)sizeof(double), stream);
  Launch(op, ProdOthersKernel<T>, Blocks(columns), kThreads, 0, stream, in, (double*)before.data(),
         out, columns, x->shape[1], x->shape[2]);
}

template <class T>
void ProdOthersTangent(const DLArray* x, const DLArray* g, DLArray* y, DLArray* dy,
                       DLStream stream) {
  const char* op = "prod_others_tangent";
  Enter(op, y, x, g, dy);
  CheckShapes(op, x, y);
  CheckSameShape(op, x, g);
  CheckSameShape(op, x, dy);
  const T* in = In<T>(op, x);
  const T* along = In<T>(op, g);
  T* out = Out<T>(op, y);
  T* tangent = Out<T>(op, dy);
  if (Numel(y) == 0) return;
  const int64_t columns = x->shape[0] * x->shape[2];
  const Scratch before(x->ctx, Numel(y) * (int64_t)sizeof(Dual), stream);
  Launch(op, TangentKernel<T>, Blocks(columns), kThreads, 0, stream, in, along,
         (Dual*)before.data(), out, tangent, columns, x->shape[1], x->shape[2]);
}

DLSYS_KERNEL_TYPED(cuda, cumsum, Cumulate, scan::Sum);
DLSYS_KERNEL_TYPED(cuda, cumprod, Cumulate, scan::Product);
DLSYS_KERNEL_OF(cuda, cumsum, "cumsum", DL_INT64, Cumulate<int64_t, scan::Sum>);
DLSYS_KERNEL_OF(cuda, cumprod, "cumprod", DL_INT64, Cumulate<int64_t, scan::Product>);
DLSYS_KERNEL_TYPED(cuda, recurrence, Recurrence);
DLSYS_KERNEL_TYPED(cuda, prod_others, ProdOthers);
DLSYS_KERNEL_TYPED(cuda, prod_others_tangent, ProdOthersTangent);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
