// Batch normalisation's way back, and the sums over channels that other normalisations need: x and
// dy (N, C, ...) seen as (outer, channels, inner).
//
// Both kernels take the gradient as it comes to the layer's end, through the activation there
// (norm_flow.cuh). What they write may take the place of what they read at the same elements.
#include "cuda/norm/batch_norm_gradient.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// dscale, the sums of the gradient times (x - mean) * inverse, and dbias, those of the gradient.
template <class Source, class Flow>
struct SumsOp {
  const float* x;
  Source source;
  Flow flow;
  float* scales;  // (parts, channels), without what the source multiplies by in the end
  float* biases;  // (parts, channels)
  float* dscale;  // (channels)
  float* dbias;   // (channels)

  template <int kVector>
  __device__ void Part(const Channels& shape, const ChannelTiling& tiling, int64_t part,
                       int64_t tile) const {
    struct Loaded {
      int64_t n;
      Unit<kVector> x;
      typename Flow::template Loaded<kVector> flow;
    };
    __shared__ TileTotals of_scale, of_bias;
    Walk<kVector> walk(shape, tiling, part, tile);
    typename Source::Channel own[kVector];
    typename Flow::Channel through[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      const bool same = e > 0 && walk.c[e] == walk.c[e - 1];
      own[e] = same ? own[e - 1] : source.Of(walk.c[e]);
      through[e] = same ? through[e - 1] : flow.Of(walk.c[e], own[e].fixed);
    }
    float scale[kVector] = {}, bias[kVector] = {};
    walk.template Each<2>(
        [&](int64_t n, int64_t at) {
          Loaded loaded;
          loaded.n = n;
          loaded.x = Read<kVector>(x + at);
          loaded.flow = flow.template Load<kVector>(at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          Unit<kVector> g;
#pragma unroll
          for (int e = 0; e < kVector; e++) {
            g.v[e] = flow.template Gradient<kVector>(through[e], loaded.flow, e, loaded.x.v[e]);
            scale[e] = fmaf(g.v[e], own[e].Moved(loaded.x.v[e], loaded.n), scale[e]);
            bias[e] += g.v[e];
          }
          flow.template Keep<kVector>(g, at);
        });
    JoinUnits(shape, tiling, scale, &of_scale);
    JoinUnits(shape, tiling, bias, &of_bias);
    const int64_t c = tile * tiling.width + threadIdx.x;
    if (threadIdx.x >= tiling.width || c >= shape.count) return;
    scales[part * shape.count + c] = of_scale.of[threadIdx.x];
    biases[part * shape.count + c] = of_bias.of[threadIdx.x];
  }

  __device__ void All(const Channels& shape, const ChannelTiling& tiling, int64_t tile) const {
    __shared__ TileTotals of_scale, of_bias;
    const auto sum = [&](const float* of, TileTotals* totals) {
      JoinParts(
          shape, tiling, tile,
          [&](int64_t p, int64_t c, int) { return __ldcg(of + p * shape.count + c); }, totals);
    };
    sum(scales, &of_scale);
    sum(biases, &of_bias);
    const int64_t c = tile * tiling.width + threadIdx.x;
    if (threadIdx.x >= tiling.width || c >= shape.count) return;
    // A sum of nothing is 0, though the deviation of no values is NaN.
    const bool any = shape.outer > 0 && shape.inner > 0;
    dscale[c] = any ? of_scale.of[threadIdx.x] * source.Factor(c) : 0.f;
    dbias[c] = of_bias.of[threadIdx.x];
  }
};

// dx = scale * inverse * (g - (dbias + (x - mean) * inverse * dscale) * share), g the gradient.
template <class Flow>
struct GradientOp {
  const float* x;
  BatchMoments moments;
  Flow flow;
  const float* scale;   // (channels)
  const float* dscale;  // (channels)
  const float* dbias;   // (channels)
  float share;          // 1 / values of a channel
  float* dx;

  struct Channel {
    float mean, factor, shift, slope;
  };
  __device__ Channel Of(int64_t c, const Moments& m) const {
    return {m.mean, m.inverse * scale[c], dbias[c] * share, m.inverse * dscale[c] * share};
  }

