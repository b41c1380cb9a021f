// Batch normalization backward, over x and dy (N, C, ...) seen as (outer, channels, inner): the
// channel sums dscale and dbias, then dx; layer_norm.cu takes its channel sums from here.
//
// A gradient flow loads dy: plainly, times the activation gradient of the pre-activation, which is
// recomputed from x bit-identically to forward, or masked by a relu's saved output or its bits
// (with a residual addend) and summed with a second gradient. Sums reduce like forward's
// statistics, in a single pass given arrival counters. An output may be the buffer of an input of
// its shape: elements are read before they are written, by the same thread. Memory bandwidth limits
// both kernels.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/norm/batch_norm_tile.cuh"
#include "cuda/norm/norm.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- gradient flows: how a kernel loads the gradient of the normalized x ----

// dy itself.
template <class T>
struct PlainFlow {
  static constexpr int kBatch = 4;  // vectors of each array that a thread has in flight
  const T* dy;

  template <int kVector>
  using Loaded = Vec<T, kVector>;
  __device__ Affine Of(int64_t, const Moments& m) const { return {m.mean, 0.f, 0.f}; }
  template <int kVector>
  __device__ __forceinline__ Vec<T, kVector> Load(int64_t at) const {
    return Read<kVector>(dy + at);
  }
  template <int kVector>
  __device__ __forceinline__ float Gradient(const Affine&, const Vec<T, kVector>& loaded, int e,
                                            float) const {
    return loaded[e];
  }
  template <int kVector>
  __device__ __forceinline__ void Save(const float (&)[kVector], int64_t) const {}
};

// dact(normalized x, dy), the pre-activation recomputed from x.
template <class T, class Dact>
struct ActivationFlow {
  static constexpr int kBatch = 4;
  const T* dy;
  ChannelFloats<T> scale;
  ChannelFloats<T> bias;
  Dact dact;

  template <int kVector>
  using Loaded = Vec<T, kVector>;
  __device__ Affine Of(int64_t c, const Moments& m) const { return AffineOf(m, scale[c], bias[c]); }
  template <int kVector>
  __device__ __forceinline__ Vec<T, kVector> Load(int64_t at) const {
    return Read<kVector>(dy + at);
  }
  template <int kVector>
  __device__ __forceinline__ float Gradient(const Affine& affine, const Vec<T, kVector>& loaded,
                                            int e, float x) const {
    return dact(affine(x), loaded[e]);
  }
  template <int kVector>
  __device__ __forceinline__ void Save(const float (&)[kVector], int64_t) const {}
};

struct RuntimeDact {
  int gradient;
  bool of_output;
  __device__ __forceinline__ float operator()(float z, float dy) const {
    if (of_output) z = ApplyActivation(7, 0, 0.f, z);
    return ApplyActivation(0, gradient, z, dy);
  }
};

// How relu's output is known: as it is, by a bit for each element that is positive, or recomputed.
enum class ReluSide { kOutput, kBits, kRecomputed };

// The sum of one or two gradients, masked where relu's output is not positive, and saved in dz.
template <class T, ReluSide kSide, bool kTwo>
struct ReluFlow {
  static constexpr int kBatch = 2;
  static constexpr bool kRecomputed = kSide == ReluSide::kRecomputed;
  using Side = std::conditional_t<kSide == ReluSide::kBits, uint8_t, T>;
  const T* dy;
  const T* more;
  const Side* side;
  ChannelFloats<T> scale;
  ChannelFloats<T> bias;
  T* dz;

  template <int kVector>
  struct Loaded {
    Vec<T, kVector> dy, more, y;
    unsigned bits;
  };
  __device__ Affine Of(int64_t c, const Moments& m) const {
    if constexpr (!kRecomputed) return {m.mean, 0.f, 0.f};
    return AffineOf(m, scale[c], bias[c]);
  }
  template <int kVector>
  __device__ __forceinline__ Loaded<kVector> Load(int64_t at) const {
    Loaded<kVector> loaded;
    loaded.dy = Read<kVector>(dy + at);
    if constexpr (kTwo) loaded.more = Read<kVector>(more + at);
    if constexpr (kSide == ReluSide::kOutput) loaded.y = ReadLast<kVector>(side + at);
    if constexpr (kSide == ReluSide::kBits) loaded.bits = side[at / 8] >> at % 8;
    return loaded;
  }
  template <int kVector>
  __device__ __forceinline__ float Gradient(const Affine& affine, const Loaded<kVector>& loaded,
                                            int e, float x) const {
    float g = loaded.dy[e];
    if constexpr (kTwo) g = __fadd_rn(g, loaded.more[e]);
    if constexpr (kSide == ReluSide::kBits)
      return loaded.bits >> e & 1 ? g : 0.f;
    else
      return fn::ReluGradient{}(kRecomputed ? affine(x) : loaded.y[e], g);
  }
  template <int kVector>
  __device__ __forceinline__ void Save(const float (&g)[kVector], int64_t at) const {
    Write<kVector>(dz + at, g);
  }
};

