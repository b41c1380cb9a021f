// scatter_add: y (outer, n, inner) from updates (outer, count, inner) and indices (count), as a
// stable sort and a segmented sum, without atomics and in an order that is the same every run.
// scatter_add_to adds what y is then to another array of its shape, on the way; in place it touches
// the rows alone that have updates.
//
// An LSD radix sort with 8-bit digits sorts the updates by their row of y; a block counts and
// scatters a tile of keys with one thread a digit, which makes it stable. Then y is written once: a
// warp sums the segment of a row, four columns a lane, or a thread that of an element where rows
// are short or do not lie in quads, and segments longer than kLong get blocks of their own. Indices
// out of range sort behind all rows, are reported (fault.cuh) and make all of y NaN. The passes of
// the sort limit it for short rows, memory bandwidth otherwise.
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/fault.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/indexing.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kDigits = kThreads;  // a digit has 8 bits, a thread each of its values
constexpr int kDigitBits = 8;
constexpr int kTile = 512;
constexpr int64_t kQuadRow = 64;           // columns from which on a warp takes a row
constexpr int kLong = 64;                  // the longest segment that one thread sums
constexpr int kCols = 32;                  // columns of a block for a long segment
constexpr int kMarks = 8;                  // of a block, see LongSumKernel
constexpr int kSlices = kThreads / kCols;  // threads that share the updates of a column

static_assert(kDigits == 1 << kDigitBits, "a thread a digit");

struct Sorted {
  const int32_t* order;   // (count) the updates, by row
  const int32_t* starts;  // (n + 1) where each row's begin; count - starts[n] are out of range
};

struct Shape {
  int64_t outer, n, inner, count;
};

// ---- kernels ----

__global__ void KeysKernel(Indices indices, int32_t* keys, int32_t* order, int64_t count, int64_t n,
                           Faults faults) {
  GridDependencySynchronize();
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) {
    const int64_t row = indices[i];
    const bool exists = row >= 0 && row < n;
    keys[i] = (int32_t)(exists ? row : n);
    order[i] = (int32_t)i;
    if (!exists) faults.OutOfRange(row, i, n);
  }
}

// Loads this block's tile of `count` keys or of their order to shared memory; returns its size.
__device__ __forceinline__ int LoadTile(const int32_t* from, int64_t count, int32_t* tile) {
  GridDependencySynchronize();
  const int64_t first = (int64_t)blockIdx.x * kTile;
  const int filled = (int)(count - first < kTile ? count - first : kTile);
  for (int i = threadIdx.x; i < filled; i += kThreads) tile[i] = from[first + i];
  __syncthreads();
  return filled;
}

__device__ __forceinline__ bool HasDigit(int32_t key, int shift) {
  return (key >> shift & (kDigits - 1)) == (int)threadIdx.x;
}

// counts (kDigits, tiles): how often each digit occurs in each tile
__global__ void HistogramKernel(const int32_t* keys, int64_t count, int shift, int32_t* counts) {
  __shared__ int32_t tile[kTile];
  const int filled = LoadTile(keys, count, tile);
  int32_t found = 0;
#pragma unroll 8
  for (int i = 0; i < filled; i++) found += HasDigit(tile[i], shift);
  counts[(int64_t)threadIdx.x * gridDim.x + blockIdx.x] = found;
}

// Exclusive prefix sum of the n counts in one block, a thread a run of counts.
__global__ void ScanKernel(int32_t* counts, int64_t n) {
  __shared__ int32_t totals[2][kThreads];
  const int64_t run = (n + kThreads - 1) / kThreads;
  const int64_t first = threadIdx.x * run;
  const int64_t end = first + run < n ? first + run : n;
  int32_t total = 0;
  GridDependencySynchronize();
#pragma unroll 8
  for (int64_t i = first; i < end; i++) total += counts[i];
  int32_t before = total;  // and its own
  for (int distance = 1, at = 0; distance < kThreads; distance *= 2, at ^= 1) {
    totals[at][threadIdx.x] = before;
    __syncthreads();
    if ((int)threadIdx.x >= distance) before += totals[at][threadIdx.x - distance];
  }
  before -= total;
#pragma unroll 8
  for (int64_t i = first; i < end; i++) {
    const int32_t here = counts[i];
    counts[i] = before;
    before += here;
  }
}