  template <int kVector>
  __device__ void Map(Walk<kVector>& walk) const {
    struct Loaded {
      Unit<kVector> x;
      typename Flow::template Loaded<kVector> flow;
    };
    Channel own[kVector];
    typename Flow::Channel through[kVector];
#pragma unroll
    for (int e = 0; e < kVector; e++) {
      const bool same = e > 0 && walk.c[e] == walk.c[e - 1];
      const Moments m = same ? Moments{} : moments.Of(walk.c[e]);
      own[e] = same ? own[e - 1] : Of(walk.c[e], m);
      through[e] = same ? through[e - 1] : flow.Of(walk.c[e], m);
    }
    walk.template Each<2>(
        [&](int64_t, int64_t at) {
          Loaded loaded;
          loaded.x = ReadLast<kVector>(x + at);
          loaded.flow = flow.template Load<kVector>(at);
          return loaded;
        },
        [&](const Loaded& loaded, int64_t at) {
          Unit<kVector> out;
#pragma unroll
          for (int e = 0; e < kVector; e++) {
            const float x = loaded.x.v[e];
            const float g = flow.template Gradient<kVector>(through[e], loaded.flow, e, x);
            const float mean_part = fmaf(x - own[e].mean, own[e].slope, own[e].shift);
            out.v[e] = __fmul_rn(g - mean_part, own[e].factor);
          }
          Write(dx + at, out);
        });
  }
};

// ---- launchers ----

template <class Source, class Flow>
void RunSums(const char* op, DLContext ctx, const float* x, const Channels& shape, bool aligned,
             const Source& source, const Flow& flow, unsigned* arrived, float* dscale, float* dbias,
             DLStream stream) {
  const ChannelTiling tiling = ChannelTiling::OfSums(shape, aligned && Aligned16(x));
  const int64_t partials = tiling.parts * shape.count;
  const Scratch scratch(ctx, 2 * partials * (int64_t)sizeof(float), stream);
  const SumsOp<Source, Flow> body{
      x, source, flow, scratch.floats(), scratch.floats() + partials, dscale, dbias};
  RunParts(op, ctx, shape, tiling, body, arrived, stream);
}

// What all of these kernels begin with.
struct Given {
  Channels shape;
  const float* x;
  BatchMoments moments;

  Given(const char* op, const DLArray* x, const DLArray* mean, const DLArray* variance,
        const DLArray* dy, float eps)
      : shape(ChannelsOf(op, x)),
        x(In(op, x)),
        moments(MomentsOf(op, mean, variance, shape.count, eps)) {
    CheckSameShape(op, x, dy);
  }
};

void BatchNormalizeSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                        const DLArray* dy, float eps, DLArray* dscale, DLArray* dbias,
                        DLStream stream) {
  const char* op = "batch_normalize_sums";
  Enter(op, x, mean, variance, dy, dscale, dbias);
  const Given given(op, x, mean, variance, dy, eps);
  const Direct flow{In(op, dy)};
  RunSums(op, x->ctx, given.x, given.shape, Aligned16(flow.dy), OfBatch{given.moments}, flow,
          nullptr, ChannelResult(op, dscale, given.shape.count),
          ChannelResult(op, dbias, given.shape.count), stream);
}

void BatchNormalizeSumsAtOnce(const DLArray* x, const DLArray* mean, const DLArray* variance,
                              const DLArray* dy, const DLArray* meeting, float eps, DLArray* dscale,
                              DLArray* dbias, DLStream stream) {
  const char* op = "batch_normalize_sums_single_pass";
  Enter(op, x, mean, variance, dy, meeting, dscale, dbias);
  const Given given(op, x, mean, variance, dy, eps);
  const Direct flow{In(op, dy)};
  RunSums(op, x->ctx, given.x, given.shape, Aligned16(flow.dy), OfBatch{given.moments}, flow,
          CheckedMeeting(op, meeting, given.shape.count),
          ChannelResult(op, dscale, given.shape.count), ChannelResult(op, dbias, given.shape.count),
          stream);
}

// Calls run(slope) for an activation's gradient by its number.
template <class Run>
void WithSlope(const char* op, int64_t gradient, const Run& run) {
  const int number = CheckedEpilogue(op, gradient, 1, kActivationGradients);
  if (number == 1) return run(fn::ReluGradient{});  // of the input or the output, which is one
  constexpr int kSoftplus = 5;
  run(NumberedSlope{number, number == kSoftplus});
}

// The same of the gradient behind an activation of normalised x.
void BatchNormalizeMapSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                           const DLArray* scale, const DLArray* bias, const DLArray* dy,
                           const DLArray* meeting, float eps, int64_t gradient, DLArray* dscale,
                           DLArray* dbias, DLStream stream) {
  const char* op = "batch_normalize_map_sums";
  Enter(op, x, mean, variance, scale, bias, dy, meeting, dscale, dbias);
  const Given given(op, x, mean, variance, dy, eps);
  const int64_t count = given.shape.count;
  WithSlope(op, gradient, [&](auto slope) {
    const ThroughActivation<decltype(slope)> flow{In(op, dy), PerChannel(op, scale, count),
                                                  PerChannel(op, bias, count), slope};
    RunSums(op, x->ctx, given.x, given.shape, Aligned16(flow.dy), OfBatch{given.moments}, flow,
            CheckedMeeting(op, meeting, count), ChannelResult(op, dscale, count),
            ChannelResult(op, dbias, count), stream);
  });
}

