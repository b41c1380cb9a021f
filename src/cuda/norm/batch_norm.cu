// Batch normalisation over x (N, C, ...) seen as (outer, channels, inner), forward;
// norm_gradient.cu has the way back, norm_tile.cuh how channels are gone over.
//
// Statistics read x once: a thread sums what its numbers are beyond its first one, and the squares
// of that, which keeps the digits of any mean; blocks and then parts are joined by their means
// (Chan, Golub and LeVeque 1979), in a fixed order, so that the bits are the same every run. The
// output of a map may be one of its inputs.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/norm/batch_norm_tile.cuh"
#include "cuda/norm/norm.cuh"
#include "cuda/runtime/lists.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Means are kept beyond the first number of their channel.
struct MomentsOp {
  const float* x;
  float* means;    // (parts, channels)
  float* squares;  // (parts, channels), the sums of (x - mean)^2
  float* mean;     // (channels)
  float* variance;

  template <int kVector>
  __device__ void Part(const Channels& shape, const ChannelTiling& tiling, int64_t part,
                       int64_t tile) const {
    __shared__ TileTotals sums, spread;
    Walk<kVector> walk(shape, tiling, part, tile);
    const float count = (float)walk.count;
    Unit<kVector> first = {}, sum = {}, square = {};
    if (walk.count > 0) first = Read<kVector>(x + walk.at);
    walk.template Each<4>([&](int64_t, int64_t at) { return Read<kVector>(x + at); },
                          [&](const Unit<kVector>& u, int64_t) {
#pragma unroll
                            for (int e = 0; e < kVector; e++) {
                              const float d = u.v[e] - first.v[e];
                              sum.v[e] += d;
                              square.v[e] = fmaf(d, d, square.v[e]);
                            }
                          });
    float own[kVector] = {}, apart[kVector] = {};
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      if (walk.count == 0) continue;
      apart[e] = first.v[e] - x[walk.c[e] * shape.inner];
      own[e] = fmaf(count, apart[e], sum.v[e]);
    }
    JoinUnits(shape, tiling, own, &sums);
    const float all = (float)tiling.PerChannel(part);
    const int64_t begin = tile * tiling.width;
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      if (walk.count == 0) continue;
      const float m = sum.v[e] / count;
      const float shift = apart[e] + m - sums.of[walk.c[e] - begin] / all;
      own[e] = fmaf(count * shift, shift, fmaf(-m, sum.v[e], square.v[e]));
    }
    JoinUnits(shape, tiling, own, &spread);
    const int64_t c = begin + threadIdx.x;
    if (threadIdx.x >= tiling.width || c >= shape.count) return;
    means[part * shape.count + c] = all > 0.f ? sums.of[threadIdx.x] / all : 0.f;
    squares[part * shape.count + c] = spread.of[threadIdx.x];
  }

  __device__ void All(const Channels& shape, const ChannelTiling& tiling, int64_t tile) const {
    __shared__ TileTotals sums, spread;
    const float total = (float)shape.PerChannel();
    JoinParts(
        shape, tiling, tile,
        [&](int64_t p, int64_t c, int) {
          return (float)tiling.PerChannel(p) * __ldcg(means + p * shape.count + c);
        },
        &sums);
    JoinParts(
        shape, tiling, tile,
        [&](int64_t p, int64_t c, int w) {
          const float shift = __ldcg(means + p * shape.count + c) - sums.of[w] / total;
          return fmaf((float)tiling.PerChannel(p) * shift, shift,
                      __ldcg(squares + p * shape.count + c));
        },
        &spread);
    const int64_t c = tile * tiling.width + threadIdx.x;
    if (threadIdx.x >= tiling.width || c >= shape.count) return;
    const float first = total > 0.f ? x[c * shape.inner] : 0.f;
    mean[c] = first + sums.of[threadIdx.x] / total;  // NaN without values
    variance[c] = spread.of[threadIdx.x] / total;
  }
};

