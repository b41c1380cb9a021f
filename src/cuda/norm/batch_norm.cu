// Batch normalization forward, over x (N, C, ...) seen as (outer, channels, inner): statistics, the
// affine map (with an activation and a residual addend), and running statistics.
//
// Statistics read x once. A thread sums deviations from its first element and their squares in
// float32 (shifted data, which keeps the digits for any mean); threads and blocks combine them, as
// deviations from the first element of the channel, in double precision and in a fixed order. Given
// arrival counters, the last block to arrive at a tile of channels combines its partial sums
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

// The sums of deviations from the first element of a channel, and of their squares.
template <class T>
struct MomentsOp {
  using Sum = double;
  const T* x;
  float* mean;  // (channels)
  float* variance;

  template <int kVector>
  __device__ __forceinline__ void Add(const Channels& shape, TileIterator<kVector>& it,
                                      double (&sums)[kVector], double (&squares)[kVector]) const {
    const int64_t own = it.OwnChannel();
    const float own_origin = own >= 0 && shape.Numel() > 0 ? (float)x[own * shape.inner] : 0.f;
    const double count = it.count;
    float first[kVector] = {}, sum[kVector] = {}, square[kVector] = {}, origin[kVector];
    if (it.count > 0) {
      const Vec<T, kVector> u = Read<kVector>(x + it.at);
#pragma unroll
      for (int e = 0; e < kVector; e++) first[e] = u[e];
    }
    it.template ForEach<8>([&](int64_t, int64_t at) { return Read<kVector>(x + at); },
                           [&](const Vec<T, kVector>& u, int64_t) {
#pragma unroll
                             for (int e = 0; e < kVector; e++) {
                               const float d = u[e] - first[e];
                               sum[e] += d;
                               square[e] = fmaf(d, d, square[e]);
                             }
                           });
    it.OfChannels([&](int64_t) { return own_origin; }, origin);
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      const double shift = it.count > 0 ? (double)first[e] - origin[e] : 0.;
      sums[e] = sum[e] + count * shift;
      squares[e] = square[e] + shift * (2. * sum[e] + count * shift);
    }
  }

  __device__ void Finish(const Channels& shape, int64_t c, double sum, double square) const {
    const double count = (double)shape.PerChannel();
    const double shift = sum / count;  // NaN without values
    const double spread = square / count - shift * shift;
    mean[c] = (float)((count > 0. ? (double)x[c * shape.inner] : 0.) + shift);
    variance[c] = spread < 0. ? 0.f : (float)spread;
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
      Vec<T, kVector> x, addend;
    };
    Affine affine[kVector];
    it.OfChannels([&](int64_t c) { return AffineOf(moments.Of(c), scale[c], bias[c]); }, affine);
    it.template ForEach<kAdds ? 2 : 4>(
        [&](int64_t, int64_t at) {
          Loaded loaded;
          loaded.x = ReadLast<kVector>(x + at);
          if constexpr (kAdds) loaded.addend = ReadLast<kVector>(addend + at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          float out[kVector];
#pragma unroll
          for (int e = 0; e < kVector; e++) {
            float v = affine[e](loaded.x[e]);
            if constexpr (kAdds) v = __fadd_rn(v, loaded.addend[e]);
            out[e] = activation(v);
          }
          Write<kVector>(y + at, out);
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
  const MomentsOp<T> body{in, ChannelResult(op, mean, shape.count),
                          ChannelResult(op, variance, shape.count)};
  RunSums<T>(op, x->ctx, shape, Aligned16(in), body, arrived, stream);
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
    const auto map = [&](auto body) { RunMap<T>(op, x->ctx, shape, aligned, body, stream); };
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