// dz = the sum of one or two dys where a relu's output is positive, and the sums of that. sides is
// that output, or scale and bias where it is relu(normalised x).
void BatchNormalizeReluSums(const DLArray* x, const DLArray* mean, const DLArray* variance,
                            const DLArrayList* sides, const DLArrayList* dys,
                            const DLArray* meeting, float eps, DLArray* dscale, DLArray* dbias,
                            DLArray* dz, DLStream stream) {
  const char* op = "batch_normalize_relu_sums";
  Enter(op, x, mean, variance, meeting, dscale, dbias, dz);
  const bool output = sides->count == 1, two = dys->count == 2;
  if ((!output && sides->count != 2) || (!two && dys->count != 1))
    Fail("%s: expected an output or scale and bias, and one or two gradients", op);
  const Given given(op, x, mean, variance, dz, eps);
  const int64_t count = given.shape.count;
  bool aligned = true;
  const auto like_x = [&](const DLArray* a) {
    Enter(op, x, a);
    CheckSameShape(op, x, a);
    aligned = aligned && Aligned16(In(op, a));
    return In(op, a);
  };
  const auto of_channel = [&](const DLArray* a) {
    Enter(op, x, a);
    return PerChannel(op, a, count);
  };
  const float* first = like_x(dys->arrays[0]);
  const float* second = two ? like_x(dys->arrays[1]) : nullptr;
  const float* y = output ? like_x(sides->arrays[0]) : nullptr;
  const float* scale = output ? nullptr : of_channel(sides->arrays[0]);
  const float* bias = output ? nullptr : of_channel(sides->arrays[1]);
  float* kept = Out(op, dz);
  aligned = aligned && Aligned16(kept);
  const auto run = [&](auto of_output, auto of_two) {
    using Flow = ThroughRelu<decltype(of_output)::value, decltype(of_two)::value>;
    RunSums(op, x->ctx, given.x, given.shape, aligned, OfBatch{given.moments},
            Flow{first, second, y, scale, bias, kept}, CheckedMeeting(op, meeting, count),
            ChannelResult(op, dscale, count), ChannelResult(op, dbias, count), stream);
  };
  const auto yes = std::true_type{};
  const auto no = std::false_type{};
  if (output) return two ? run(yes, yes) : run(yes, no);
  two ? run(no, yes) : run(no, no);
}

template <class Flow>
void RunGradient(const char* op, const DLArray* x, const Given& given, const Flow& flow,
                 const DLArray* scale, const DLArray* dscale, const DLArray* dbias, DLArray* dx,
                 DLStream stream) {
  CheckSameShape(op, x, dx);
  const int64_t count = given.shape.count;
  const float share = (float)(1.0 / (double)std::max<int64_t>(given.shape.PerChannel(), 1));
  float* out = Out(op, dx);
  const bool aligned = Aligned16(given.x) && Aligned16(flow.dy) && Aligned16(out);
  RunMap(op, x->ctx, given.shape, aligned,
         GradientOp<Flow>{given.x, given.moments, flow, PerChannel(op, scale, count),
                          PerChannel(op, dscale, count), PerChannel(op, dbias, count), share, out},
         stream);
}

void BatchNormalizeGradient(const DLArray* x, const DLArray* mean, const DLArray* variance,
                            const DLArray* scale, const DLArray* dscale, const DLArray* dbias,
                            const DLArray* dy, float eps, DLArray* dx, DLStream stream) {
  const char* op = "batch_normalize_gradient";
  Enter(op, x, mean, variance, scale, dscale, dbias, dy, dx);
  const Given given(op, x, mean, variance, dy, eps);
  RunGradient(op, x, given, Direct{In(op, dy)}, scale, dscale, dbias, dx, stream);
}

// The same of the gradient behind an activation of normalised x.
void BatchNormalizeMapGradient(const DLArray* x, const DLArray* mean, const DLArray* variance,
                               const DLArray* scale, const DLArray* bias, const DLArray* dscale,
                               const DLArray* dbias, const DLArray* dy, float eps, int64_t gradient,
                               DLArray* dx, DLStream stream) {
  const char* op = "batch_normalize_map_gradient";
  Enter(op, x, mean, variance, scale, bias, dscale, dbias, dy, dx);
  const Given given(op, x, mean, variance, dy, eps);
  const int64_t count = given.shape.count;
  WithSlope(op, gradient, [&](auto slope) {
    const ThroughActivation<decltype(slope)> flow{In(op, dy), PerChannel(op, scale, count),
                                                  PerChannel(op, bias, count), slope};
    RunGradient(op, x, given, flow, scale, dscale, dbias, dx, stream);
  });
}

DLSYS_KERNEL(cuda, batch_normalize_sums, BatchNormalizeSums);
DLSYS_KERNEL(cuda, batch_normalize_sums_single_pass, BatchNormalizeSumsAtOnce);
DLSYS_KERNEL(cuda, batch_normalize_map_sums, BatchNormalizeMapSums);
DLSYS_KERNEL(cuda, batch_normalize_relu_sums, BatchNormalizeReluSums);
DLSYS_KERNEL(cuda, batch_normalize_gradient, BatchNormalizeGradient);
DLSYS_KERNEL(cuda, batch_normalize_map_gradient, BatchNormalizeMapGradient);

}  // namespace

void ChannelSums(const char* op, DLContext ctx, const float* x, const float* dy,
                 const Channels& shape, const RowMoments& moments, float* dscale, float* dbias,
                 DLStream stream) {
  RunSums(op, ctx, x, shape, Aligned16(dy), OfGroups{moments}, Direct{dy}, nullptr, dscale, dbias,
          stream);
}

}  // namespace cuda
}  // namespace dlsys