// starts (kDigits, tiles): the destination of each tile's first key of each digit
__global__ void RadixScatterKernel(const int32_t* keys, const int32_t* order, int64_t count,
                                   int shift, const int32_t* starts, int32_t* new_keys,
                                   int32_t* new_order) {
  __shared__ int32_t tile[kTile], tile_order[kTile];
  LoadTile(order, count, tile_order);
  const int filled = LoadTile(keys, count, tile);
  int64_t to = starts[(int64_t)threadIdx.x * gridDim.x + blockIdx.x];
#pragma unroll 4
  for (int i = 0; i < filled; i++) {
    if (!HasDigit(tile[i], shift)) continue;
    new_keys[to] = tile[i];
    new_order[to] = tile_order[i];
    to++;
  }
}

// starts (n + 1): the lower bound of each row in the sorted keys, by binary search
__global__ void StartsKernel(const int32_t* keys, int64_t count, int32_t* starts, int64_t n) {
  GridDependencySynchronize();
  for (int64_t row = FirstItem(); row <= n; row += ItemStep()) {
    int64_t from = 0, to = count;
    while (from < to) {
      const int64_t middle = from + (to - from) / 2;
      if (keys[middle] < row)
        from = middle + 1;
      else
        to = middle;
    }
    starts[row] = (int32_t)from;
  }
}

// The sum of column[order[i] * inner] for i from begin to end by `step`, in four independent
// accumulators; sixteen are loaded at once.
template <class T>
__device__ __forceinline__ float SumUpdates(const T* column, const int32_t* order, int64_t begin,
                                            int64_t end, int64_t step, int64_t inner) {
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  int64_t i = begin;
  for (; i + 15 * step < end; i += 16 * step) {
    float x[16];
#pragma unroll
    for (int a = 0; a < 16; a++) x[a] = (float)column[order[i + a * step] * inner];
#pragma unroll
    for (int a = 0; a < 16; a++) sums[a % 4] += x[a];
  }
  for (; i + 3 * step < end; i += 4 * step) {
#pragma unroll
    for (int a = 0; a < 4; a++) sums[a] += column[order[i + a * step] * inner];
  }
  for (; i < end; i += step) sums[0] += column[order[i] * inner];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// y = the sums, and `x` where it is not null. Where x is y, rows without updates are left as they
// are.
template <class T, class X, class Y>
__global__ void SumKernel(const T* updates, Sorted sorted, const X* x, Y* y, int64_t n,
                          Shape shape) {
  GridDependencySynchronize();
  const bool valid = sorted.starts[shape.n] == shape.count;
  const bool in_place = (const void*)x == y;
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const int64_t row_of_all = i / shape.inner;
    const int64_t outer = row_of_all / shape.n;
    const int64_t row = row_of_all - outer * shape.n;
    const int64_t begin = sorted.starts[row], end = sorted.starts[row + 1];
    const T* column = updates + outer * shape.count * shape.inner + (i - row_of_all * shape.inner);
    if (!valid)
      y[i] = Y(NAN);
    else if (end - begin <= kLong && !(in_place && begin == end))
      y[i] =
          Y((x ? (float)x[i] : 0.f) + SumUpdates(column, sorted.order, begin, end, 1, shape.inner));
  }
}

