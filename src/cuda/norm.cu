// Batch normalisation over x (N, C, ...) seen as (outer, channels, inner), forward and backward.
//
// What a channel sums to is found in parts, a block a part: 256 threads along the channel, or 32
// channels by 8 threads where channels are neighbours (inner == 1). A part is read for its mean and
// again, from the cache, for its squares; parts are joined in a fixed order, so the bits are the
// same every run. The output of the elementwise kernels may be one of their inputs of its shape.
#include "cuda/group.cuh"
#include "cuda/norm.cuh"
#include "cuda/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// The sum over the threads of a column, given to all of them; threads lie (kThreads / kCols,
// kCols).
template <int kCols>
__device__ float JoinColumn(float value) {
  if constexpr (kCols == 1) return Join<SumOf, kThreads>(value);
  constexpr int kRows = kThreads / kCols;
  __shared__ float sums[kRows][kCols];
  const int row = threadIdx.x / kCols;
  const int col = threadIdx.x % kCols;
  __syncthreads();  // the previous call's readers are done
  sums[row][col] = value;
  __syncthreads();
  value = 0.f;
#pragma unroll
  for (int k = 0; k < kRows; k++) value += sums[k][col];
  return value;
}

// One part of one channel, as this thread sees it: positions begin + lane, + kLanes, ... before
// end.
struct Walk {
  int64_t c, begin, end;
  int lane, lanes;

  // Calls visit(n, where in the array) for the thread's positions; none without a channel.
  template <class Visit>
  __device__ __forceinline__ void Each(const Channels& shape, const Visit& visit) const {
    if (c >= shape.count || begin + lane >= end) return;
    int64_t n = (begin + lane) / shape.inner;
    int64_t k = (begin + lane) - n * shape.inner;
    const int64_t step_n = lanes / shape.inner;
    const int64_t step_k = lanes - step_n * shape.inner;
    for (int64_t e = begin + lane; e < end; e += lanes) {
      visit(n, (n * shape.count + c) * shape.inner + k);
      n += step_n;
      k += step_k;
      if (k >= shape.inner) {
        k -= shape.inner;
        n++;
      }
    }
  }
};

// Runs op.Part<kCols>(walk, where the part's result goes) for each part (parts, channels).
template <int kCols, class Op>
__global__ void PartsKernel(Channels shape, int64_t parts, int64_t part, Op op) {
  constexpr int kLanes = kThreads / kCols;
  const int64_t tiles = (shape.count + kCols - 1) / kCols;
  for (int64_t job = blockIdx.x; job < tiles * parts; job += gridDim.x) {
    const int64_t p = job / tiles;
    Walk walk;
    walk.c = (job - p * tiles) * kCols + threadIdx.x % kCols;
    walk.begin = p * part;
    walk.end = min(walk.begin + part, shape.PerChannel());
    walk.lane = threadIdx.x / kCols;
    walk.lanes = kLanes;
    op.template Part<kCols>(shape, walk, p * shape.count + walk.c);
  }
}

struct MomentsOp {
  const float* x;
  float* mean;     // (parts, channels)
  float* squares;  // (parts, channels), the sum of (x - mean)^2

  template <int kCols>
  __device__ void Part(const Channels& shape, const Walk& walk, int64_t result) const {
    float sum = 0.f;
    walk.Each(shape, [&](int64_t, int64_t i) { sum += x[i]; });
    const float m = JoinColumn<kCols>(sum) / (float)(walk.end - walk.begin);
    sum = 0.f;
    walk.Each(shape, [&](int64_t, int64_t i) { sum += (x[i] - m) * (x[i] - m); });
    sum = JoinColumn<kCols>(sum);
    if (walk.lane != 0 || walk.c >= shape.count) return;
    mean[result] = m;
    squares[result] = sum;
  }
};

