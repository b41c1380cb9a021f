// Sums over any set of axes, and the reductions of the middle axis of x (outer, n, inner) by a
// monoid: max, min, product and logsumexp. NaN propagates.
//
// For a sum, neighboring axes fold into runs that are summed or kept; each summed run is one
// reduction, the last run first: of axis.cuh, or of columns of a large array by vectors of 16 bytes
// (two stages, in an order of the sizes alone). A sum of floats of 16 bits may be float32. Memory
// bandwidth limits it.
#include "cuda/reduce/axis.cuh"
#include "math/integers.h"
#include "math/monoids.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- monoids ----

struct ScaledSum {
  using State = float;
  static constexpr int kAccumulators = 4;
  float scale;
  __device__ State Identity(int64_t) const { return 0.f; }
  __device__ State Accumulate(State s, float x, int64_t) const { return s + x; }
  static __device__ State Combine(State a, State b) { return a + b; }
  __device__ float Result(State s) const { return scale * s; }
};

// A line of math/monoids.h.
template <class M>
struct Listed : M {
  using State = typename M::State;
  static constexpr int kAccumulators = 4;
  __device__ State Identity(int64_t) const { return M::kIdentity; }
  __device__ State Accumulate(State s, float x, int64_t) const { return M::Combine(s, M::Of(x)); }
  __device__ float Result(State s) const { return (float)s; }
};

// A line of math/integers.h, of int64.
template <class M>
struct Integer : M {
  using State = int64_t;
  static constexpr int kAccumulators = 4;
  __device__ State Identity(int64_t) const { return M::kIdentity; }
  __device__ State Accumulate(State s, int64_t x, int64_t) const { return M::Combine(s, x); }
  __device__ int64_t Result(State s) const { return s; }
};

// Online logsumexp: the running maximum and the sum of exp(x - max), rescaled where it grows. One
// pass, stable for any values.
struct MaxAndSum {
  float max, sum;
};
struct LogSumExp {
  static constexpr const char* name = "reduce_logsumexp";
  using State = MaxAndSum;
  static constexpr int kAccumulators = 1;
  __device__ State Identity(int64_t) const { return {-monoid::kInfinity, 0.f}; }
  __device__ State Accumulate(State s, float x, int64_t) const { return Combine(s, {x, 1.f}); }
  static __device__ State Combine(State a, State b) {
    if (a.max == b.max) return {a.max, a.sum + b.sum};  // also infinities, whose difference is NaN
    const bool larger = b.max > a.max || b.max != b.max;
    const State high = larger ? b : a, low = larger ? a : b;
    return {high.max, high.sum + low.sum * expf(low.max - high.max)};
  }
  __device__ float Result(State s) const { return s.max + logf(s.sum); }
};

template <class T, class R>
void Reduce(const DLArray* x, DLArray* y, DLStream stream) {
  Enter(R::name, y, x);
  const Extents of = CheckedExtents(R::name, x, y);
  ReduceAxis(R::name, y->ctx, R{}, In<T>(R::name, x), of, Out<T>(R::name, y), stream);
}

#define DLSYS_REGISTER_MONOID(Name, kernel, ...) \
  DLSYS_KERNEL_TYPED(cuda, kernel, Reduce, Listed<monoid::Name>);
DLSYS_MONOIDS(DLSYS_REGISTER_MONOID)
DLSYS_KERNEL_TYPED(cuda, reduce_logsumexp, Reduce, LogSumExp);
#define DLSYS_REGISTER_INTEGER(Name, kernel, ...) \
  DLSYS_KERNEL_OF(cuda, kernel, #kernel, DL_INT64, Reduce<int64_t, Integer<integers::Name>>);
DLSYS_INTEGER_MONOIDS(DLSYS_REGISTER_INTEGER)

// ---- sums of columns by vectors ----

constexpr int kSumVectors = 32, kSumRows = kThreads / kSumVectors;  // of a block at a time
constexpr int kSumUnroll = 4;                                       // loads of a thread in flight
constexpr int kSumBlocks = 4;  // of a multiprocessor; without the bound the loads are one by one

template <class T>
__device__ __forceinline__ void AddVector(float4 bits, float (&sums)[16 / sizeof(T)]) {
  T x[16 / sizeof(T)];
  memcpy(x, &bits, sizeof bits);
#pragma unroll
  for (int e = 0; e < 16 / (int)sizeof(T); e++) sums[e] += (float)x[e];
}

// The sums of segments of the axis, in (outer, splits, inner), or the results in y where there is
// one. A warp reads 512 bytes of a row; the warps take rows in turn and join in their order.
template <class T>
__global__ void __launch_bounds__(kThreads, kSumBlocks)
    ColumnSumsKernel(const float4* x, float* partial, float scale, Output y, Pass pass) {
  constexpr int kCount = 16 / (int)sizeof(T), kUnroll = kSumUnroll, kPitch = kSumVectors + 1;
  __shared__ float sums[kSumRows][kCount][kPitch];
  const int col = threadIdx.x % kSumVectors, row = threadIdx.x / kSumVectors;
  const int64_t vectors = pass.x.inner / kCount;
  const int64_t in_row = (vectors + kSumVectors - 1) / kSumVectors, tiles = pass.x.outer * in_row;
  for (int64_t job = blockIdx.x; job < tiles * pass.splits; job += gridDim.x) {
    const int64_t split = job / tiles, o = job % tiles / in_row;
    const int64_t first = job % in_row * kSumVectors;
    const int64_t end = first + col < vectors ? min((split + 1) * pass.length, pass.x.n) : 0;
    const float4* from = x + o * pass.x.n * vectors + first + col;
    float state[kCount] = {};
    int64_t k = split * pass.length + row;
    for (; k + (kUnroll - 1) * kSumRows < end; k += kUnroll * kSumRows) {
      float4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; u++) v[u] = from[(k + u * kSumRows) * vectors];
#pragma unroll
      for (int u = 0; u < kUnroll; u++) AddVector<T>(v[u], state);
    }
    for (; k < end; k += kSumRows) AddVector<T>(from[k * vectors], state);
    __syncthreads();  // the previous job's readers are done
#pragma unroll
    for (int e = 0; e < kCount; e++) sums[row][e][col] = state[e];
    __syncthreads();
    const int e = threadIdx.x % kCount, c = threadIdx.x / kCount;
    if (c >= kSumVectors || first + c >= vectors) continue;
    float sum = sums[0][e][c];
#pragma unroll
    for (int r = 1; r < kSumRows; r++) sum += sums[r][e][c];
    const int64_t to = (o * pass.splits + split) * pass.x.inner + (first + c) * kCount + e;
    if (partial)
      partial[to] = sum;
    else
      y.Store(to, scale * sum);
  }
}

