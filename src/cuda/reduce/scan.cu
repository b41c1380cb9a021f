// Scans along the middle axis of x (outer, n, inner): cumulative sums, and the product of all
// elements but one, from an exclusive prefix product and an exclusive suffix product.
//
// A cumulative sum over rows (inner == 1) takes a block a row, kThreads elements at a time: a block
// scan by warp shuffles, with the sum of the elements before carried from one chunk to the next.
// All else takes a thread a column. Sums and products are carried in double, in a fixed order.
// Outputs never overlap inputs. Latency limits long columns, memory bandwidth the rest.
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;

// ---- kernels ----

// Inclusive scan over the block: the sum of this thread and those before it; `total` is the sum of
// all.
__device__ double BlockScan(double value, double* total) {
  __shared__ double warp_sums[kWarps];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += before;
  }
  __syncthreads();  // the previous call's readers are done
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  double sum = 0, offset = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    if (w == warp) offset = sum;
    sum += warp_sums[w];
  }
  *total = sum;
  return offset + value;
}

// x (rows, n) -> y (rows, n), from the end of each row with `reverse`.
template <class T>
__global__ void RowCumSumKernel(const T* x, T* y, int64_t rows, int64_t n, bool reverse) {
  // The bounds are uniform over the block, as the barriers of BlockScan require.
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t first = row * n;
    double carry = 0;
    for (int64_t k = 0; k < n; k += blockDim.x) {
      const int64_t i = k + threadIdx.x;
      const int64_t at = first + (reverse ? n - 1 - i : i);
      double total;
      const double sum = BlockScan(i < n ? (double)x[at] : 0.0, &total);
      if (i < n) y[at] = T(carry + sum);
      carry += total;
    }
  }
}

// x (outer, n, inner) -> y (outer, n, inner).
template <class T>
__global__ void ColumnCumSumKernel(const T* x, T* y, int64_t columns, int64_t n, int64_t inner,
                                   bool reverse) {
  for (int64_t column = FirstItem(); column < columns; column += ItemStep()) {
    const int64_t o = column / inner;
    const int64_t first = o * n * inner + (column - o * inner);
    double sum = 0;
    for (int64_t k = 0; k < n; k++) {
      const int64_t at = first + (reverse ? n - 1 - k : k) * inner;
      sum += x[at];
      y[at] = T(sum);
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

template <class T>
void CumSum(const DLArray* x, int64_t reverse, DLArray* y, DLStream stream) {
  const char* op = "cumsum";
  Enter(op, y, x);
  CheckShapes(op, x, y);
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  if (Numel(y) == 0) return;
  const int64_t outer = x->shape[0], n = x->shape[1], inner = x->shape[2];
  if (inner == 1 && n > 32)
    return Launch(op, RowCumSumKernel<T>, Blocks(outer, 1), kThreads, 0, stream, in, out, outer, n,
                  reverse != 0);
  Launch(op, ColumnCumSumKernel<T>, Blocks(outer * inner), kThreads, 0, stream, in, out,
         outer * inner, n, inner, reverse != 0);
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

DLSYS_KERNEL_TYPED(cuda, cumsum, CumSum);
DLSYS_KERNEL_TYPED(cuda, prod_others, ProdOthers);
DLSYS_KERNEL_TYPED(cuda, prod_others_tangent, ProdOthersTangent);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
