// Sums over any set of axes. Neighboring axes fold into runs that are summed or kept; each summed
// run is one pass over x (outer, n, inner) -> y (outer, inner), the last run first.
//
// inner == 1 is a row-wise sum, one thread group a row; otherwise the sum is column-wise:
// neighboring threads take neighboring columns, and the threads of a column combine by a tree in
// shared memory. A long axis is split over blocks, whose partial sums go to scratch and are added
// by a second launch. There are no atomics, and the order of additions depends on the sizes only.
// Output and input never overlap. Memory bandwidth limits it.
#include "cuda/reduce/group.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// One pass: axis n in `splits` segments of `length` elements, y (outer, splits, inner).
struct Pass {
  int64_t outer, n, inner;
  int64_t splits, length;
  float scale;
};

// ---- kernels ----

// The sum of x[begin], x[begin + step], ... before x[end], where elements lie `stride` apart. Four
// independent accumulators hide the latency of the additions.
__device__ __forceinline__ float StridedSum(const float* x, int64_t begin, int64_t end,
                                            int64_t step, int64_t stride) {
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  int64_t i = begin;
  for (; i + 3 * step < end; i += 4 * step) {
#pragma unroll
    for (int a = 0; a < 4; a++) sums[a] += x[(i + a * step) * stride];
  }
  for (; i < end; i += step) sums[0] += x[i * stride];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// x (outer, n) -> y (outer, splits), a group of kGroup threads a segment.
template <int kGroup>
__global__ void RowSumKernel(const float* x, float* y, Pass pass) {
  constexpr int kGroups = kThreads / kGroup;
  const int group = threadIdx.x / kGroup;
  const int rank = threadIdx.x % kGroup;
  const int64_t jobs = pass.outer * pass.splits;
  // The bound is uniform over the block, as the barriers of GroupReduce require.
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < jobs;
       first += (int64_t)gridDim.x * kGroups) {
    const int64_t job = first + group;
    float sum = 0.f;
    if (job < jobs) {
      const int64_t row = job / pass.splits;
      const int64_t begin = (job - row * pass.splits) * pass.length;
      const int64_t end = min(begin + pass.length, pass.n);
      sum = StridedSum(x + row * pass.n, begin + rank, end, kGroup, 1);
    }
    sum = GroupReduce<SumMonoid, kGroup>(sum);
    if (rank == 0 && job < jobs) y[job] = pass.scale * sum;
  }
}

// x (outer, n, inner) -> y (outer, splits, inner), kCols columns a block and kRows threads a
// column.
template <int kCols, int kRows>
__global__ void ColumnSumKernel(const float* x, float* y, Pass pass) {
  __shared__ float sums[kRows][kCols];
  const int row = threadIdx.x / kCols;
  const int col = threadIdx.x % kCols;
  const int64_t columns = pass.outer * pass.inner;
  const int64_t tiles = (columns + kCols - 1) / kCols;
  for (int64_t job = blockIdx.x; job < tiles * pass.splits; job += gridDim.x) {
    const int64_t split = job / tiles;
    const int64_t column = (job - split * tiles) * kCols + col;
    const int64_t o = column / pass.inner;
    const int64_t i = column - o * pass.inner;
    const int64_t begin = split * pass.length;
    const int64_t end = min(begin + pass.length, pass.n);
    float sum = 0.f;
    if (column < columns)
      sum = StridedSum(x + o * pass.n * pass.inner + i, begin + row, end, kRows, pass.inner);
    if constexpr (kRows > 1) {
      sums[row][col] = sum;
      __syncthreads();
#pragma unroll
      for (int half = kRows / 2; half > 0; half /= 2) {
        if (row < half) sums[row][col] += sums[row + half][col];
        __syncthreads();
      }
      sum = sums[row][col];  // only row 0 uses it
    }
    if (row == 0 && column < columns)
      y[(o * pass.splits + split) * pass.inner + i] = pass.scale * sum;
  }
}

// ---- launchers ----

constexpr int64_t kManyColumns = int64_t(1) << 18;
constexpr int64_t kFewRows = 32;
constexpr int64_t kCacheNbytes = int64_t(32) << 20;

// Columns of a block: one thread a column when there are enough columns or few rows; one 32-byte
// sector, which gives more blocks, while the input fits the L2 cache; a full 128-byte line
// otherwise.
int ColumnsPerBlock(int64_t outer, int64_t n, int64_t inner) {
  if (outer * inner >= kManyColumns || n <= kFewRows) return 256;
  return outer * n * inner * (int64_t)sizeof(float) <= kCacheNbytes ? 8 : 32;
}

int64_t Clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : (value > high ? high : value);
}

// Segments of the axis: enough to fill the GPU when there are few rows or columns, none shorter
// than is worth a block.
int64_t Splits(int64_t outer, int64_t n, int64_t inner) {
  if (inner == 1) return Clamp(n / 4096, 1, CeilDiv(8192, outer));
  const int64_t tiles = CeilDiv(outer * inner, ColumnsPerBlock(outer, n, inner));
  return Clamp(n / 1024, 1, CeilDiv(2048, tiles));
}