// Joins the parts' moments, a warp a channel: means relative to the first, so that little cancels.
__global__ void JoinMomentsKernel(const float* means, const float* squares, float* mean,
                                  float* variance, Channels shape, int64_t parts, int64_t part) {
  constexpr int kChannels = kThreads / 32;
  const int lane = threadIdx.x % 32;
  const float total = (float)shape.PerChannel();
  for (int64_t first = (int64_t)blockIdx.x * kChannels; first < shape.count;
       first += (int64_t)gridDim.x * kChannels) {
    const int64_t c = first + threadIdx.x / 32;
    const bool exists = c < shape.count;
    const int64_t count = exists ? parts : 0;
    const float origin = exists ? means[c] : 0.f;
    float sum = 0.f;
    for (int64_t p = lane; p < count; p += 32)
      sum +=
          (float)(min(part, shape.PerChannel() - p * part)) * (means[p * shape.count + c] - origin);
    const float m = origin + Join<SumOf, 32>(sum) / total;
    sum = 0.f;
    for (int64_t p = lane; p < count; p += 32) {
      const float shift = means[p * shape.count + c] - m;
      sum += squares[p * shape.count + c] +
             (float)(min(part, shape.PerChannel() - p * part)) * shift * shift;
    }
    sum = Join<SumOf, 32>(sum);
    if (!exists || lane != 0) continue;
    mean[c] = m;
    variance[c] = sum / total;
  }
}

__device__ __forceinline__ float InverseDeviation(float variance, float eps) {
  return 1.f / sqrtf(variance + eps);
}

struct BatchMoments {
  const float* mean;      // (channels)
  const float* variance;  // (channels)
  float eps;
  struct Channel {
    Moments moments;
    __device__ Moments At(int64_t) const { return moments; }
  };
  __device__ Channel Of(int64_t c) const { return {{mean[c], InverseDeviation(variance[c], eps)}}; }
};

struct GroupMoments {
  RowMoments rows;
  struct Channel {
    const float* mean;
    const float* inverse;
    int64_t groups;
    __device__ Moments At(int64_t n) const { return {mean[n * groups], inverse[n * groups]}; }
  };
  __device__ Channel Of(int64_t c) const {
    return {rows.mean + c / rows.per, rows.inverse + c / rows.per, rows.groups};
  }
};

template <class Source>
struct SumsOp {
  const float* x;
  const float* dy;
  Source source;
  float* dscale;  // (parts, channels)
  float* dbias;   // (parts, channels)

  template <int kCols>
  __device__ void Part(const Channels& shape, const Walk& walk, int64_t result) const {
    const auto of_channel = source.Of(walk.c < shape.count ? walk.c : 0);
    float scale = 0.f, bias = 0.f;
    walk.Each(shape, [&](int64_t n, int64_t i) {
      const Moments moments = of_channel.At(n);
      scale += dy[i] * ((x[i] - moments.mean) * moments.inverse);
      bias += dy[i];
    });
    scale = JoinColumn<kCols>(scale);
    bias = JoinColumn<kCols>(bias);
    if (walk.lane != 0 || walk.c >= shape.count) return;
    dscale[result] = scale;
    dbias[result] = bias;
  }
};

__device__ __forceinline__ int64_t ChannelOf(const Channels& shape, int64_t i) {
  if (shape.small) return (uint32_t)i / (uint32_t)shape.inner % (uint32_t)shape.count;
  return i / shape.inner % shape.count;
}

struct NormalizeMap {
  static constexpr bool kTakesGradient = false;
  BatchMoments moments;
  const float* scale;  // (channels)
  const float* bias;   // (channels)
  struct Channel {
    float mean, factor, bias;
    __device__ float Apply(float x, float) const { return (x - mean) * factor + bias; }
  };
  __device__ Channel Of(int64_t c) const {
    const Moments m = moments.Of(c).moments;
    return {m.mean, m.inverse * scale[c], bias[c]};
  }
};

struct GradientMap {
  static constexpr bool kTakesGradient = true;
  BatchMoments moments;
  const float* scale;   // (channels)
  const float* dscale;  // (channels)
  const float* dbias;   // (channels)
  float share;          // 1 / values of a channel
  struct Channel {
    float mean, factor, shift, slope;
    __device__ float Apply(float x, float dy) const {
      return (dy - (shift + (x - mean) * slope)) * factor;
    }
  };
  __device__ Channel Of(int64_t c) const {
    const Moments m = moments.Of(c).moments;
    return {m.mean, m.inverse * scale[c], dbias[c] * share, m.inverse * dscale[c] * share};
  }
};