// Columns that fill most of a warp, of an array for which the second launch is worth it.
template <class T>
bool HasVectors(const T* x, const Extents& of) {
  constexpr int64_t kFewBytes = int64_t(4) << 20, kFewRows = 128;
  const int64_t row_nbytes = of.inner * (int64_t)sizeof(T);
  return row_nbytes % 16 == 0 && row_nbytes >= 16 * kSumVectors / 2 && of.n >= kFewRows &&
         of.outer * of.n * row_nbytes >= kFewBytes && Aligned16(x);
}

// Sums the middle axis of x (outer, n, inner).
template <class T>
void SumMiddle(const char* op, DLContext ctx, const T* x, const Extents& of, float scale, Output y,
               DLStream stream) {
  if (!HasVectors(x, of)) return ReduceAxis(op, ctx, ScaledSum{scale}, x, of, y, stream);
  constexpr int64_t kWanted = kSumBlocks * 132;  // as an H100 holds at a time
  constexpr int64_t kStep = kSumUnroll * kSumRows;
  const int64_t tiles = of.outer * CeilDiv(of.inner * (int64_t)sizeof(T), 16 * kSumVectors);
  const int64_t length = CeilDiv(CeilDiv(of.n, CeilDiv(kWanted, tiles)), kStep) * kStep;
  const int64_t splits = CeilDiv(of.n, length);
  const Scratch partial(ctx, splits > 1 ? of.outer * splits * of.inner * (int64_t)sizeof(float) : 0,
                        stream);
  float* const sums = splits > 1 ? partial.floats() : nullptr;
  Launch(op, ColumnSumsKernel<T>, Blocks(tiles * splits, 1), kThreads, 0, stream, (const float4*)x,
         sums, scale, y, Pass{of, splits, length});
  if (splits > 1)
    RunPass(op, SecondPass<ScaledSum>{{scale}}, (const float*)sums, (float*)nullptr, y,
            Pass{{of.outer, splits, of.inner}, 1, splits}, stream);
}

// ---- sums over any axes ----

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

// Sums one run a pass, the last run first; intermediate sums lie in scratch, in float32 or int64,
// until the final pass writes y.
template <class T>
void SumRuns(DLContext ctx, const T* x, Runs runs, float scale, Output y, DLStream stream) {
  const int run = runs.LastSummed();
  const Extents of{runs.Product(0, run < 0 ? 0 : run), run < 0 ? 1 : runs.size[run],
                   runs.Product(run + 1, runs.count)};
  if (run >= 0) runs.Remove(run);
  const auto sum = [&](float factor, Output to) {
    if constexpr (std::is_integral_v<T>)
      ReduceAxis("reduce_sum", ctx, Integer<integers::Sum>{}, x, of, to, stream);
    else
      SumMiddle("reduce_sum", ctx, x, of, factor, to, stream);
  };
  if (runs.LastSummed() < 0) return sum(scale, y);
  using State = std::conditional_t<std::is_integral_v<T>, int64_t, float>;
  Scratch rest(ctx, of.outer * of.inner * (int64_t)sizeof(State), stream);
  State* const sums = (State*)rest.data();
  sum(1.f, sums);
  SumRuns<State>(ctx, sums, runs, scale, y, stream);
}

template <class T>
void ReduceSum(const DLArray* x, int64_t axes, float scale, DLArray* y, DLStream stream) {
  Enter("reduce_sum", y, x);
  CheckReduced("reduce_sum", x, axes, y);
  const T* from = In<T>("reduce_sum", x);
  const bool widens = kIs16Bit<T> && y->dtype == DL_FLOAT32;
  const Output to = widens ? Output(Out("reduce_sum", y)) : Output(Out<T>("reduce_sum", y));
  SumRuns(y->ctx, from, Runs(x, axes), scale, to, stream);
}

DLSYS_KERNEL_TYPED(cuda, reduce_sum, ReduceSum);
DLSYS_KERNEL_OF(cuda, reduce_sum, "reduce_sum", DL_INT64, ReduceSum<int64_t>);

}  // namespace

#define DLSYS_SUM_AXIS(T)                                                                          \
  void SumAxis(const char* op, DLContext ctx, const T* x, int64_t outer, int64_t n, int64_t inner, \
               float scale, Output y, DLStream stream) {                                           \
    SumMiddle(op, ctx, x, Extents{outer, n, inner}, scale, y, stream);                             \
  }
DLSYS_SUM_AXIS(float)
DLSYS_SUM_AXIS(bfloat16)
DLSYS_SUM_AXIS(float16)
#undef DLSYS_SUM_AXIS

}  // namespace cuda
}  // namespace dlsys