// ---- statistics: of a channel over the batch, or of rows (layer and group norm) ----

struct BatchStats {
  static constexpr int kBatch = 4;
  BatchMoments moments;
  struct Channel {
    Affine affine;
    __device__ __forceinline__ float Centered(float x, int64_t) const { return x - affine.mean; }
  };
  template <class Flow>
  __device__ Channel Of(int64_t c, const Flow& flow) const {
    return {flow.Of(c, moments.Of(c))};
  }
  __device__ float Factor(int64_t c) const { return moments.Of(c).inverse; }  // of the sum
};

struct RowGroupStats {
  static constexpr int kBatch = 2;
  RowMoments rows;
  struct Channel {
    Affine affine;  // none
    const float* mean;
    const float* inverse;
    int64_t groups;
    __device__ __forceinline__ float Centered(float x, int64_t n) const {
      return (x - mean[n * groups]) * inverse[n * groups];
    }
  };
  template <class Flow>
  __device__ Channel Of(int64_t c, const Flow&) const {
    return {{}, rows.mean + c / rows.per, rows.inverse + c / rows.per, rows.groups};
  }
  __device__ float Factor(int64_t) const { return 1.f; }
};

// ---- kernels ----

// dscale = sum(g * (x - mean) * inverse) and dbias = sum(g) of each channel, g the gradient.
template <class T, class Stats, class Flow>
struct SumsOp {
  using Sum = float;
  const T* x;
  Stats stats;
  Flow flow;
  float* dscale;  // (channels)
  float* dbias;   // (channels)

  // The first sum is without Stats::Factor.
  template <int kVector>
  __device__ __forceinline__ void Add(const Channels&, TileIterator<kVector>& it,
                                      float (&scale)[kVector], float (&bias)[kVector]) const {
    struct Loaded {
      int64_t n;
      Vec<T, kVector> x;
      typename Flow::template Loaded<kVector> flow;
    };
    typename Stats::Channel channel[kVector];
    it.OfChannels([&](int64_t c) { return stats.Of(c, flow); }, channel);
#pragma unroll
    for (int e = 0; e < kVector; e++) scale[e] = bias[e] = 0.f;
    constexpr int kBatch = Stats::kBatch < Flow::kBatch ? Stats::kBatch : Flow::kBatch;
    it.template ForEach<kBatch>(
        [&](int64_t n, int64_t at) {
          Loaded loaded;
          loaded.n = n;
          loaded.x = Read<kVector>(x + at);
          loaded.flow = flow.template Load<kVector>(at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          float g[kVector];
#pragma unroll
          for (int e = 0; e < kVector; e++) {
            const float x = loaded.x[e];
            g[e] = flow.template Gradient<kVector>(channel[e].affine, loaded.flow, e, x);
            scale[e] = fmaf(g[e], channel[e].Centered(x, loaded.n), scale[e]);
            bias[e] += g[e];
          }
          flow.template Save<kVector>(g, at);
        });
  }

  __device__ void Finish(const Channels& shape, int64_t c, float scale, float bias) const {
    // An empty sum is 0, though the deviation of no values is NaN.
    dscale[c] = shape.PerChannel() > 0 ? scale * stats.Factor(c) : 0.f;
    dbias[c] = bias;
  }
};

// dx = scale * inverse * (g - (dbias + (x - mean) * inverse * dscale) * share), g the gradient.
template <class T, class Flow>
struct GradientOp {
  const T* x;
  BatchMoments moments;
  Flow flow;
  ChannelFloats<T> scale;
  const float* dscale;  // (channels)
  const float* dbias;   // (channels)
  float share;          // 1 / values of a channel
  T* dx;

  struct Channel {
    Affine affine;
    float shift, projection;
  };
  __device__ Channel Of(int64_t c) const {
    const Moments m = moments.Of(c);
    Affine affine = flow.Of(c, m);
    affine.factor = __fmul_rn(m.inverse, scale[c]);
    return {affine, dbias[c] * share, m.inverse * dscale[c] * share};
  }

