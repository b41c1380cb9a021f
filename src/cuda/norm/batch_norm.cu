// Batch normalization forward, over x (N, C, ...) seen as (outer, channels, inner): statistics, the
// affine map (with an activation and a residual addend), and running statistics.
//
// Statistics read x once. A thread sums deviations from its first element and their squares
// (shifted data, which keeps the digits for any mean); threads, blocks and partial moments combine
// by the parallel variance formula of Chan, Golub and LeVeque (1979), in a fixed order. Given
// arrival counters, the last block to arrive at a tile of channels combines its partial moments
// (single-pass reduction); otherwise a second launch does. The output of a map may be one of its
// inputs. Memory bandwidth limits both kernels. The tiling is in batch_norm_tile.cuh.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/norm/batch_norm_tile.cuh"
#include "cuda/norm/norm.cuh"
#include "cuda/runtime/lists.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Partial means are relative to the first element of their channel.
template <class T>
struct MomentsOp {
  const T* x;
  float* means;    // (parts, channels)
  float* squares;  // (parts, channels), the sums of (x - mean)^2
  float* mean;     // (channels)
  float* variance;

  template <int kVector>
  __device__ void Partial(const Channels& shape, const ChannelTiling& tiling, int64_t part,
                          int64_t tile) const {
    __shared__ TileSums sums, spread;
    TileIterator<kVector> it(shape, tiling, part, tile);
    const float count = (float)it.count;
    Vec<kVector> first = {}, sum = {}, square = {};
    if (it.count > 0) first = Read<kVector>(x + it.at);
    it.template ForEach<4>([&](int64_t, int64_t at) { return Read<kVector>(x + at); },
                           [&](const Vec<kVector>& u, int64_t) {
#pragma unroll
                             for (int e = 0; e < kVector; e++) {
                               const float d = u.v[e] - first.v[e];
                               sum.v[e] += d;
                               square.v[e] = fmaf(d, d, square.v[e]);
                             }
                           });
    float thread_sum[kVector] = {}, offset[kVector] = {};
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      if (it.count == 0) continue;
      offset[e] = first.v[e] - (float)x[it.c[e] * shape.inner];
      thread_sum[e] = fmaf(count, offset[e], sum.v[e]);
    }
    ReduceVecs(shape, tiling, thread_sum, &sums);
    const float all = (float)tiling.PerChannel(part);
    const int64_t begin = tile * tiling.width;
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      if (it.count == 0) continue;
      const float m = sum.v[e] / count;
      const float shift = offset[e] + m - sums.of[it.c[e] - begin] / all;
      thread_sum[e] = fmaf(count * shift, shift, fmaf(-m, sum.v[e], square.v[e]));
    }
    ReduceVecs(shape, tiling, thread_sum, &spread);
    const int64_t c = begin + threadIdx.x;
    if (threadIdx.x >= tiling.width || c >= shape.count) return;
    means[part * shape.count + c] = all > 0.f ? sums.of[threadIdx.x] / all : 0.f;
    squares[part * shape.count + c] = spread.of[threadIdx.x];
  }

  __device__ void Totals(const Channels& shape, const ChannelTiling& tiling, int64_t tile) const {
    __shared__ TileSums sums, spread;
    const float total = (float)shape.PerChannel();
    ReduceParts(
        shape, tiling, tile,
        [&](int64_t p, int64_t c, int) {
          return (float)tiling.PerChannel(p) * __ldcg(means + p * shape.count + c);
        },
        &sums);
    ReduceParts(
        shape, tiling, tile,
        [&](int64_t p, int64_t c, int w) {
          const float shift = __ldcg(means + p * shape.count + c) - sums.of[w] / total;
          return fmaf((float)tiling.PerChannel(p) * shift, shift,
                      __ldcg(squares + p * shape.count + c));
        },
        &spread);
    const int64_t c = tile * tiling.width + threadIdx.x;
    if (threadIdx.x >= tiling.width || c >= shape.count) return;
    const float first = total > 0.f ? (float)x[c * shape.inner] : 0.f;
    mean[c] = first + sums.of[threadIdx.x] / total;  // NaN without values
    variance[c] = spread.of[threadIdx.x] / total;
  }
};

struct NoActivation {
  __device__ __forceinline__ float operator()(float x) const { return x; }
};
struct RuntimeActivation {
  int activation;
  __device__ __forceinline__ float operator()(float x) const {
    return ApplyActivation(activation, 0, 0.f, x);
  }
};

