// Reductions by a monoid along the middle axis of x (outer, n, inner) -> y (outer, inner): max,
// min, product, logsumexp, argmax and argmin; and the mask of the first element that equals its
// extreme.
//
// A block reduces kCols columns with kRows threads each; neighboring threads take neighboring
// elements, and the threads of a column combine by a tree in shared memory. A long axis is split
// over blocks, whose partial results go to scratch and are reduced by a second launch: a fixed
// tree, without atomics. Outputs never overlap inputs. NaN propagates. Memory bandwidth limits it.
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// One pass: axis n in `splits` segments of `length` elements, results (outer, splits, inner).
struct Pass {
  int64_t outer, n, inner;
  int64_t splits, length;
};

constexpr float kInfinity = __builtin_inff();

// ---- monoids: Identity, Accumulate an element, Combine two states, Store the result ----

// The larger (or smaller) of two, NaN where one is NaN.

template <bool kMax>
__device__ __forceinline__ float Extreme(float a, float b) {
  return (kMax ? b > a : b < a) || b != b ? b : a;
}

template <bool kMax>
struct ExtremeMonoid {
  using Input = float;
  using State = float;
  using Output = float;
  float* y;
  __device__ State Identity(int64_t) const { return kMax ? -kInfinity : kInfinity; }
  __device__ void Accumulate(State* s, float x, int64_t) const { *s = Extreme<kMax>(*s, x); }
  __device__ void Combine(State* s, State other) const { *s = Extreme<kMax>(*s, other); }
  __device__ void Store(int64_t at, State s) const { y[at] = s; }
};

// Double, since rounding errors accumulate and an intermediate product may overflow float32.
template <class In, class Out>
struct ProdMonoid {
  using Input = In;
  using State = double;
  using Output = Out;
  Out* y;
  __device__ State Identity(int64_t) const { return 1.0; }
  __device__ void Accumulate(State* s, In x, int64_t) const { *s *= x; }
  __device__ void Combine(State* s, State other) const { *s *= other; }
  __device__ void Store(int64_t at, State s) const { y[at] = (Out)s; }
};

// Online logsumexp: the running maximum and the sum of exp(x - max), rescaled where it grows. One
// pass, stable for any values.
struct ScaledSum {
  float max, sum;
};
struct LogSumExpMonoid {
  using Input = float;
  using State = ScaledSum;
  using Output = float;
  float* y;
  __device__ State Identity(int64_t) const { return {-kInfinity, 0.f}; }
  __device__ void Accumulate(State* s, float x, int64_t) const { Combine(s, {x, 1.f}); }
  __device__ void Combine(State* s, State other) const {
    if (s->max == other.max) {  // also equal infinities, whose difference is NaN
      s->sum += other.sum;
      return;
    }
    const bool larger = other.max > s->max || other.max != other.max;
    const State high = larger ? other : *s, low = larger ? *s : other;
    *s = {high.max, high.sum + low.sum * expf(low.max - high.max)};
  }
  __device__ void Store(int64_t at, State s) const { y[at] = s.max + logf(s.sum); }
};

// The first of the largest or smallest elements, where NaN precedes every value. Index -1 is the
// identity.
template <class T>
struct Indexed {
  T value;
  int64_t index;
};
template <bool kMax, class T>
struct ArgMonoid {
  using Input = T;
  using State = Indexed<T>;
  int64_t* y;
  __device__ State Identity(int64_t) const { return {T(0), -1}; }
  __device__ void Accumulate(State* s, T x, int64_t index) const { Combine(s, {x, index}); }
  __device__ void Combine(State* s, State other) const {
    if (other.index < 0) return;
    const bool nan = s->value != s->value, other_nan = other.value != other.value;
    bool better = kMax ? other.value > s->value : other.value < s->value;
    if (nan || other_nan) better = other_nan && !nan;
    const bool equal = other.value == s->value || (nan && other_nan);
    if (s->index < 0 || better || (equal && other.index < s->index)) *s = other;
  }
  __device__ void Store(int64_t at, State s) const { y[at] = s.index; }
};

// The first element that equals the column's `target`; -1 where there is none.
struct FirstMatchMonoid {
  using Input = float;
  using State = Indexed<float>;
  const float* target;
  int64_t* y;
  __device__ State Identity(int64_t column) const { return {target[column], -1}; }
  __device__ void Accumulate(State* s, float x, int64_t index) const {
    if (s->index < 0 && (x == s->value || (x != x && s->value != s->value))) s->index = index;
  }
  __device__ void Combine(State* s, State other) const {
    if (other.index >= 0 && (s->index < 0 || other.index < s->index)) s->index = other.index;
  }
  __device__ void Store(int64_t at, State s) const { y[at] = s.index; }
};

