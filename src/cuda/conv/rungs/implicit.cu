// The rung `implicit`, which runs the fastest of its kernels by the cost model; and its kernel
// `compact` for filters of one element whose stride skips positions, which first copies those that
// it meets. conv.cuh has the contract. A strided 1 x 1 convolution is a dense one of the images
// without the positions that it skips: its gathers would use every second float of a sector, and
// its data gradient would need a launch for each phase of the stride. Limited by what the dense
// convolution is limited by.
#include "cuda/conv/conv.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// to (planes, out) of x (planes, in): every stride-th position
__global__ void CompactKernel(const Conv c, const float* x, float* to, int64_t numel) {
  const int64_t out = c.out.h * c.out.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t h = k % out / c.out.w * c.stride.h, w = k % c.out.w * c.stride.w;
    to[k] = x[(k / out * c.in.h + h) * c.in.w + w];
  }
}

// dx (planes, in) of what is compact, zeros between
__global__ void SpreadKernel(const Conv c, const float* from, float* dx, int64_t numel) {
  const int64_t in = c.in.h * c.in.w;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t h = k % in / c.in.w, w = k % c.in.w, i = h / c.stride.h, j = w / c.stride.w;
    const bool met = h % c.stride.h == 0 && w % c.stride.w == 0 && i < c.out.h && j < c.out.w;
    dx[k] = met ? from[(k / in * c.out.h + i) * c.out.w + j] : 0.f;
  }
}

// ---- launchers ----

void ImplicitForward(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                     const float* bias, float* y) {
  RunFirst(RankConv(at, conv, Pass::kForward, true), at,
           [&](const ConvAlgorithm& by, const ConvCall& call) {
             by.forward(call, conv, x, f, bias, y);
           });
}

void ImplicitDataGradient(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                          float* dx) {
  RunFirst(RankConv(at, conv, Pass::kDataGradient, true), at,
           [&](const ConvAlgorithm& by, const ConvCall& call) {
             by.data_gradient(call, conv, f, dy, dx);
           });
}

void ImplicitFilterGradient(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                            float* df) {
  RunFirst(RankConv(at, conv, Pass::kFilterGradient, true), at,
           [&](const ConvAlgorithm& by, const ConvCall& call) {
             by.filter_gradient(call, conv, x, dy, df);
           });
}

const char* CompactRefusal(const ConvCall&, const Conv& c) {
  const HW one{1, 1}, none{0, 0};
  const bool fits = c.kernel == one && c.pad == none && !(c.stride == one) &&
                    (c.out.h - 1) * c.stride.h < c.in.h && (c.out.w - 1) * c.stride.w < c.in.w;
  return fits ? nullptr : "it is for 1 x 1 filters at a stride, without padding";
}

// The dense convolution of compact images; its tiles are the heuristic's.
struct Compact {
  ConvCall at;
  Conv dense;
  int64_t numel;

  Compact(const ConvCall& call, const Conv& c)
      : at(call), dense(c), numel(c.n * c.c * Size(c.out)) {
    at.variant = kHeuristic;
    dense.in = c.out;
    dense.stride = {1, 1};
  }
};

void MakeCompact(const ConvCall& at, const Conv& c, int64_t numel, const float* x, float* to) {
  Launch(at.op, CompactKernel, Blocks(numel), kThreads, 0, at.stream, c, x, to, numel);
}

void CompactForward(const ConvCall& call, const Conv& c, const float* x, const float* f,
                    const float* bias, float* y) {
  const Compact to(call, c);
  const Scratch images(to.at.ctx, to.numel * (int64_t)sizeof(float), to.at.stream);
  MakeCompact(to.at, c, to.numel, x, images.floats());
  ImplicitForward(to.at, to.dense, images.floats(), f, bias, y);
}

void CompactDataGradient(const ConvCall& call, const Conv& c, const float* f, const float* dy,
                         float* dx) {
  const Compact to(call, c);
  const Scratch images(to.at.ctx, to.numel * (int64_t)sizeof(float), to.at.stream);
  ImplicitDataGradient(to.at, to.dense, f, dy, images.floats());
  const int64_t numel = c.n * c.c * Size(c.in);
  Launch(call.op, SpreadKernel, Blocks(numel), kThreads, 0, call.stream, c, images.floats(), dx,
         numel);
}

void CompactFilterGradient(const ConvCall& call, const Conv& c, const float* x, const float* dy,
                           float* df) {
  const Compact to(call, c);
  const Scratch images(to.at.ctx, to.numel * (int64_t)sizeof(float), to.at.stream);
  MakeCompact(to.at, c, to.numel, x, images.floats());
  ImplicitFilterGradient(to.at, to.dense, images.floats(), dy, df);
}

}  // namespace

const ConvAlgorithm kCompact = {"implicit compact",   nullptr,        nullptr,
                                CompactRefusal,       CompactForward, CompactDataGradient,
                                CompactFilterGradient};
const ConvAlgorithm kImplicit = {"implicit",
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 ImplicitForward,
                                 ImplicitDataGradient,
                                 ImplicitFilterGradient};

}  // namespace cuda
}  // namespace dlsys