// out[i] = map(x[i], dy[i]) with the constants of i's channel; by quads where a quad has one
// channel.
template <class Map>
__global__ void MapKernel(const float* x, const float* dy, float* out, Channels shape, bool quads,
                          Map map) {
  const int64_t n = quads ? shape.Numel() / 4 : shape.Numel();
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const auto of_channel = map.Of(ChannelOf(shape, quads ? 4 * i : i));
    if (!quads) {
      out[i] = of_channel.Apply(x[i], Map::kTakesGradient ? dy[i] : 0.f);
      continue;
    }
    const float4 v = ((const float4*)x)[i];
    float4 g = make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (Map::kTakesGradient) g = ((const float4*)dy)[i];
    ((float4*)out)[i] = make_float4(of_channel.Apply(v.x, g.x), of_channel.Apply(v.y, g.y),
                                    of_channel.Apply(v.z, g.z), of_channel.Apply(v.w, g.w));
  }
}

__global__ void RunningKernel(float* mean, float* variance, const float* new_mean,
                              const float* new_variance, float keep, float by_mean,
                              float by_variance, int64_t n) {
  for (int64_t c = FirstItem(); c < n; c += ItemStep()) {
    mean[c] = keep * mean[c] + by_mean * new_mean[c];
    variance[c] = keep * variance[c] + by_variance * new_variance[c];
  }
}

// ---- launchers ----

Channels ChannelsOf(const char* op, const DLArray* x) {
  if (x->ndim < 2) Fail("%s: expected an array of (N, C, ...), got %s", op, ShapeText(x).c_str());
  int64_t inner = 1;
  for (int axis = 2; axis < x->ndim; axis++) inner *= x->shape[axis];
  return Channels(x->shape[0], x->shape[1], inner);
}

// Parts of a channel: enough for a full chip, none shorter than is worth a block.
struct Parts {
  int64_t count, size, cols;

  explicit Parts(const Channels& shape) {
    cols = shape.inner == 1 ? 32 : 1;
    const int64_t whole = shape.PerChannel(), shortest = 2048 / cols;
    const int64_t most = CeilDiv(2048, std::max<int64_t>(CeilDiv(shape.count, cols), 1));
    count = std::max<int64_t>(1, std::min(whole / shortest, most));
    size = CeilDiv(whole, count);
    count = std::max<int64_t>(1, size ? CeilDiv(whole, size) : 1);
  }
};

template <class Op>
void RunParts(const char* op, const Channels& shape, const Parts& parts, const Op& body,
              DLStream stream) {
  const unsigned blocks = Blocks(CeilDiv(shape.count, parts.cols) * parts.count, 1);
  if (parts.cols == 1) {
    Launch(op, PartsKernel<1, Op>, blocks, kThreads, 0, stream, shape, parts.count, parts.size,
           body);
  } else {
    Launch(op, PartsKernel<32, Op>, blocks, kThreads, 0, stream, shape, parts.count, parts.size,
           body);
  }
}

void BatchStatistics(const DLArray* x, DLArray* mean, DLArray* variance, DLStream stream) {
  const char* op = "batch_statistics";
  Enter(op, x, mean, variance);
  const Channels shape = ChannelsOf(op, x);
  float* m = ChannelResult(op, mean, shape.count);
  float* v = ChannelResult(op, variance, shape.count);
  const Parts parts(shape);
  const int64_t partials = parts.count * shape.count;
  const Scratch scratch(x->ctx, 2 * partials * (int64_t)sizeof(float), stream);
  float* means = scratch.floats();
  float* squares = means + partials;
  RunParts(op, shape, parts, MomentsOp{In(op, x), means, squares}, stream);
  Launch(op, JoinMomentsKernel, Blocks(shape.count, kThreads / 32), kThreads, 0, stream, means,
         squares, m, v, shape, parts.count, parts.size);
}

template <class Map>
void RunMap(const char* op, const Channels& shape, const float* x, const float* dy, float* out,
            const Map& map, DLStream stream) {
  const bool aligned = Aligned16(x) && Aligned16(dy) && Aligned16(out);
  const bool quads = shape.inner % 4 == 0 && aligned;
  const int64_t items = quads ? shape.Numel() / 4 : shape.Numel();
  Launch(op, MapKernel<Map>, Blocks(items), kThreads, 0, stream, x, dy, out, shape, quads, map);
}

BatchMoments MomentsOf(const char* op, const DLArray* mean, const DLArray* variance, int64_t count,
                       float eps) {
  return {PerChannel(op, mean, count), PerChannel(op, variance, count), eps};
}

