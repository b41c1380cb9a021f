// Column-wise softmax and log-softmax, over the middle axis of x (outer, n, inner).
//
// A block takes kCols columns with kRows threads each; neighboring threads take neighboring
// elements. The softmax is two-pass: the threads of a column combine their maxima, then their sums
// of exp(x - max), which cannot overflow, by trees in shared memory, so every run gives the same
// bits. Later reads of x mostly hit the cache. Outputs never overlap inputs. Memory bandwidth
// limits it.
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

template <bool kLog, int kCols, int kRows, class T>
__global__ void __launch_bounds__(kThreads)
    SoftmaxColumnsKernel(const T* x, T* y, int64_t columns, int64_t n, int64_t inner) {
  const int row = (int)threadIdx.x / kCols, col = (int)threadIdx.x % kCols;
  // The bound is uniform over the block, as its barriers require.
  for (int64_t tile = blockIdx.x; tile * kCols < columns; tile += gridDim.x) {
    const int64_t column = tile * kCols + col;
    const int64_t count = column < columns ? n : 0;
    const int64_t o = column / inner;
    const int64_t first = o * n * inner + (column - o * inner);
    float max = -INFINITY;
    for (int64_t r = row; r < count; r += kRows) max = fmaxf(max, x[first + r * inner]);
    max = ColumnReduce<MaxMonoid, kCols, kRows>(max, row, col);
    float sum = 0.f;
    for (int64_t r = row; r < count; r += kRows) sum += expf(x[first + r * inner] - max);
    sum = ColumnReduce<SumMonoid, kCols, kRows>(sum, row, col);
    const float log_sum = kLog ? logf(sum) : 0.f;
    for (int64_t r = row; r < count; r += kRows) {
      const float shifted = x[first + r * inner] - max;
      y[first + r * inner] = T(kLog ? shifted - log_sum : expf(shifted) / sum);
    }
  }
}

// ---- launchers ----

constexpr int64_t kFewRows = 32;
constexpr int64_t kManyColumns = int64_t(1) << 16;

// One thread a column where there are enough columns or few rows, blocks of 32 columns otherwise,
// of 4 where inner is no larger.
template <class T, bool kLog>
void Softmax(const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = kLog ? "log_softmax_columns" : "softmax_columns";
  Enter(op, y, x);
  CheckSameShape(op, x, y);
  if (x->ndim != 3) Fail("%s: expected (outer, n, inner), got %s", op, ShapeText(x).c_str());
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  const int64_t n = x->shape[1], inner = x->shape[2], columns = x->shape[0] * inner;
  if (Numel(y) == 0) return;
  if (n <= kFewRows || columns >= kManyColumns)
    return Launch(op, SoftmaxColumnsKernel<kLog, kThreads, 1, T>, Blocks(columns), kThreads, 0,
                  stream, in, out, columns, n, inner);
  if (inner > 4)
    return Launch(op, SoftmaxColumnsKernel<kLog, 32, 8, T>, Blocks(columns, 32), kThreads, 0,
                  stream, in, out, columns, n, inner);
  Launch(op, SoftmaxColumnsKernel<kLog, 4, 64, T>, Blocks(columns, 4), kThreads, 0, stream, in, out,
         columns, n, inner);
}

DLSYS_KERNEL_TYPED(cuda, softmax_columns, Softmax, false);
DLSYS_KERNEL_TYPED(cuda, log_softmax_columns, Softmax, true);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