// ---- kernels ----

// x (outer, n, inner) -> (outer, splits, inner), kCols columns a block and kRows threads a column.
template <class R, int kCols, int kRows>
__global__ void __launch_bounds__(kThreads)
    ReduceKernel(const typename R::Input* x, Pass pass, R reduce) {
  using State = typename R::State;
  __shared__ State states[kRows][kCols];
  const int row = (int)threadIdx.x / kCols;
  const int col = (int)threadIdx.x % kCols;
  const int64_t columns = pass.outer * pass.inner;
  const int64_t tiles = (columns + kCols - 1) / kCols;
  // The bound is uniform over the block, as its barriers require.
  for (int64_t job = blockIdx.x; job < tiles * pass.splits; job += gridDim.x) {
    const int64_t split = job / tiles;
    const int64_t column = (job - split * tiles) * kCols + col;
    const bool inside = column < columns;
    const int64_t o = inside ? column / pass.inner : 0;
    const int64_t i = inside ? column - o * pass.inner : 0;
    const int64_t begin = split * pass.length;
    const int64_t end = min(begin + pass.length, pass.n);
    State state = reduce.Identity(inside ? column : 0);
    const typename R::Input* from = x + o * pass.n * pass.inner + i;
    if (inside)
      for (int64_t r = begin + row; r < end; r += kRows)
        reduce.Accumulate(&state, from[r * pass.inner], r);
    if constexpr (kRows > 1) {
      states[row][col] = state;
      __syncthreads();
#pragma unroll
      for (int half = kRows / 2; half > 0; half /= 2) {
        if (row < half) reduce.Combine(&states[row][col], states[row + half][col]);
        __syncthreads();
      }
      state = states[row][col];  // only row 0 uses it
    }
    if (row == 0 && inside) reduce.Store((o * pass.splits + split) * pass.inner + i, state);
  }
}

// mask (outer, n, inner): 1 at the position that `first` (outer, inner) holds.
__global__ void MaskKernel(const int64_t* first, uint8_t* mask, int64_t total, int64_t n,
                           int64_t inner) {
  for (int64_t k = FirstItem(); k < total; k += ItemStep()) {
    const int64_t line = k / inner;
    const int64_t o = line / n;
    mask[k] = first[o * inner + (k - line * inner)] == line - o * n;
  }
}

// ---- launchers ----

constexpr int64_t kManyColumns = int64_t(1) << 16;
constexpr int64_t kFewRows = 32;

template <class R, int kCols, int kRows>
void LaunchReduce(const char* op, const typename R::Input* x, const Pass& pass, const R& reduce,
                  DLStream stream) {
  const int64_t jobs = CeilDiv(pass.outer * pass.inner, kCols) * pass.splits;
  Launch(op, ReduceKernel<R, kCols, kRows>, Blocks(jobs, 1), kCols * kRows, 0, stream, x, pass,
         reduce);
}

// One thread a column where there are enough columns or few rows; row-wise blocks where inner == 1;
// strips of 32 columns otherwise.
template <class R>
void Run(const char* op, const typename R::Input* x, const Pass& pass, const R& reduce,
         DLStream stream) {
  if (pass.length <= kFewRows || (pass.inner > 1 && pass.outer * pass.inner >= kManyColumns))
    return LaunchReduce<R, kThreads, 1>(op, x, pass, reduce, stream);
  if (pass.inner > 1) return LaunchReduce<R, 32, 8>(op, x, pass, reduce, stream);
  if (pass.length <= 1024) return LaunchReduce<R, 8, 32>(op, x, pass, reduce, stream);
  LaunchReduce<R, 1, kThreads>(op, x, pass, reduce, stream);
}

// Checks x (outer, n, inner) against a result of shape (outer, inner), or of x's shape.
Pass CheckedPass(const char* op, const DLArray* x, const DLArray* y, bool keeps_shape = false) {
  bool fits = x->ndim == 3 && y->ndim == (keeps_shape ? 3 : 2);
  fits = fits && y->shape[0] == x->shape[0] && y->shape[y->ndim - 1] == x->shape[2];
  if (!fits || (keeps_shape && y->shape[1] != x->shape[1]))
    Fail("%s: %s does not reduce to %s: expected (outer, n, inner) and %s", op,
         ShapeText(x).c_str(), ShapeText(y).c_str(), keeps_shape ? "the same" : "(outer, inner)");
  return {x->shape[0], x->shape[1], x->shape[2], 1, x->shape[1]};
}

// Segments of the axis: enough to fill the GPU when there are few columns, none shorter than is
// worth a block.
int64_t Splits(const Pass& pass) {
  const int64_t tiles = CeilDiv(pass.outer * pass.inner, pass.inner > 1 ? 32 : 1);
  const int64_t most = pass.n / 4096, wanted = CeilDiv(2048, tiles);
  const int64_t splits = most < wanted ? most : wanted;
  return splits > 1 ? splits : 1;
}