  template <int kVector>
  __device__ void Map(TileIterator<kVector>& it) const {
    struct Loaded {
      Vec<T, kVector> x;
      typename Flow::template Loaded<kVector> flow;
    };
    Channel channel[kVector];
    it.OfChannels([&](int64_t c) { return Of(c); }, channel);
    it.template ForEach<2>(
        [&](int64_t, int64_t at) {
          Loaded loaded;
          loaded.x = ReadLast<kVector>(x + at);
          loaded.flow = flow.template Load<kVector>(at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          float out[kVector];
#pragma unroll
          for (int e = 0; e < kVector; e++) {
            const Channel& of = channel[e];
            const float x = loaded.x[e];
            const float g = flow.template Gradient<kVector>(of.affine, loaded.flow, e, x);
            const float correction = fmaf(x - of.affine.mean, of.projection, of.shift);
            out[e] = __fmul_rn(g - correction, of.affine.factor);
          }
          Write<kVector>(dx + at, out);
        });
  }
};

// ---- launchers ----

template <class T, class Stats, class Flow>
void RunSums(const char* op, DLContext ctx, const T* x, const Channels& shape, bool aligned,
             const Stats& stats, const Flow& flow, unsigned* arrived, float* dscale, float* dbias,
             DLStream stream) {
  RunSums<T>(op, ctx, shape, aligned && Aligned16(x),
             SumsOp<T, Stats, Flow>{x, stats, flow, dscale, dbias}, arrived, stream);
}

// The inputs that all of these launchers share.
template <class T>
struct Inputs {
  Channels shape;
  const T* x;
  BatchMoments moments;

  Inputs(const char* op, const DLArray* x, const DLArray* mean, const DLArray* variance,
         const DLArray* dy, float eps)
      : shape(ChannelsOf(op, x)),
        x(In<T>(op, x)),
        moments(MomentsOf(op, mean, variance, shape.count, eps)) {
    CheckSameShape(op, x, dy);
  }
};

template <class T>
void BatchNormalizeSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                        const DLArray* dy, float eps, DLArray* dscale, DLArray* dbias,
                        DLStream stream) {
  const char* op = "batch_normalize_sums";
  Enter(op, x, mean, variance, dy, dscale, dbias);
  const Inputs<T> inputs(op, x, mean, variance, dy, eps);
  const PlainFlow<T> flow{In<T>(op, dy)};
  RunSums(op, x->ctx, inputs.x, inputs.shape, Aligned16(flow.dy), BatchStats{inputs.moments}, flow,
          nullptr, ChannelResult(op, dscale, inputs.shape.count),
          ChannelResult(op, dbias, inputs.shape.count), stream);
}

template <class T>
void BatchNormalizeSumsSinglePass(const DLArray* x, const DLArray* mean, const DLArray* variance,
                                  const DLArray* dy, const DLArray* counters, float eps,
                                  DLArray* dscale, DLArray* dbias, DLStream stream) {
  const char* op = "batch_normalize_sums_single_pass";
  Enter(op, x, mean, variance, dy, counters, dscale, dbias);
  const Inputs<T> inputs(op, x, mean, variance, dy, eps);
  const PlainFlow<T> flow{In<T>(op, dy)};
  RunSums(op, x->ctx, inputs.x, inputs.shape, Aligned16(flow.dy), BatchStats{inputs.moments}, flow,
          CheckedCounters(op, counters, inputs.shape.count),
          ChannelResult(op, dscale, inputs.shape.count),
          ChannelResult(op, dbias, inputs.shape.count), stream);
}

// Calls run(dact) with the activation gradient of this code.
template <class Run>
void WithDact(const char* op, int64_t gradient, const Run& run) {
  const int code = CheckedEpilogue(op, gradient, 1, kActivationGradients);
  if (code == 1) return run(fn::ReluGradient{});  // from the input or the output alike
  constexpr int kSoftplus = 5;
  run(RuntimeDact{code, code == kSoftplus});
}

// The sums where an activation follows the normalization.
template <class T>
void BatchNormalizeMapSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                           const DLArray* scale, const DLArray* bias, const DLArray* dy,
                           const DLArray* counters, float eps, int64_t gradient, DLArray* dscale,
                           DLArray* dbias, DLStream stream) {
  const char* op = "batch_normalize_map_sums";
  Enter(op, x, mean, variance, scale, bias, dy, counters, dscale, dbias);
  const Inputs<T> inputs(op, x, mean, variance, dy, eps);
  const int64_t count = inputs.shape.count;
  WithDact(op, gradient, [&](auto dact) {
    const ActivationFlow<T, decltype(dact)> flow{In<T>(op, dy),
                                                 ChannelFloatsOf<T>(op, scale, count),
                                                 ChannelFloatsOf<T>(op, bias, count), dact};
    RunSums(op, x->ctx, inputs.x, inputs.shape, Aligned16(flow.dy), BatchStats{inputs.moments},
            flow, CheckedCounters(op, counters, count), ChannelResult(op, dscale, count),
            ChannelResult(op, dbias, count), stream);
  });
}

