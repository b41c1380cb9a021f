// Draws a token from each row of logits (rows, n): of softmax(logits / temperature), where only the
// `top_k` largest count, and of those the fewest that reach `top_p` together (nucleus sampling,
// Holtzman et al., 2020). A block holds a row's weights exp((logit - largest) / temperature) in
// shared memory, or in scratch where they do not fit. Both limits are found by bisection over the
// bits of a weight, which as integers have the order of the floats; among equals the first count.
// The draw inverts the distribution in the order of tokens. Sums are float64 in a fixed order.
// Settings and the step are read from device memory, so that a captured program serves all.
// Bandwidth of one multiprocessor's shared memory limits it.
#include "cuda/reduce/group.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/indexing.h"
#include "operators/token.h"
#include "runtime/workspace.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kBlock = 1024;

struct Draw {
  const float *logits, *settings;  // (rows, n); temperature, top_k, top_p
  const int64_t *seed, *step;
  int64_t* tokens;
  float* scratch;  // (rows, n), or null
  int n;
};

struct Share {
  double mass;
  int64_t count;
};
struct ShareMonoid {
  static __device__ Share Combine(Share a, Share b) { return {a.mass + b.mass, a.count + b.count}; }
};

struct LargestMonoid {
  static __device__ int Combine(int a, int b) { return a > b ? a : b; }
};

// The weights of a row; a thread owns a run of neighbors, of an odd length against bank conflicts.
struct Row {
  float* weights;
  int n, begin, end;

  __device__ Row(float* weights, int n) : weights(weights), n(n) {
    const int each = ((n + kBlock - 1) / kBlock) | 1;
    begin = min((int)threadIdx.x * each, n), end = min(begin + each, n);
  }

  // Of the weights whose bits are at least `least`.
  __device__ Share From(unsigned least) const {
    Share share = {0., 0};
    for (int i = begin; i < end; i++) {
      const float weight = weights[i];
      if (__float_as_uint(weight) < least) continue;
      share.mass += weight, share.count++;
    }
    return GroupReduce<ShareMonoid, kBlock>(share);
  }
};

// The sums over the threads up to and with each one, for all threads, and their total.
template <class T>
__device__ T InclusiveSum(T value, T* total) {
  __shared__ T warps[kBlock / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += before;
  }
  __syncthreads();  // the previous call's readers are done
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  T before = 0, all = 0;
  for (int k = 0; k < kBlock / 32; k++) {
    if (k == warp) before = all;
    all += warps[k];
  }
  *total = all;
  return before + value;
}

