// ReduceAxis: the reduction of x (outer, n, inner) to y (outer, inner) by a monoid, a type R with
//   State                                 what a stretch of elements is reduced to
//   kAccumulators                         independent states of a thread, which hide latency
//   State Identity(column) const          the state of no elements
//   State Accumulate(State, x, k) const   with element k of the axis
//   static State Combine(State, State)    of two stretches
//   Result(State) const                   the element of y, a float or an index
// The elements of x are of any storage type, and floats of y as well.
//
// Where inner == 1 a thread group takes a row, otherwise neighboring threads take neighboring
// columns, and several the same (group.cuh). A long axis is split over blocks, whose states go to
// scratch and are combined by a second launch. There are no atomics, and the order depends on the
// sizes only. Output and input never overlap. Memory bandwidth limits it.
#pragma once
#include "cuda/reduce/group.cuh"
#include "cuda/reduce/reduce.cuh"
#include "operators/extents.h"

namespace dlsys {
namespace cuda {

// One pass: axis n in `splits` segments of `length` elements, a state for each, in (outer, splits,
// inner).
struct Pass {
  Extents x;
  int64_t splits, length;
};

// The second pass of R, whose elements are the states of the first.
template <class R>
struct SecondPass : R {
  using State = typename R::State;
  __device__ State Accumulate(State s, State x, int64_t) const { return R::Combine(s, x); }
};

// ---- kernel ----

// The state of from[begin], from[begin + step], ... before from[end], elements `stride` apart.
template <class R, class T>
__device__ __forceinline__ typename R::State Strided(const R& reduce, typename R::State identity,
                                                     const T* from, int64_t begin, int64_t end,
                                                     int64_t step, int64_t stride) {
  constexpr int kCount = R::kAccumulators;
  typename R::State states[kCount];
#pragma unroll
  for (int a = 0; a < kCount; a++) states[a] = identity;
  int64_t k = begin;
  for (; k + (kCount - 1) * step < end; k += kCount * step) {
#pragma unroll
    for (int a = 0; a < kCount; a++)
      states[a] = reduce.Accumulate(states[a], from[(k + a * step) * stride], k + a * step);
  }
  for (; k < end; k += step) states[0] = reduce.Accumulate(states[0], from[k * stride], k);
#pragma unroll
  for (int distance = 1; distance < kCount; distance *= 2) {
#pragma unroll
    for (int a = 0; a + distance < kCount; a += 2 * distance)
      states[a] = R::Combine(states[a], states[a + distance]);
  }
  return states[0];
}

// kCols columns a block, kRows threads each, which are neighbors where columns are rows of memory.
// It writes states to `partial`, or results to y where that is null.
template <bool kRowWise, int kCols, int kRows, class R, class T>
__global__ void __launch_bounds__(kCols* kRows)
    ReduceKernel(R reduce, const T* x, typename R::State* partial, Output y, Pass pass) {
  const int row = (int)threadIdx.x % (kRowWise ? kRows : kCols * kRows) / (kRowWise ? 1 : kCols);
  const int col = (int)threadIdx.x / (kRowWise ? kRows : 1) % kCols;
  const int64_t inner = kRowWise ? 1 : pass.x.inner;
  const int64_t columns = pass.x.outer * inner;
  const int64_t tiles = (columns + kCols - 1) / kCols;
  // The bound is uniform over the block, as its barriers require.
  for (int64_t job = blockIdx.x; job < tiles * pass.splits; job += gridDim.x) {
    const int64_t split = job / tiles;
    const int64_t column = (job - split * tiles) * kCols + col;
    const bool inside = column < columns;
    const int64_t o = kRowWise ? column : column / inner;
    const int64_t i = column - o * inner;
    const int64_t begin = split * pass.length;
    const int64_t end = inside ? min(begin + pass.length, pass.x.n) : begin;
    auto state = reduce.Identity(inside ? column : 0);
    state = Strided(reduce, state, x + o * pass.x.n * inner + i, begin + row, end, kRows, inner);
    if constexpr (kRowWise)
      state = GroupReduce<R, kRows>(state);
    else
      state = ColumnReduce<R, kCols, kRows>(state, row, col);
    if (row != 0 || !inside) continue;
    const int64_t to = (o * pass.splits + split) * inner + i;
    if (partial)
      partial[to] = state;
    else
      y.Store(to, reduce.Result(state));
  }
}

// ---- launchers ----

// Columns of a block: one thread a column when there are enough columns or few rows; one 32-byte
// sector, which gives more blocks, while the input fits the L2 cache; a full 128-byte line
// otherwise.
inline int ColumnsPerBlock(const Extents& x, int64_t itemsize) {
  constexpr int64_t kManyColumns = int64_t(1) << 18, kFewRows = 32;
  constexpr int64_t kCacheNbytes = int64_t(32) << 20;
  if (x.outer * x.inner >= kManyColumns || x.n <= kFewRows) return 256;
  return x.outer * x.n * x.inner * itemsize <= kCacheNbytes ? 8 : 32;
}

// Segments of the axis: enough to fill the GPU when there are few rows or columns, none shorter
// than is worth a block.
inline int64_t Splits(const Extents& x, int64_t itemsize) {
  const int64_t tiles =
      x.inner == 1 ? x.outer : CeilDiv(x.outer * x.inner, ColumnsPerBlock(x, itemsize));
  const int64_t most = x.n / (x.inner == 1 ? 4096 : 1024);
  const int64_t wanted = CeilDiv(x.inner == 1 ? 8192 : 2048, tiles);
  return most < 1 ? 1 : (most < wanted ? most : wanted);
}

template <bool kRowWise, int kCols, int kRows, class R, class T>
void LaunchPass(const char* op, const R& reduce, const T* x, typename R::State* partial, Output y,
                const Pass& pass, DLStream stream) {
  const int64_t jobs = CeilDiv(pass.x.outer * pass.x.inner, kCols) * pass.splits;
  Launch(op, ReduceKernel<kRowWise, kCols, kRows, R, T>, Blocks(jobs, 1), kCols * kRows, 0, stream,
         reduce, x, partial, y, pass);
}

template <class R, class T>
void RunPass(const char* op, const R& reduce, const T* x, typename R::State* partial, Output y,
             const Pass& pass, DLStream stream) {
  if (pass.x.inner == 1) {
    if (pass.length <= 16)
      return LaunchPass<true, kThreads / 4, 4>(op, reduce, x, partial, y, pass, stream);
    if (pass.length <= 1024)
      return LaunchPass<true, kThreads / 32, 32>(op, reduce, x, partial, y, pass, stream);
    return LaunchPass<true, 1, kThreads>(op, reduce, x, partial, y, pass, stream);
  }
  switch (ColumnsPerBlock(pass.x, sizeof(T))) {
    case 256:
      return LaunchPass<false, 256, 1>(op, reduce, x, partial, y, pass, stream);
    case 32:
      return LaunchPass<false, 32, 16>(op, reduce, x, partial, y, pass, stream);
    default:
      return LaunchPass<false, 8, 64>(op, reduce, x, partial, y, pass, stream);
  }
}

// It takes scratch where n is large and outer * inner is small.
template <class R, class T>
void ReduceAxis(const char* op, DLContext ctx, const R& reduce, const T* x, const Extents& of,
                Output y, DLStream stream) {
  using State = typename R::State;
  if (of.outer == 0 || of.inner == 0) return;
  const int64_t splits = Splits(of, sizeof(T));
  State* const none = nullptr;
  if (splits == 1) return RunPass(op, reduce, x, none, y, Pass{of, 1, of.n}, stream);
  const Scratch partial(ctx, of.outer * splits * of.inner * (int64_t)sizeof(State), stream);
  State* const states = (State*)partial.data();
  RunPass(op, reduce, x, states, y, Pass{of, splits, CeilDiv(of.n, splits)}, stream);
  RunPass(op, SecondPass<R>{reduce}, (const State*)states, none, y,
          Pass{{of.outer, splits, of.inner}, 1, splits}, stream);
}

}  // namespace cuda
}  // namespace dlsys