// The same of rows of whole quads, by warps.
template <class T, class X, class Y>
__global__ void SumQuadsKernel(const T* updates, Sorted sorted, const X* x, Y* y, Shape shape) {
  GridDependencySynchronize();
  const bool valid = sorted.starts[shape.n] == shape.count;
  const bool in_place = (const void*)x == y;
  const float unsummed = valid ? 0.f : NAN;
  for (int64_t i = FirstItem() / 32; i < shape.outer * shape.n; i += ItemStep() / 32) {
    const int64_t outer = shape.outer == 1 ? 0 : i / shape.n, row = i - outer * shape.n;
    const int begin = sorted.starts[row], end = valid ? sorted.starts[row + 1] : begin;
    if (end - begin > kLong || (in_place && valid && begin == end)) continue;
    const T* const from = updates + outer * shape.count * shape.inner;
#pragma unroll 2
    for (int64_t col = threadIdx.x % 32 * 4; col < shape.inner; col += 32 * 4) {
      float4 sum = make_float4(unsummed, unsummed, unsummed, unsummed);
#pragma unroll 2
      for (int k = begin; k < end; k++) {
        const float4 v = LoadQuad(from + sorted.order[k] * shape.inner + col);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      if (x) {
        const float4 v = LoadQuad(x + i * shape.inner + col);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      StoreWholeQuad(y + i * shape.inner + col, sum);
    }
  }
}

// Sums kCols columns of long segments. Every kLong-th sorted update is a mark; the block of the
// first mark in a segment longer than kLong sums it. A block looks at several at once: mostly none
// is long.
template <class T, class X, class Y>
__global__ void LongSumKernel(const T* updates, const int32_t* keys, Sorted sorted, const X* x,
                              Y* y, int64_t jobs, int64_t col_blocks, Shape shape) {
  __shared__ float partial[kSlices][kCols];
  __shared__ int32_t rows[kMarks];  // of the long segments, or -1
  const int slice = threadIdx.x / kCols, col_in_block = threadIdx.x % kCols;
  const int64_t groups = CeilDiv(shape.count, kLong * kMarks);
  GridDependencySynchronize();
  if (sorted.starts[shape.n] != shape.count) return;
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int64_t group = job / col_blocks % groups, outer = job / col_blocks / groups;
    if (threadIdx.x < kMarks) {
      const int64_t mark = (group * kMarks + threadIdx.x) * kLong;
      int32_t row = mark < shape.count ? keys[mark] : -1;
      if (row >= 0) {
        const int64_t begin = sorted.starts[row], end = sorted.starts[row + 1];
        if (end - begin <= kLong || mark - begin >= kLong) row = -1;
      }
      rows[threadIdx.x] = row;
    }
    __syncthreads();
    const int64_t col = job % col_blocks * kCols + col_in_block;
    const bool exists = col < shape.inner;
    const T* const column = updates + outer * shape.count * shape.inner + (exists ? col : 0);
    for (int m = 0; m < kMarks; m++) {
      const int64_t row = rows[m];
      if (row < 0) continue;
      partial[slice][col_in_block] = SumUpdates(column, sorted.order, sorted.starts[row] + slice,
                                                sorted.starts[row + 1], kSlices, shape.inner);
      __syncthreads();
      if (slice == 0 && exists) {
        float total = 0.f;
        for (int k = 0; k < kSlices; k++) total += partial[k][col_in_block];
        const int64_t at = (outer * shape.n + row) * shape.inner + col;
        y[at] = Y((x ? (float)x[at] : 0.f) + total);
      }
      __syncthreads();
    }
    __syncthreads();  // the rows have been read
  }
}

// ---- launchers ----

// Passes of the radix sort that cover the keys 0 … n.
int Passes(int64_t n) {
  int passes = 1;
  while (n >> passes * kDigitBits) passes++;
  return passes;
}

// The workspace of a sort: double-buffered keys and order, counts, starts.
struct Workspace {
  int64_t count, tiles;
  Scratch scratch;
  int32_t *keys[2], *order[2], *counts, *starts;

  Workspace(const Shape& shape, DLContext ctx, DLStream stream)
      : count(shape.count),
        tiles(CeilDiv(shape.count, kTile)),
        scratch(ctx, (4 * count + kDigits * tiles + shape.n + 1) * (int64_t)sizeof(int32_t),
                stream) {
    int32_t* at = (int32_t*)scratch.data();
    for (int k = 0; k < 2; k++) {
      keys[k] = at + 2 * k * count;
      order[k] = keys[k] + count;
    }
    counts = at + 4 * count;
    starts = counts + kDigits * tiles;
  }
};

// Sorts the updates by row; returns which of the two arrays of keys and order hold them.
int SortByRow(const char* op, Indices indices, const Shape& shape, const Workspace& work,
              const Faults& faults, DLStream stream) {
  const int64_t count = shape.count;
  const unsigned tiles = (unsigned)work.tiles;
  LaunchBeside(op, KeysKernel, Blocks(count), 1, kThreads, 0, stream, indices, work.keys[0],
               work.order[0], count, shape.n, faults);
  const int passes = Passes(shape.n);
  for (int pass = 0; pass < passes; pass++) {
    const int from = pass % 2, to = 1 - from, shift = pass * kDigitBits;
    LaunchBeside(op, HistogramKernel, tiles, 1, kThreads, 0, stream, work.keys[from], count, shift,
                 work.counts);
    LaunchBeside(op, ScanKernel, tiles ? 1 : 0, 1, kThreads, 0, stream, work.counts,
                 kDigits * work.tiles);
    LaunchBeside(op, RadixScatterKernel, tiles, 1, kThreads, 0, stream, work.keys[from],
                 work.order[from], count, shift, work.counts, work.keys[to], work.order[to]);
  }
  LaunchBeside(op, StartsKernel, Blocks(shape.n + 1), 1, kThreads, 0, stream, work.keys[passes % 2],
               count, work.starts, shape.n);
  return passes % 2;
}

// y = the updates by their rows, and x, where it is not null.
template <class T, class X, class Y>
void ScatterAddTo(const char* op, const DLArray* updates, const DLArray* indices, int64_t axis,
                  const X* x, DLArray* y, DLStream stream) {
  const AxisSplit split(op, y, axis);
  CheckGathered(op, y, axis, indices, updates);
  const Shape shape{split.outer, split.n, split.inner, Numel(indices)};
  const int64_t most = INT32_MAX - 1;
  if (shape.n > most || shape.count > most)
    Fail("%s: %lld indices into %lld rows are too many, the limit is %lld", op,
         (long long)shape.count, (long long)shape.n, (long long)most);
  const Indices checked = IndicesOf(op, indices);
  const T* from = In<T>(op, updates);
  Y* to = Out<Y>(op, y);
  const int64_t n = Numel(y);
  if (n == 0) return;
  const Workspace work(shape, y->ctx, stream);
  // Whoever wrote the program knows the operator, not what it is fused into.
  const Faults faults = FaultsOf("scatter_add", "index", y->ctx.device_id);
  const int at = SortByRow(op, checked, shape, work, faults, stream);
  const Sorted sorted{work.order[at], work.starts};
  const bool in_quads = shape.inner >= kQuadRow && shape.inner % 4 == 0 && Aligned16(from) &&
                        Aligned16(x) && Aligned16(to);
  if (in_quads)
    LaunchBeside(op, SumQuadsKernel<T, X, Y>, Blocks(shape.outer * shape.n, kThreads / 32), 1,
                 kThreads, 0, stream, from, sorted, x, to, shape);
  else
    LaunchBeside(op, SumKernel<T, X, Y>, Blocks(n), 1, kThreads, 0, stream, from, sorted, x, to, n,
                 shape);
  if (shape.count <= kLong) return;
  const int64_t col_blocks = CeilDiv(shape.inner, kCols);
  const int64_t jobs = shape.outer * CeilDiv(shape.count, kLong * kMarks) * col_blocks;
  LaunchBeside(op, LongSumKernel<T, X, Y>, Blocks(jobs, 1), 1, kThreads, 0, stream, from,
               work.keys[at], sorted, x, to, jobs, col_blocks, shape);
}

template <class T>
void ScatterAdd(const DLArray* updates, const DLArray* indices, int64_t axis, DLArray* y,
                DLStream stream) {
  const char* op = "scatter_add";
  Enter(op, y, updates, indices);
  ScatterAddTo<T, T, T>(op, updates, indices, axis, nullptr, y, stream);
}

// x and y of the updates' dtype; or, where those are float32, x of 16 bits and y of either.
template <class X>
void ScatterAddToArray(const DLArray* updates, const DLArray* indices, const DLArray* x,
                       int64_t axis, DLArray* y, DLStream stream) {
  const char* op = "scatter_add_to";
  Enter(op, y, updates, indices, x);
  CheckSameShape(op, x, y);
  const X* to = In<X>(op, x);
  if (updates->dtype == kDtype<X>)
    ScatterAddTo<X, X, X>(op, updates, indices, axis, to, y, stream);
  else if (y->dtype == kDtype<X>)
    ScatterAddTo<float, X, X>(op, updates, indices, axis, to, y, stream);
  else
    ScatterAddTo<float, X, float>(op, updates, indices, axis, to, y, stream);
}

DLSYS_KERNEL_TYPED(cuda, scatter_add, ScatterAdd);
DLSYS_KERNEL_TYPED(cuda, scatter_add_to, ScatterAddToArray);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