// y = activation(normalized x [+ addend])
template <class T, class Activation, bool kAdds>
struct NormalizeOp {
  const T* x;
  const T* addend;
  T* y;
  BatchMoments moments;
  ChannelFloats<T> scale;
  ChannelFloats<T> bias;
  Activation activation;

  template <int kVector>
  __device__ void Map(TileIterator<kVector>& it) const {
    struct Loaded {
      Vec<kVector> x, addend;
    };
    Affine affine[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      const int64_t c = it.c[e];
      affine[e] =
          e > 0 && c == it.c[e - 1] ? affine[e - 1] : AffineOf(moments.Of(c), scale[c], bias[c]);
    }
    it.template ForEach<kAdds ? 2 : 4>(
        [&](int64_t, int64_t at) {
          Loaded loaded;
          loaded.x = ReadLast<kVector>(x + at);
          if constexpr (kAdds) loaded.addend = ReadLast<kVector>(addend + at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          Vec<kVector> out;
#pragma unroll
          for (int e = 0; e < kVector; e++) {
            float v = affine[e](loaded.x.v[e]);
            if constexpr (kAdds) v = __fadd_rn(v, loaded.addend.v[e]);
            out.v[e] = activation(v);
          }
          Write(y + at, out);
        });
  }
};

struct Running {
  float* mean;  // (channels), as are the others
  float* variance;
  const float* new_mean;
  const float* new_variance;
  int64_t channels;
};
constexpr int kLayers = 64;  // at most, in a launch
struct RunningTable {
  Running layer[kLayers];
};

// An exponential moving average. A weight of zero drops its term even where the term is NaN or
// infinite.
__device__ __forceinline__ float MovingAverage(float keep, float old, float by, float batch) {
  if (by == 0.f) return old;
  return keep == 0.f ? by * batch : keep * old + by * batch;
}

// A block updates the statistics of one layer.
__global__ void RunningKernel(const __grid_constant__ RunningTable table, float keep, float by_mean,
                              float by_variance) {
  const Running& of = table.layer[blockIdx.x];
  GridDependencySynchronize();
  for (int64_t c = threadIdx.x; c < of.channels; c += kThreads) {
    of.mean[c] = MovingAverage(keep, of.mean[c], by_mean, of.new_mean[c]);
    of.variance[c] = MovingAverage(keep, of.variance[c], by_variance, of.new_variance[c]);
  }
}

// ---- launchers ----

template <class T>
void RunStatistics(const char* op, const DLArray* x, unsigned* arrived, DLArray* mean,
                   DLArray* variance, const Channels& shape, DLStream stream) {
  const T* in = In<T>(op, x);
  const ChannelTiling tiling = ChannelTiling::OfSums(shape, Aligned16(in));
  const int64_t partials = tiling.parts * shape.count;
  const Scratch scratch(x->ctx, 2 * partials * (int64_t)sizeof(float), stream);
  const MomentsOp<T> body{in, scratch.floats(), scratch.floats() + partials,
                          ChannelResult(op, mean, shape.count),
                          ChannelResult(op, variance, shape.count)};
  RunSumsOf(op, x->ctx, shape, tiling, body, arrived, stream);
}

template <class T>
void BatchStatistics(const DLArray* x, DLArray* mean, DLArray* variance, DLStream stream) {
  const char* op = "batch_statistics";
  Enter(op, x, mean, variance);
  RunStatistics<T>(op, x, nullptr, mean, variance, ChannelsOf(op, x), stream);
}

template <class T>
void BatchStatisticsSinglePass(const DLArray* x, const DLArray* counters, DLArray* mean,
                               DLArray* variance, DLStream stream) {
  const char* op = "batch_statistics_single_pass";
  Enter(op, x, counters, mean, variance);
  const Channels shape = ChannelsOf(op, x);
  RunStatistics<T>(op, x, CheckedCounters(op, counters, shape.count), mean, variance, shape,
                   stream);
}

// addend may be null.
template <class T>
void RunNormalize(const char* op, const DLArray* x, const DLArray* mean, const DLArray* variance,
                  const DLArray* scale, const DLArray* bias, const DLArray* addend, float eps,
                  int activation, DLArray* y, DLStream stream) {
  CheckSameShape(op, x, y);
  if (addend) CheckSameShape(op, x, addend);
  const Channels shape = ChannelsOf(op, x);
  const T* in = In<T>(op, x);
  const T* added = addend ? In<T>(op, addend) : nullptr;
  T* out = Out<T>(op, y);
  const BatchMoments moments = MomentsOf(op, mean, variance, shape.count, eps);
  const auto scales = ChannelFloatsOf<T>(op, scale, shape.count);
  const auto biases = ChannelFloatsOf<T>(op, bias, shape.count);
  const bool aligned = Aligned16(in) && Aligned16(added) && Aligned16(out);
  const auto run = [&](auto act) {
    using Activation = decltype(act);
    const auto map = [&](auto body) { RunMap(op, x->ctx, shape, aligned, body, stream); };
    if (added)
      map(NormalizeOp<T, Activation, true>{in, added, out, moments, scales, biases, act});
    else
      map(NormalizeOp<T, Activation, false>{in, added, out, moments, scales, biases, act});
  };
  if (activation == 0) return run(NoActivation{});
  if (activation == 1) return run(fn::Relu{});
  run(RuntimeActivation{activation});
}

template <class T>
void BatchNormalize(const DLArray* x, const DLArray* mean, const DLArray* variance,
                    const DLArray* scale, const DLArray* bias, float eps, DLArray* y,
                    DLStream stream) {
  const char* op = "batch_normalize";
  Enter(op, x, mean, variance, scale, bias, y);
  RunNormalize<T>(op, x, mean, variance, scale, bias, nullptr, eps, 0, y, stream);
}

// y = activation(normalized x [+ addend]); activation 0 is the identity.
template <class T>
void BatchNormalizeMap(const DLArray* x, const DLArray* mean, const DLArray* variance,
                       const DLArray* scale, const DLArray* bias, const DLArrayList* addends,
                       float eps, int64_t activation, DLArray* y, DLStream stream) {
  const char* op = "batch_normalize_map";
  Enter(op, x, mean, variance, scale, bias, y);
  if (addends->count > 1) Fail("%s: expected one addend or none", op);
  const DLArray* addend = addends->count ? addends->arrays[0] : nullptr;
  if (addend) Enter(op, x, addend);
  RunNormalize<T>(op, x, mean, variance, scale, bias, addend, eps,
                  CheckedEpilogue(op, activation, 0, kActivations), y, stream);
}

// mean = keep * mean + by_mean * batch mean, and likewise the variance, for layers that share these
// weights: states has all means, then all variances, and batch those of this batch, in that order.
void RunningUpdate(DLArrayList* states, const DLArrayList* batch, float keep, float by_mean,
                   float by_variance, DLStream stream) {
  const char* op = "running_update";
  EnterAll(op, {states, batch});
  const int64_t layers = states->count / 2;
  if (states->count != batch->count || states->count % 2 || !layers)
    Fail("%s: expected batch means and variances for %ld states, got %ld", op, (long)states->count,
         (long)batch->count);
  for (int64_t first = 0; first < layers; first += kLayers) {
    RunningTable table;
    const int64_t count = std::min<int64_t>(kLayers, layers - first);
    for (int64_t k = 0; k < count; k++) {
      DLArray* const* mean = states->arrays + first + k;
      DLArray* const* new_mean = batch->arrays + first + k;
      const int64_t n = Numel(*mean);
      table.layer[k] = {Out(op, *mean), ChannelResult(op, mean[layers], n),
                        PerChannel(op, *new_mean, n), PerChannel(op, new_mean[layers], n), n};
    }
    const DLContext ctx = states->arrays[0]->ctx;
    LaunchClusters(op, RunningKernel, (unsigned)count, 1, kThreads, 0,
                   ComputeMajor(ctx.device_id) >= 9, stream, table, keep, by_mean, by_variance);
  }
}

DLSYS_KERNEL_TYPED(cuda, batch_statistics, BatchStatistics);
DLSYS_KERNEL_TYPED(cuda, batch_statistics_single_pass, BatchStatisticsSinglePass);
DLSYS_KERNEL_TYPED(cuda, batch_normalize, BatchNormalize);
DLSYS_KERNEL_TYPED(cuda, batch_normalize_map, BatchNormalizeMap);
DLSYS_KERNEL(cuda, running_update, RunningUpdate);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