// A bit for each element of x.
const uint8_t* BitsOf(const char* op, const DLArray* bits, const DLArray* x) {
  Enter(op, x, bits);
  if (Numel(bits) != CeilDiv(Numel(x), 8))
    Fail("%s: expected %ld bytes of bits, got shape %s", op, (long)CeilDiv(Numel(x), 8),
         ShapeText(bits).c_str());
  return In<uint8_t>(op, bits);
}

// dz = the sum of one or two dys where a relu's output is positive, and the channel sums of dz.
// sides is that output, or the bits of its positive elements, or scale and bias where it is
// relu(normalized x).
template <class T>
void BatchNormalizeReluSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                            const DLArrayList* sides, const DLArrayList* dys,
                            const DLArray* counters, float eps, DLArray* dscale, DLArray* dbias,
                            DLArray* dz, DLStream stream) {
  const char* op = "batch_normalize_relu_sums";
  Enter(op, x, mean, variance, counters, dscale, dbias, dz);
  const bool given = sides->count == 1, two = dys->count == 2;
  if ((!given && sides->count != 2) || (!two && dys->count != 1))
    Fail("%s: expected an output or scale and bias, and one or two gradients", op);
  const bool has_bits = given && sides->arrays[0]->dtype == DL_UINT8;
  const Inputs<T> inputs(op, x, mean, variance, dz, eps);
  const int64_t count = inputs.shape.count;
  bool aligned = true;
  const auto like_x = [&](const DLArray* a) {
    Enter(op, x, a);
    CheckSameShape(op, x, a);
    aligned = aligned && Aligned16(In<T>(op, a));
    return In<T>(op, a);
  };
  const auto of_channel = [&](const DLArray* a) {
    Enter(op, x, a);
    return ChannelFloatsOf<T>(op, a, count);
  };
  const T* first = like_x(dys->arrays[0]);
  const T* second = two ? like_x(dys->arrays[1]) : nullptr;
  const auto scale = given ? ChannelFloats<T>{} : of_channel(sides->arrays[0]);
  const auto bias = given ? ChannelFloats<T>{} : of_channel(sides->arrays[1]);
  T* saved = Out<T>(op, dz);
  aligned = aligned && Aligned16(saved);
  const auto run = [&](auto kind, const auto* side) {
    const auto run_of = [&](auto of_two) {
      using Flow = ReluFlow<T, decltype(kind)::value, decltype(of_two)::value>;
      RunSums(op, x->ctx, inputs.x, inputs.shape, aligned, BatchStats{inputs.moments},
              Flow{first, second, side, scale, bias, saved}, CheckedCounters(op, counters, count),
              ChannelResult(op, dscale, count), ChannelResult(op, dbias, count), stream);
    };
    two ? run_of(std::true_type()) : run_of(std::false_type());
  };
  if (has_bits)
    run(std::integral_constant<ReluSide, ReluSide::kBits>(), BitsOf(op, sides->arrays[0], x));
  else if (given)
    run(std::integral_constant<ReluSide, ReluSide::kOutput>(), like_x(sides->arrays[0]));
  else
    run(std::integral_constant<ReluSide, ReluSide::kRecomputed>(), (const T*)nullptr);
}

template <class T, class Flow>
void RunGradient(const char* op, const DLArray* x, const Inputs<T>& inputs, const Flow& flow,
                 const DLArray* scale, const DLArray* dscale, const DLArray* dbias, DLArray* dx,
                 DLStream stream) {
  CheckSameShape(op, x, dx);
  const int64_t count = inputs.shape.count;
  const float share = (float)(1.0 / (double)std::max<int64_t>(inputs.shape.PerChannel(), 1));
  T* out = Out<T>(op, dx);
  const bool aligned = Aligned16(inputs.x) && Aligned16(flow.dy) && Aligned16(out);
  RunMap<T>(
      op, x->ctx, inputs.shape, aligned,
      GradientOp<T, Flow>{inputs.x, inputs.moments, flow, ChannelFloatsOf<T>(op, scale, count),
                          PerChannel(op, dscale, count), PerChannel(op, dbias, count), share, out},
      stream);
}