// R reduces in a single pass. In two passes First reduces segments to partial results, which Last
// reduces.
template <class R, class First = R, class Last = R>
void Reduce(const char* op, const DLArray* x, DLArray* y, DLStream stream) {
  Enter(op, y, x);
  Pass pass = CheckedPass(op, x, y);
  const float* in = In(op, x);
  float* out = Out(op, y);
  if (Numel(y) == 0) return;
  const int64_t splits = Splits(pass);
  if (splits == 1) return Run(op, in, pass, R{out}, stream);
  pass.splits = splits;
  pass.length = CeilDiv(pass.n, splits);
  using Partial = typename First::Output;
  const int64_t count = pass.outer * splits * pass.inner;
  const Scratch partial(y->ctx, count * (int64_t)sizeof(Partial), stream);
  Partial* partials = (Partial*)partial.data();
  Run(op, in, pass, First{partials}, stream);
  const Pass last{pass.outer, splits, pass.inner, 1, splits};
  Run(op, (const Partial*)partials, last, Last{out}, stream);
}

void ReduceMax(const DLArray* x, DLArray* y, DLStream stream) {
  Reduce<ExtremeMonoid<true>>("reduce_max", x, y, stream);
}
void ReduceMin(const DLArray* x, DLArray* y, DLStream stream) {
  Reduce<ExtremeMonoid<false>>("reduce_min", x, y, stream);
}
void ReduceProd(const DLArray* x, DLArray* y, DLStream stream) {
  Reduce<ProdMonoid<float, float>, ProdMonoid<float, double>, ProdMonoid<double, float>>(
      "reduce_prod", x, y, stream);
}
void ReduceLogSumExp(const DLArray* x, DLArray* y, DLStream stream) {
  Reduce<LogSumExpMonoid>("reduce_logsumexp", x, y, stream);
}

template <bool kMax>
void Arg(const DLArray* x, DLArray* y, DLStream stream) {
  const char* op = kMax ? "argmax" : "argmin";
  Enter(op, y, x);
  const Pass pass = CheckedPass(op, x, y);
  if (y->dtype != DL_INT64) Fail("%s: expected int64, got %s", op, DtypeText(y->dtype));
  if (Numel(y) == 0) return;
  if (pass.n == 0) Fail("%s: shape %s has no elements to choose from", op, ShapeText(x).c_str());
  int64_t* out = (int64_t*)y->data;
  switch (x->dtype) {
    case DL_FLOAT32:
      return Run(op, (const float*)x->data, pass, ArgMonoid<kMax, float>{out}, stream);
    case DL_INT32:
      return Run(op, (const int32_t*)x->data, pass, ArgMonoid<kMax, int32_t>{out}, stream);
    case DL_INT64:
      return Run(op, (const int64_t*)x->data, pass, ArgMonoid<kMax, int64_t>{out}, stream);
    case DL_UINT8:
    case DL_BOOL:
      return Run(op, (const uint8_t*)x->data, pass, ArgMonoid<kMax, uint8_t>{out}, stream);
  }
  Fail("%s: does not take %s", op, DtypeText(x->dtype));
}

void FirstMatch(const DLArray* x, const DLArray* y, DLArray* mask, DLStream stream) {
  const char* op = "first_match";
  Enter(op, mask, x, y);
  const Pass pass = CheckedPass(op, x, y);
  CheckedPass(op, x, mask, true);
  if (mask->dtype != DL_BOOL) Fail("%s: expected bool, got %s", op, DtypeText(mask->dtype));
  const float* in = In(op, x);
  const float* target = In(op, y);
  const int64_t total = Numel(mask);
  if (total == 0) return;
  const Scratch first(mask->ctx, Numel(y) * (int64_t)sizeof(int64_t), stream);
  Run(op, in, pass, FirstMatchMonoid{target, (int64_t*)first.data()}, stream);
  Launch(op, MaskKernel, Blocks(total), kThreads, 0, stream, (const int64_t*)first.data(),
         (uint8_t*)mask->data, total, pass.n, pass.inner);
}

DLSYS_KERNEL(cuda, reduce_max, ReduceMax);
DLSYS_KERNEL(cuda, reduce_min, ReduceMin);
DLSYS_KERNEL(cuda, reduce_prod, ReduceProd);
DLSYS_KERNEL(cuda, reduce_logsumexp, ReduceLogSumExp);
DLSYS_KERNEL(cuda, argmax, Arg<true>);
DLSYS_KERNEL(cuda, argmin, Arg<false>);
DLSYS_KERNEL(cuda, first_match, FirstMatch);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