// Makes zeros of the weights behind the first that reach `limit` in falling order: of their count,
// or with `by_mass` of their sum.
__device__ void Cut(const Row& row, bool by_mass, double limit) {
  const auto reaches = [&](const Share& share) {
    return (by_mass ? share.mass : (double)share.count) >= limit;
  };
  unsigned least = 0;
  int64_t counted = row.n, above = 0;
  for (int bit = 29; bit >= 0 && counted > above + 1; bit--) {  // weights are at most 1
    const Share share = row.From(least | 1u << bit);
    if (reaches(share))
      least |= 1u << bit, counted = share.count;
    else
      above = share.count;
  }
  // The last weight that counts is between `least` and the weights above; it may have equals.
  unsigned last = 0xffffffffu;
  if (counted > above + 1) {
    last = least;
    const Share share = row.From(least + 1);
    const double each = by_mass ? (double)__uint_as_float(least) : 1.;
    const double missing = limit - (by_mass ? share.mass : (double)share.count);
    above = each > 0. ? (int64_t)ceil(missing / each) : 0;  // how many of the equals count
    if (above < 1) above = 1;
  }
  int64_t equals = 0, total;
  for (int i = row.begin; i < row.end; i++) equals += __float_as_uint(row.weights[i]) == last;
  equals = InclusiveSum(equals, &total) - equals;
  for (int i = row.begin; i < row.end; i++) {
    const unsigned bits = __float_as_uint(row.weights[i]);
    if (bits < least || (bits == last && equals++ >= above)) row.weights[i] = 0.f;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kBlock) TokenKernel(const Draw p) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const float* logits = p.logits + (int64_t)blockIdx.x * p.n;
  const float temperature = p.settings[0], top_p = p.settings[2];
  const double top_k = temperature == 0.f ? 1. : (double)p.settings[1];
  const float inverse = temperature == 0.f ? 1.f : 1.f / temperature;
  const Row row(p.scratch ? p.scratch + (int64_t)blockIdx.x * p.n : DynamicShared<float>(), p.n);
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < p.n; i += kBlock) largest = fmaxf(largest, logits[i]);
  largest = GroupReduce<MaxMonoid, kBlock>(largest);
  for (int i = threadIdx.x; i < p.n; i += kBlock)
    row.weights[i] = expf((logits[i] - largest) * inverse);
  __syncthreads();
  if (top_k >= 1. && top_k < p.n) Cut(row, false, top_k);
  if (top_p < 1.f) Cut(row, true, (double)top_p * row.From(0).mass);

  double own = 0., total;
  int own_last = -1;
  for (int i = row.begin; i < row.end; i++) {
    own += row.weights[i];
    if (row.weights[i] > 0.f) own_last = i;
  }
  const double up_to = InclusiveSum(own, &total);
  const double number = NumberOfRow(*p.seed, *p.step, blockIdx.x) * total;
  // The first thread beyond the number draws; where rounding leaves none, the last that can.
  const int thread = threadIdx.x;
  const int last = GroupReduce<LargestMonoid, kBlock>(own_last >= 0 ? thread : 0);
  const int first =
      -GroupReduce<LargestMonoid, kBlock>(own > 0. && up_to > number ? -thread : -last);
  if (thread != first) return;
  if (own_last < 0) p.tokens[blockIdx.x] = 0;  // of logits that are NaN
  double sum = up_to - own;
  for (int i = row.begin; i <= own_last; i++) {
    sum += row.weights[i];
    if (row.weights[i] > 0.f && (sum > number || i == own_last)) {
      p.tokens[blockIdx.x] = i;
      return;
    }
  }
}

void DrawToken(const DLArray* logits, const DLArray* settings, const DLArray* seed,
               const DLArray* step, DLArray* tokens, DLStream stream) {
  const char* op = "draw_token";
  Enter(op, tokens, logits, settings, seed, step);
  CheckScalar(op, "seed", seed, DL_INT64);
  CheckScalar(op, "step", step, DL_INT64);
  if (logits->ndim != 2 || Numel(settings) != 3 || Numel(tokens) != logits->shape[0])
    Fail("%s: expected logits of rows and 3 settings, got %s and %s", op, ShapeText(logits).c_str(),
         ShapeText(settings).c_str());
  const int64_t rows = logits->shape[0], n = logits->shape[1];
  if (n < 1 || n > INT32_MAX / 2) Fail("%s: expected tokens, got %ld", op, (long)n);
  const int device = tokens->ctx.device_id;
  const size_t nbytes = n * sizeof(float);
  const bool fits = nbytes + (4 << 10) <= SharedLimit(device);
  const Scratch scratch(tokens->ctx, fits ? 0 : rows * (int64_t)nbytes, stream);
  const Draw draw{In(op, logits),
                  In(op, settings),
                  In<int64_t>(op, seed),
                  In<int64_t>(op, step),
                  Out<int64_t>(op, tokens),
                  fits ? nullptr : scratch.floats(),
                  (int)n};
  LaunchClusters(op, TokenKernel, (unsigned)rows, 1, kBlock, fits ? nbytes : 0,
                 ComputeMajor(device) >= 9, stream, draw);
}

DLSYS_KERNEL(cuda, draw_token, DrawToken);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