template <class T>
void BatchNormalizeGradient(const DLArray* x, const DLArray* mean, const DLArray* variance,
                            const DLArray* scale, const DLArray* dscale, const DLArray* dbias,
                            const DLArray* dy, float eps, DLArray* dx, DLStream stream) {
  const char* op = "batch_normalize_gradient";
  Enter(op, x, mean, variance, scale, dscale, dbias, dy, dx);
  const Inputs<T> inputs(op, x, mean, variance, dy, eps);
  RunGradient(op, x, inputs, PlainFlow<T>{In<T>(op, dy)}, scale, dscale, dbias, dx, stream);
}

// dx where an activation follows the normalization.
template <class T>
void BatchNormalizeMapGradient(const DLArray* x, const DLArray* mean, const DLArray* variance,
                               const DLArray* scale, const DLArray* bias, const DLArray* dscale,
                               const DLArray* dbias, const DLArray* dy, float eps, int64_t gradient,
                               DLArray* dx, DLStream stream) {
  const char* op = "batch_normalize_map_gradient";
  Enter(op, x, mean, variance, scale, bias, dscale, dbias, dy, dx);
  const Inputs<T> inputs(op, x, mean, variance, dy, eps);
  const int64_t count = inputs.shape.count;
  WithDact(op, gradient, [&](auto dact) {
    const ActivationFlow<T, decltype(dact)> flow{In<T>(op, dy),
                                                 ChannelFloatsOf<T>(op, scale, count),
                                                 ChannelFloatsOf<T>(op, bias, count), dact};
    RunGradient(op, x, inputs, flow, scale, dscale, dbias, dx, stream);
  });
}

DLSYS_KERNEL_TYPED(cuda, batch_normalize_sums, BatchNormalizeSums);
DLSYS_KERNEL_TYPED(cuda, batch_normalize_sums_single_pass, BatchNormalizeSumsSinglePass);
DLSYS_KERNEL_TYPED(cuda, batch_normalize_map_sums, BatchNormalizeMapSums);
DLSYS_KERNEL_TYPED(cuda, batch_normalize_relu_sums, BatchNormalizeReluSums);
DLSYS_KERNEL_TYPED(cuda, batch_normalize_gradient, BatchNormalizeGradient);
DLSYS_KERNEL_TYPED(cuda, batch_normalize_map_gradient, BatchNormalizeMapGradient);

}  // namespace

template <class T>
void ChannelSums(const char* op, DLContext ctx, const T* x, const T* dy, const Channels& shape,
                 const RowMoments& moments, float* dscale, float* dbias, DLStream stream) {
  RunSums(op, ctx, x, shape, Aligned16(dy), RowGroupStats{moments}, PlainFlow<T>{dy}, nullptr,
          dscale, dbias, stream);
}

template <class T>
void ReluSumsByBits(const char* op, DLContext ctx, const T* x, const Channels& shape,
                    const BatchMoments& moments, const uint8_t* bits, const T* addend, T* dz,
                    float* dscale, float* dbias, DLStream stream) {
  const bool aligned = Aligned16(dz) && Aligned16(addend);
  const auto run = [&](auto two) {
    using Flow = ReluFlow<T, ReluSide::kBits, decltype(two)::value>;
    RunSums(op, ctx, x, shape, aligned, BatchStats{moments}, Flow{dz, addend, bits, {}, {}, dz},
            nullptr, dscale, dbias, stream);
  };
  addend ? run(std::true_type()) : run(std::false_type());
}
#define DLSYS_RELU_SUMS(T)                                                                        \
  template void ReluSumsByBits(const char*, DLContext, const T*, const Channels&,                 \
                               const BatchMoments&, const uint8_t*, const T*, T*, float*, float*, \
                               DLStream);
DLSYS_RELU_SUMS(bfloat16)
DLSYS_RELU_SUMS(float16)
DLSYS_RELU_SUMS(float)
#undef DLSYS_RELU_SUMS

#define DLSYS_CHANNEL_SUMS(T)                                                            \
  template void ChannelSums(const char*, DLContext, const T*, const T*, const Channels&, \
                            const RowMoments&, float*, float*, DLStream);
DLSYS_CHANNEL_SUMS(float)
DLSYS_CHANNEL_SUMS(bfloat16)
DLSYS_CHANNEL_SUMS(float16)
#undef DLSYS_CHANNEL_SUMS

}  // namespace cuda
}  // namespace dlsys
