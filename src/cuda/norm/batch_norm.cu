// Batch normalization forward, over x (N, C, ...) seen as (outer, channels, inner): statistics, the
// affine map (with an activation and a residual addend, itself normalized or not), and running
// statistics.
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

// What is added to the normalized x: nothing, values, or values that are normalized first.
enum class Addend { kNone, kValues, kNormalized };

// x as it is normalized: (x - mean) * inverse * scale + bias.
template <class T>
struct Normalized {
  const T* x;
  BatchMoments moments;
  ChannelFloats<T> scale;
  ChannelFloats<T> bias;
  __device__ Affine Of(int64_t c) const { return AffineOf(moments.Of(c), scale[c], bias[c]); }
};

// y = activation(normalized x [+ addend]), and, kBits, a bit for each element that is positive.
template <class T, class Activation, Addend kAddend, bool kBits>
struct NormalizeOp {
  static constexpr bool kAdds = kAddend != Addend::kNone;
  Normalized<T> normalized;
  Normalized<T> addend;  // its x alone where that is not normalized
  T* y;
  uint8_t* positive;
  Activation activation;

  template <int kVector>
  __device__ void Map(TileIterator<kVector>& it) const {
    struct Loaded {
      Vec<T, kVector> x, addend;
    };
    struct Maps {
      Affine of_x, of_addend;
    };
    constexpr bool kTwo = kAddend == Addend::kNormalized;
    std::conditional_t<kTwo, Maps, Affine> maps[kVector];
    it.OfChannels(
        [&](int64_t c) {
          if constexpr (kTwo)
            return Maps{normalized.Of(c), addend.Of(c)};
          else
            return normalized.Of(c);
        },
        maps);
    it.template ForEach<kAdds ? 2 : 4>(
        [&](int64_t, int64_t at) {
          Loaded loaded;
          loaded.x = ReadLast<kVector>(normalized.x + at);
          if constexpr (kAdds) loaded.addend = ReadLast<kVector>(addend.x + at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          float out[kVector];
          unsigned bits = 0;
#pragma unroll
          for (int e = 0; e < kVector; e++) {
            float v;
            if constexpr (kTwo) {
              v = __fadd_rn(maps[e].of_x(loaded.x[e]), maps[e].of_addend(loaded.addend[e]));
            } else {
              v = maps[e](loaded.x[e]);
              if constexpr (kAdds) v = __fadd_rn(v, loaded.addend[e]);
            }
            out[e] = activation(v);
            if constexpr (kBits) bits |= (unsigned)((float)T(out[e]) > 0.f) << e;
          }
          Write<kVector>(y + at, out);
          if constexpr (kBits && kVector == 4) {  // two lanes have a byte, and as many vectors
            const int lane = (int)threadIdx.x % 32;
            bits |= __shfl_xor_sync(3u << (lane & ~1), bits, 1) << 4;
            if (lane % 2) return;
          }
          if constexpr (kBits && kVector > 1) positive[at / 8] = (uint8_t)bits;
        });
  }
};

// A bit for each element that is positive.
template <class T>
__global__ void PositiveKernel(const T* y, int64_t numel, uint8_t* positive) {
  GridDependencySynchronize();
  for (int64_t k = FirstItem(); k * 8 < numel; k += ItemStep()) {
    unsigned bits = 0;
    for (int e = 0; e < 8 && k * 8 + e < numel; e++)
      bits |= (unsigned)((float)y[k * 8 + e] > 0.f) << e;
    positive[k] = (uint8_t)bits;
  }
}

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

// What a map is given beside x: its statistics and affine parameters, and addends: none, values of
// x's shape, or such with the statistics and affine parameters by which they are normalized.
struct MapInputs {
  const DLArray *x, *mean, *variance, *scale, *bias;
  const DLArrayList* addends;
  float eps;
};

template <class T>
Normalized<T> NormalizedOf(const char* op, const MapInputs& of, const DLArray* x,
                           const DLArray* mean, const DLArray* variance, const DLArray* scale,
                           const DLArray* bias) {
  Enter(op, of.x, x, mean, variance, scale, bias);
  CheckSameShape(op, of.x, x);
  const int64_t count = ChannelsOf(op, x).count;
  return {In<T>(op, x), MomentsOf(op, mean, variance, count, of.eps),
          ChannelFloatsOf<T>(op, scale, count), ChannelFloatsOf<T>(op, bias, count)};
}

// `positive` may be null.
template <class T>
void RunNormalize(const char* op, const MapInputs& of, int activation, DLArray* y,
                  uint8_t* positive, DLStream stream) {
  const DLArrayList* addends = of.addends;
  const int64_t added = addends ? addends->count : 0;
  if (added != 0 && added != 1 && added != 5)
    Fail("%s: expected one addend or none, or one with what normalizes it", op);
  CheckSameShape(op, of.x, y);
  const Channels shape = ChannelsOf(op, of.x);
  const Normalized<T> normalized =
      NormalizedOf<T>(op, of, of.x, of.mean, of.variance, of.scale, of.bias);
  Normalized<T> addend{};
  if (added == 1) {
    Enter(op, of.x, addends->arrays[0]);
    CheckSameShape(op, of.x, addends->arrays[0]);
    addend.x = In<T>(op, addends->arrays[0]);
  } else if (added == 5) {
    DLArray* const* with = addends->arrays;
    addend = NormalizedOf<T>(op, of, with[0], with[1], with[2], with[3], with[4]);
  }
  T* out = Out<T>(op, y);
  const bool aligned = Aligned16(normalized.x) && Aligned16(addend.x) && Aligned16(out);
  // Every tile has whole bytes: a thread's vector is one, or that of two side by side.
  const bool in_bytes = shape.inner == 1 && shape.count % 8 == 0 &&
                        (kWide<T> == 8 || shape.count < kMaxWidth || shape.count % kMaxWidth == 0);
  const bool bits = positive && aligned && in_bytes;
  const auto run = [&](auto act, auto with_bits) {
    using Activation = decltype(act);
    constexpr bool kBits = decltype(with_bits)::value;
    const auto map = [&](auto kind) {
      // A warp's bits of a position then fill a sector of memory, as do those of few channels.
      constexpr bool kWide = kBits && kIs16Bit<T> && decltype(kind)::value != Addend::kNone;
      RunMap<T>(op, of.x->ctx, shape, aligned,
                NormalizeOp<T, Activation, decltype(kind)::value, kBits>{normalized, addend, out,
                                                                         positive, act},
                stream, kWide ? kMostWidth : kMaxWidth);
    };
    if (added == 5) return map(std::integral_constant<Addend, Addend::kNormalized>());
    if (added) return map(std::integral_constant<Addend, Addend::kValues>());
    map(std::integral_constant<Addend, Addend::kNone>());
  };
  if (bits) return run(fn::Relu{}, std::true_type());
  if (activation == 0)
    run(NoActivation{}, std::false_type());
  else if (activation == 1)
    run(fn::Relu{}, std::false_type());
  else
    run(RuntimeActivation{activation}, std::false_type());
  if (positive)
    LaunchClusters(op, PositiveKernel<T>, Blocks(CeilDiv(shape.Numel(), 8)), 1, kThreads, 0,
                   ComputeMajor(of.x->ctx.device_id) >= 9, stream, (const T*)out, shape.Numel(),
                   positive);
}

template <class T>
void BatchNormalize(const DLArray* x, const DLArray* mean, const DLArray* variance,
                    const DLArray* scale, const DLArray* bias, float eps, DLArray* y,
                    DLStream stream) {
  const char* op = "batch_normalize";
  Enter(op, x, mean, variance, scale, bias, y);
  RunNormalize<T>(op, {x, mean, variance, scale, bias, nullptr, eps}, 0, y, nullptr, stream);
}

// y = activation(normalized x [+ addend]); activation 0 is the identity.
template <class T>
void BatchNormalizeMap(const DLArray* x, const DLArray* mean, const DLArray* variance,
                       const DLArray* scale, const DLArray* bias, const DLArrayList* addends,
                       float eps, int64_t activation, DLArray* y, DLStream stream) {
  const char* op = "batch_normalize_map";
  Enter(op, x, mean, variance, scale, bias, y);
  RunNormalize<T>(op, {x, mean, variance, scale, bias, addends, eps},
                  CheckedEpilogue(op, activation, 0, kActivations), y, nullptr, stream);
}

// y = relu(normalized x [+ addend]), and a bit for each element that is positive, eight a byte from
// the lowest bit on.
template <class T>
void BatchNormalizeReluBits(const DLArray* x, const DLArray* mean, const DLArray* variance,
                            const DLArray* scale, const DLArray* bias, const DLArrayList* addends,
                            float eps, DLArray* y, DLArray* positive, DLStream stream) {
  const char* op = "batch_normalize_relu_bits";
  Enter(op, x, mean, variance, scale, bias, y, positive);
  if (Numel(positive) != CeilDiv(Numel(x), 8))
    Fail("%s: expected %ld bytes of bits, got shape %s", op, (long)CeilDiv(Numel(x), 8),
         ShapeText(positive).c_str());
  RunNormalize<T>(op, {x, mean, variance, scale, bias, addends, eps}, 1, y,
                  Out<uint8_t>(op, positive), stream);
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
DLSYS_KERNEL_TYPED(cuda, batch_normalize_relu_bits, BatchNormalizeReluBits);
DLSYS_KERNEL(cuda, running_update, RunningUpdate);

}  // namespace

template <class T>
void ChannelStatistics(const char* op, DLContext ctx, const T* x, const Channels& shape,
                       float* mean, float* variance, DLStream stream) {
  RunSums<T>(op, ctx, shape, Aligned16(x), MomentsOp<T>{x, mean, variance}, nullptr, stream);
}

#define DLSYS_CHANNEL_STATISTICS(T)                                                          \
  template void ChannelStatistics(const char*, DLContext, const T*, const Channels&, float*, \
                                  float*, DLStream);
DLSYS_CHANNEL_STATISTICS(bfloat16)
DLSYS_CHANNEL_STATISTICS(float16)
DLSYS_CHANNEL_STATISTICS(float)
#undef DLSYS_CHANNEL_STATISTICS

}  // namespace cuda
}  // namespace dlsys