void BatchNormalize(const DLArray* x, const DLArray* mean, const DLArray* variance,
                    const DLArray* scale, const DLArray* bias, float eps, DLArray* y,
                    DLStream stream) {
  const char* op = "batch_normalize";
  Enter(op, x, mean, variance, scale, bias, y);
  CheckSameShape(op, x, y);
  const Channels shape = ChannelsOf(op, x);
  const NormalizeMap map{MomentsOf(op, mean, variance, shape.count, eps),
                         PerChannel(op, scale, shape.count), PerChannel(op, bias, shape.count)};
  RunMap(op, shape, In(op, x), nullptr, Out(op, y), map, stream);
}

// The parts' sums, then the sums of the parts; a single part writes the result itself.
template <class Source>
void RunSums(const char* op, DLContext ctx, const float* x, const float* dy, const Channels& shape,
             const Source& source, float* dscale, float* dbias, DLStream stream) {
  const Parts parts(shape);
  if (parts.count == 1)
    return RunParts(op, shape, parts, SumsOp<Source>{x, dy, source, dscale, dbias}, stream);
  const int64_t partials = parts.count * shape.count;
  const Scratch scratch(ctx, 2 * partials * (int64_t)sizeof(float), stream);
  float* scales = scratch.floats();
  float* biases = scales + partials;
  RunParts(op, shape, parts, SumsOp<Source>{x, dy, source, scales, biases}, stream);
  SumAxis(op, ctx, scales, 1, parts.count, shape.count, 1.f, dscale, stream);
  SumAxis(op, ctx, biases, 1, parts.count, shape.count, 1.f, dbias, stream);
}

void BatchNormalizeSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                        const DLArray* dy, float eps, DLArray* dscale, DLArray* dbias,
                        DLStream stream) {
  const char* op = "batch_normalize_sums";
  Enter(op, x, mean, variance, dy, dscale, dbias);
  CheckSameShape(op, x, dy);
  const Channels shape = ChannelsOf(op, x);
  RunSums(op, x->ctx, In(op, x), In(op, dy), shape, MomentsOf(op, mean, variance, shape.count, eps),
          ChannelResult(op, dscale, shape.count), ChannelResult(op, dbias, shape.count), stream);
}

void BatchNormalizeGradient(const DLArray* x, const DLArray* mean, const DLArray* variance,
                            const DLArray* scale, const DLArray* dscale, const DLArray* dbias,
                            const DLArray* dy, float eps, DLArray* dx, DLStream stream) {
  const char* op = "batch_normalize_gradient";
  Enter(op, x, mean, variance, scale, dscale, dbias, dy, dx);
  CheckSameShape(op, x, dy);
  CheckSameShape(op, x, dx);
  const Channels shape = ChannelsOf(op, x);
  const int64_t count = shape.count;
  const float share = (float)(1.0 / (double)std::max<int64_t>(shape.PerChannel(), 1));
  const GradientMap map{MomentsOf(op, mean, variance, count, eps), PerChannel(op, scale, count),
                        PerChannel(op, dscale, count), PerChannel(op, dbias, count), share};
  RunMap(op, shape, In(op, x), In(op, dy), Out(op, dx), map, stream);
}

// mean = keep * mean + by_mean * new_mean, and so the variance.
void RunningUpdate(DLArray* mean, DLArray* variance, const DLArray* new_mean,
                   const DLArray* new_variance, float keep, float by_mean, float by_variance,
                   DLStream stream) {
  const char* op = "running_update";
  Enter(op, mean, variance, new_mean, new_variance);
  const int64_t n = Numel(mean);
  Launch(op, RunningKernel, Blocks(n), kThreads, 0, stream, Out(op, mean),
         ChannelResult(op, variance, n), PerChannel(op, new_mean, n),
         PerChannel(op, new_variance, n), keep, by_mean, by_variance, n);
}

DLSYS_KERNEL(cuda, batch_statistics, BatchStatistics);
DLSYS_KERNEL(cuda, batch_normalize, BatchNormalize);
DLSYS_KERNEL(cuda, batch_normalize_sums, BatchNormalizeSums);
DLSYS_KERNEL(cuda, batch_normalize_gradient, BatchNormalizeGradient);
DLSYS_KERNEL(cuda, running_update, RunningUpdate);

}  // namespace

void ChannelSums(const char* op, DLContext ctx, const float* x, const float* dy,
                 const Channels& shape, const RowMoments& moments, float* dscale, float* dbias,
                 DLStream stream) {
  RunSums(op, ctx, x, dy, shape, GroupMoments{moments}, dscale, dbias, stream);
}

}  // namespace cuda
}  // namespace dlsys
