// The rung `implicit`, which runs the fastest of its kernels by the cost model; and its kernel
// `compact` for filters of one element whose stride skips positions, which first copies those that
// it meets. conv.cuh has the contract. A strided 1 x 1 convolution is a dense one of the images
// without the positions that it skips: its gathers would use every second float of a sector, and
// its data gradient would need a launch for each phase of the stride. Limited by what the dense
// convolution is limited by.
#include "cuda/conv/conv.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Images with all positions (n, c, in), and compact ones (n, c, out) of every stride-th.
struct StridedTask {
  int in_h, in_w, out_h, out_w, stride_h, stride_w;
  Divisor by_out, by_out_w, by_in_h, by_vectors, by_stride_h, by_stride_w;  // vectors of a row
};

// to (planes, out) of x (planes, in)
__global__ void __launch_bounds__(kThreads)
    CompactKernel(const __grid_constant__ StridedTask task, const float* x, float* to, int numel) {
  constexpr int kAtOnce = 4;
  for (int64_t first = (int64_t)blockIdx.x * kThreads * kAtOnce + threadIdx.x; first < numel;
       first += (int64_t)gridDim.x * kThreads * kAtOnce) {
    float v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int k = (int)min(first + u * kThreads, (int64_t)numel - 1);
      const int plane = k / task.by_out, in_plane = k - plane * (int)task.by_out.value;
      const int i = in_plane / task.by_out_w, j = in_plane - i * task.out_w;
      v[u] = x[((int64_t)plane * task.in_h + i * task.stride_h) * task.in_w + j * task.stride_w];
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; u++)
      if (first + u * kThreads < numel) to[first + u * kThreads] = v[u];
  }
}

// dx (planes, in) of what is compact, zeros between; kWidth elements of a row a thread.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    SpreadKernel(const __grid_constant__ StridedTask task, const float* from, float* dx,
                 int vectors) {
  for (int64_t k = FirstItem(); k < vectors; k += ItemStep()) {
    const int line = (int)k / task.by_vectors,
              w = ((int)k - line * (int)task.by_vectors.value) * kWidth;
    const int plane = line / task.by_in_h, h = line - plane * task.in_h, i = h / task.by_stride_h;
    const bool is_met = i * task.stride_h == h && i < task.out_h;
    const float* const row = from + ((int64_t)plane * task.out_h + i) * task.out_w;
    float v[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; e++) {
      const int j = (w + e) / task.by_stride_w;
      v[e] = is_met && j * task.stride_w == w + e && j < task.out_w ? row[j] : 0.f;
    }
    if constexpr (kWidth == 4)
      ((float4*)dx)[k] = make_float4(v[0], v[1], v[2], v[3]);
    else if constexpr (kWidth == 2)
      ((float2*)dx)[k] = make_float2(v[0], v[1]);
    else
      dx[k] = v[0];
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
  if (c.n * c.c * Size(c.in) > INT32_MAX) return "images have more elements than its int counts";
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

// With vectors of so many elements.
StridedTask TaskOf(const Conv& c, int64_t width) {
  StridedTask task{};
  task.in_h = (int)c.in.h, task.in_w = (int)c.in.w;
  task.out_h = (int)c.out.h, task.out_w = (int)c.out.w;
  task.stride_h = (int)c.stride.h, task.stride_w = (int)c.stride.w;
  task.by_out = Divisor(Size(c.out)), task.by_out_w = Divisor(c.out.w);
  task.by_in_h = Divisor(c.in.h), task.by_vectors = Divisor(c.in.w / width);
  task.by_stride_h = Divisor(c.stride.h), task.by_stride_w = Divisor(c.stride.w);
  return task;
}

void MakeCompact(const ConvCall& at, const Conv& c, int64_t numel, const float* x, float* to) {
  Launch(at.op, CompactKernel, Blocks(numel, 4 * kThreads), kThreads, 0, at.stream, TaskOf(c, 1), x,
         to, (int)numel);
}

void Spread(const ConvCall& at, const Conv& c, const float* from, float* dx) {
  const int64_t width = !Aligned16(dx) ? 1 : c.in.w % 4 == 0 ? 4 : c.in.w % 2 == 0 ? 2 : 1;
  const int64_t vectors = c.n * c.c * Size(c.in) / width;
  const auto kernel = width == 4 ? SpreadKernel<4> : width == 2 ? SpreadKernel<2> : SpreadKernel<1>;
  Launch(at.op, kernel, Blocks(vectors), kThreads, 0, at.stream, TaskOf(c, width), from, dx,
         (int)vectors);
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
  Spread(call, c, images.floats(), dx);
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