void RunRows(const char* op, const float* x, float* y, const Pass& pass, DLStream stream) {
  const int64_t jobs = pass.outer * pass.splits;
  if (pass.length <= 16) {
    Launch(op, RowSumKernel<4>, Blocks(jobs, kThreads / 4), kThreads, 0, stream, x, y, pass);
  } else if (pass.length <= 1024) {
    Launch(op, RowSumKernel<32>, Blocks(jobs, kThreads / 32), kThreads, 0, stream, x, y, pass);
  } else {
    Launch(op, RowSumKernel<kThreads>, Blocks(jobs, 1), kThreads, 0, stream, x, y, pass);
  }
}

template <int kCols, int kRows>
void RunColumns(const char* op, const float* x, float* y, const Pass& pass, DLStream stream) {
  const int64_t jobs = CeilDiv(pass.outer * pass.inner, kCols) * pass.splits;
  Launch(op, ColumnSumKernel<kCols, kRows>, Blocks(jobs, 1), kCols * kRows, 0, stream, x, y, pass);
}

void Run(const char* op, const float* x, float* y, const Pass& pass, DLStream stream) {
  if (pass.inner == 1) return RunRows(op, x, y, pass, stream);
  switch (ColumnsPerBlock(pass.outer, pass.n, pass.inner)) {
    case 256:
      return RunColumns<256, 1>(op, x, y, pass, stream);
    case 32:
      return RunColumns<32, 16>(op, x, y, pass, stream);
    default:
      return RunColumns<8, 64>(op, x, y, pass, stream);
  }
}

// The axes of x folded into runs of neighbors that are all summed or all kept, without axes of
// size 1.
struct Runs {
  int count = 0;
  int64_t size[DL_MAX_NDIM];
  bool summed[DL_MAX_NDIM];

  Runs(const DLArray* x, int64_t axes) {
    for (int axis = 0; axis < x->ndim; axis++) {
      const bool sum = axes >> axis & 1;
      if (x->shape[axis] == 1) continue;
      if (count == 0 || summed[count - 1] != sum) {
        size[count] = 1;
        summed[count++] = sum;
      }
      size[count - 1] *= x->shape[axis];
    }
  }
  int LastSummed() const {
    int last = count - 1;
    while (last >= 0 && !summed[last]) last--;
    return last;
  }
  int64_t Product(int begin, int end) const {
    int64_t product = 1;
    for (int k = begin; k < end; k++) product *= size[k];
    return product;
  }
  void Remove(int run) {
    count--;
    for (int k = run; k < count; k++) {
      size[k] = size[k + 1];
      summed[k] = summed[k + 1];
    }
  }
};

void CheckReduced(const DLArray* x, int64_t axes, const DLArray* y) {
  if (axes < 0 || axes >> x->ndim)
    Fail("reduce_sum: axes mask %ld names an axis that x %s does not have", (long)axes,
         ShapeText(x).c_str());
  int at = 0;
  bool fits = true;
  for (int axis = 0; axis < x->ndim; axis++) {
    if ((axes >> axis & 1) || x->shape[axis] == 1) continue;
    while (at < y->ndim && y->shape[at] == 1) at++;
    fits = fits && at < y->ndim && y->shape[at] == x->shape[axis];
    at++;
  }
  for (; at < y->ndim; at++) fits = fits && y->shape[at] == 1;
  if (!fits)
    Fail("reduce_sum: the sum of %s over axes mask %ld does not have shape %s",
         ShapeText(x).c_str(), (long)axes, ShapeText(y).c_str());
}

// Sums one run a pass, the last run first; intermediate sums lie in scratch until the final pass
// writes y.
void SumRuns(DLContext ctx, const float* x, Runs runs, float scale, float* y, DLStream stream) {
  const int run = runs.LastSummed();
  const int64_t outer = runs.Product(0, run < 0 ? 0 : run);
  const int64_t n = run < 0 ? 1 : runs.size[run];
  const int64_t inner = runs.Product(run + 1, runs.count);
  if (run >= 0) runs.Remove(run);
  if (runs.LastSummed() < 0)
    return SumAxis("reduce_sum", ctx, x, outer, n, inner, scale, y, stream);
  Scratch rest(ctx, outer * inner * (int64_t)sizeof(float), stream);
  SumAxis("reduce_sum", ctx, x, outer, n, inner, 1.f, rest.floats(), stream);
  SumRuns(ctx, rest.floats(), runs, scale, y, stream);
}

void ReduceSum(const DLArray* x, int64_t axes, float scale, DLArray* y, DLStream stream) {
  Enter("reduce_sum", y, x);
  CheckReduced(x, axes, y);
  SumRuns(y->ctx, In("reduce_sum", x), Runs(x, axes), scale, Out("reduce_sum", y), stream);
}

DLSYS_KERNEL(cuda, reduce_sum, ReduceSum);

}  // namespace

void SumAxis(const char* op, DLContext ctx, const float* x, int64_t outer, int64_t n, int64_t inner,
             float scale, float* y, DLStream stream) {
  if (outer == 0 || inner == 0) return;
  const int64_t splits = Splits(outer, n, inner);
  if (splits == 1) return Run(op, x, y, Pass{outer, n, inner, 1, n, scale}, stream);
  Scratch partial(ctx, outer * splits * inner * (int64_t)sizeof(float), stream);
  Run(op, x, partial.floats(), Pass{outer, n, inner, splits, CeilDiv(n, splits), 1.f}, stream);
  Run(op, partial.floats(), y, Pass{outer, splits, inner, 1, splits, scale}, stream);
}

}  // namespace cuda
}  // namespace dlsys
