// Sums over any set of axes, and the reductions of the middle axis of x (outer, n, inner) by a
// monoid: max, min, product and logsumexp. NaN propagates.
//
// For a sum, neighboring axes fold into runs that are summed or kept; each summed run is one
// reduction (axis.cuh), the last run first. A sum of floats of 16 bits may be float32.
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

struct IntegerSum : Integer<integers::Sum> {
  explicit IntegerSum(float) {}
};

// Sums one run a pass, the last run first; intermediate sums lie in scratch, in float32 or int64,
// until the final pass writes y.
template <class T>
void SumRuns(DLContext ctx, const T* x, Runs runs, float scale, Output y, DLStream stream) {
  const int run = runs.LastSummed();
  const Extents of{runs.Product(0, run < 0 ? 0 : run), run < 0 ? 1 : runs.size[run],
                   runs.Product(run + 1, runs.count)};
  if (run >= 0) runs.Remove(run);
  using Sum = std::conditional_t<std::is_integral_v<T>, IntegerSum, ScaledSum>;
  using State = typename Sum::State;
  if (runs.LastSummed() < 0) return ReduceAxis("reduce_sum", ctx, Sum{scale}, x, of, y, stream);
  Scratch rest(ctx, of.outer * of.inner * (int64_t)sizeof(State), stream);
  State* const sums = (State*)rest.data();
  ReduceAxis("reduce_sum", ctx, Sum{1.f}, x, of, sums, stream);
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

void SumAxis(const char* op, DLContext ctx, const float* x, int64_t outer, int64_t n, int64_t inner,
             float scale, Output y, DLStream stream) {
  ReduceAxis(op, ctx, ScaledSum{scale}, x, Extents{outer, n, inner}, y, stream);
}

}  // namespace cuda
}  // namespace dlsys