struct NoActivation {
  __device__ __forceinline__ float operator()(float x) const { return x; }
};
struct Numbered {
  int activation;
  __device__ __forceinline__ float operator()(float x) const {
    return ApplyActivation(activation, 0, 0.f, x);
  }
};

// y = activation(normalised x [+ addend])
template <class Activation, bool kAdds>
struct NormalizeOp {
  const float* x;
  const float* addend;
  float* y;
  BatchMoments moments;
  const float* scale;  // (channels)
  const float* bias;   // (channels)
  Activation activation;

  template <int kVector>
  __device__ void Map(Walk<kVector>& walk) const {
    struct Loaded {
      Unit<kVector> x, addend;
    };
    Affine affine[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      const int64_t c = walk.c[e];
      affine[e] =
          e > 0 && c == walk.c[e - 1] ? affine[e - 1] : AffineOf(moments.Of(c), scale[c], bias[c]);
    }
    walk.template Each<kAdds ? 2 : 4>(
        [&](int64_t, int64_t at) {
          Loaded loaded;
          loaded.x = ReadLast<kVector>(x + at);
          if constexpr (kAdds) loaded.addend = ReadLast<kVector>(addend + at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          Unit<kVector> out;
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
  float* mean;  // (channels), and so the others
  float* variance;
  const float* new_mean;
  const float* new_variance;
  int64_t channels;
};
constexpr int kLayers = 64;  // of a launch
struct RunningTable {
  Running layer[kLayers];
};

// The next value of a running statistic. What is new with no weight changes nothing, whatever its
// value; what is old with none is forgotten.
__device__ __forceinline__ float Moved(float keep, float old, float by, float taken) {
  if (by == 0.f) return old;
  return keep == 0.f ? by * taken : keep * old + by * taken;
}

// A block a layer.
__global__ void RunningKernel(const __grid_constant__ RunningTable table, float keep, float by_mean,
                              float by_variance) {
  const Running& of = table.layer[blockIdx.x];
  GridDependencySynchronize();
  for (int64_t c = threadIdx.x; c < of.channels; c += kThreads) {
    of.mean[c] = Moved(keep, of.mean[c], by_mean, of.new_mean[c]);
    of.variance[c] = Moved(keep, of.variance[c], by_variance, of.new_variance[c]);
  }
}

// ---- launchers ----

void RunStatistics(const char* op, const DLArray* x, unsigned* arrived, DLArray* mean,
                   DLArray* variance, const Channels& shape, DLStream stream) {
  const float* in = In(op, x);
  const ChannelTiling tiling = ChannelTiling::OfSums(shape, Aligned16(in));
  const int64_t partials = tiling.parts * shape.count;
  const Scratch scratch(x->ctx, 2 * partials * (int64_t)sizeof(float), stream);
  const MomentsOp body{in, scratch.floats(), scratch.floats() + partials,
                       ChannelResult(op, mean, shape.count),
                       ChannelResult(op, variance, shape.count)};
  RunParts(op, x->ctx, shape, tiling, body, arrived, stream);
}

void BatchStatistics(const DLArray* x, DLArray* mean, DLArray* variance, DLStream stream) {
  const char* op = "batch_statistics";
  Enter(op, x, mean, variance);
  RunStatistics(op, x, nullptr, mean, variance, ChannelsOf(op, x), stream);
}

void BatchStatisticsAtOnce(const DLArray* x, const DLArray* meeting, DLArray* mean,
                           DLArray* variance, DLStream stream) {
  const char* op = "batch_statistics_single_pass";
  Enter(op, x, meeting, mean, variance);
  const Channels shape = ChannelsOf(op, x);
  RunStatistics(op, x, CheckedMeeting(op, meeting, shape.count), mean, variance, shape, stream);
}

// addend may be null.
void RunNormalize(const char* op, const DLArray* x, const DLArray* mean, const DLArray* variance,
                  const DLArray* scale, const DLArray* bias, const DLArray* addend, float eps,
                  int activation, DLArray* y, DLStream stream) {
  CheckSameShape(op, x, y);
  if (addend) CheckSameShape(op, x, addend);
  const Channels shape = ChannelsOf(op, x);
  const float* in = In(op, x);
  const float* added = addend ? In(op, addend) : nullptr;
  float* out = Out(op, y);
  const BatchMoments moments = MomentsOf(op, mean, variance, shape.count, eps);
  const float* factors = PerChannel(op, scale, shape.count);
  const float* biases = PerChannel(op, bias, shape.count);
  const bool aligned = Aligned16(in) && Aligned16(added) && Aligned16(out);
  const auto run = [&](auto ending) {
    using Ending = decltype(ending);
    const auto map = [&](auto body) { RunMap(op, x->ctx, shape, aligned, body, stream); };
    if (added)
      map(NormalizeOp<Ending, true>{in, added, out, moments, factors, biases, ending});
    else
      map(NormalizeOp<Ending, false>{in, added, out, moments, factors, biases, ending});
  };
  if (activation == 0) return run(NoActivation{});
  if (activation == 1) return run(fn::Relu{});
  run(Numbered{activation});
}

void BatchNormalize(const DLArray* x, const DLArray* mean, const DLArray* variance,
                    const DLArray* scale, const DLArray* bias, float eps, DLArray* y,
                    DLStream stream) {
  const char* op = "batch_normalize";
  Enter(op, x, mean, variance, scale, bias, y);
  RunNormalize(op, x, mean, variance, scale, bias, nullptr, eps, 0, y, stream);
}

// y = activation(normalised x + addend), where there is an addend; activation 0 is none.
void BatchNormalizeMap(const DLArray* x, const DLArray* mean, const DLArray* variance,
                       const DLArray* scale, const DLArray* bias, const DLArrayList* addends,
                       float eps, int64_t activation, DLArray* y, DLStream stream) {
  const char* op = "batch_normalize_map";
  Enter(op, x, mean, variance, scale, bias, y);
  if (addends->count > 1) Fail("%s: expected one addend or none", op);
  const DLArray* addend = addends->count ? addends->arrays[0] : nullptr;
  if (addend) Enter(op, x, addend);
  RunNormalize(op, x, mean, variance, scale, bias, addend, eps,
               CheckedEpilogue(op, activation, 0, kActivations), y, stream);
}

// mean = keep * mean + by_mean * new mean, and so the variance, for layers that share these
// numbers: states has all means, then all variances, taken the new ones in the same order.
void RunningUpdate(DLArrayList* states, const DLArrayList* taken, float keep, float by_mean,
                   float by_variance, DLStream stream) {
  const char* op = "running_update";
  EnterAll(op, {states, taken});
  const int64_t layers = states->count / 2;
  if (states->count != taken->count || states->count % 2 || !layers)
    Fail("%s: expected new means and variances for %ld states, got %ld", op, (long)states->count,
         (long)taken->count);
  for (int64_t first = 0; first < layers; first += kLayers) {
    RunningTable table;
    const int64_t count = std::min<int64_t>(kLayers, layers - first);
    for (int64_t k = 0; k < count; k++) {
      DLArray* const* mean = states->arrays + first + k;
      DLArray* const* new_mean = taken->arrays + first + k;
      const int64_t n = Numel(*mean);
      table.layer[k] = {Out(op, *mean), ChannelResult(op, mean[layers], n),
                        PerChannel(op, *new_mean, n), PerChannel(op, new_mean[layers], n), n};
    }
    const DLContext ctx = states->arrays[0]->ctx;
    LaunchClusters(op, RunningKernel, (unsigned)count, 1, kThreads, 0,
                   ComputeMajor(ctx.device_id) >= 9, stream, table, keep, by_mean, by_variance);
  }
}

DLSYS_KERNEL(cuda, batch_statistics, BatchStatistics);
DLSYS_KERNEL(cuda, batch_statistics_single_pass, BatchStatisticsAtOnce);
DLSYS_KERNEL(cuda, batch_normalize, BatchNormalize);
DLSYS_KERNEL(cuda, batch_normalize_map, BatchNormalizeMap);
DLSYS_KERNEL(cuda, running_update, RunningUpdate);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
