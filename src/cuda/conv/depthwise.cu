// Depthwise convolution (one channel per group), direct: there is no reduction over channels for a
// GEMM to exploit. A thread computes one element of y or dx as a gather; a block reduces one
// element of df over a split of the images, and splits are added in a fixed order. float32, NCHW,
// memory-bound. conv.cuh has the contract.
#include "cuda/conv/conv.cuh"
#include "cuda/reduce/group.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// y (n, o, out)
__global__ void ForwardKernel(const Conv c, const float* x, const float* f, const float* bias,
                              float* y, int64_t numel) {
  const int64_t out = c.out.h * c.out.w, multiple = c.o / c.groups;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t image_channel = k / out, o = image_channel % c.o;
    const int position = (int)(k % out), i = position / (int)c.out.w, j = position % (int)c.out.w;
    const float* from = x + (image_channel / c.o * c.c + o / multiple) * (c.in.h * c.in.w);
    const float* filter = f + o * c.kernel.h * c.kernel.w;
    const int h0 = i * (int)c.stride.h - (int)c.pad.h;
    const int w0 = j * (int)c.stride.w - (int)c.pad.w;
    float sum = bias ? bias[o] : 0.f;
    for (int a = 0; a < (int)c.kernel.h; a++) {
      const int h = h0 + a * (int)c.dilation.h;
      if (h < 0 || h >= (int)c.in.h) continue;
      for (int b = 0; b < (int)c.kernel.w; b++) {
        const int w = w0 + b * (int)c.dilation.w;
        if (w >= 0 && w < (int)c.in.w)
          sum = fmaf(filter[a * (int)c.kernel.w + b], from[(int64_t)h * c.in.w + w], sum);
      }
    }
    y[k] = sum;
  }
}

// Sums the kernel offsets through which input element (h, w) reaches dy (out).
__device__ float GatherGradient(const Conv& c, const float* filter, const float* dy, int h, int w) {
  float sum = 0.f;
  for (int a = 0; a < (int)c.kernel.h; a++) {
    const int h_scaled = h + (int)c.pad.h - a * (int)c.dilation.h;
    if (h_scaled < 0 || h_scaled % (int)c.stride.h || h_scaled / (int)c.stride.h >= (int)c.out.h)
      continue;
    for (int b = 0; b < (int)c.kernel.w; b++) {
      const int w_scaled = w + (int)c.pad.w - b * (int)c.dilation.w;
      if (w_scaled < 0 || w_scaled % (int)c.stride.w || w_scaled / (int)c.stride.w >= (int)c.out.w)
        continue;
      const int64_t position = h_scaled / (int)c.stride.h * c.out.w + w_scaled / (int)c.stride.w;
      sum = fmaf(filter[a * (int)c.kernel.w + b], dy[position], sum);
    }
  }
  return sum;
}

// dx (n, c, in)
__global__ void DataGradientKernel(const Conv c, const float* f, const float* dy, float* dx,
                                   int64_t numel) {
  const int64_t size = c.in.h * c.in.w, multiple = c.o / c.groups;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t image_channel = k / size;
    const int position = (int)(k % size);
    float sum = 0.f;
    for (int64_t m = 0; m < multiple; m++)
      sum += GatherGradient(c, f + (image_channel % c.c * multiple + m) * c.kernel.h * c.kernel.w,
                            dy + (image_channel * multiple + m) * c.out.h * c.out.w,
                            position / (int)c.in.w, position % (int)c.in.w);
    dx[k] = sum;
  }
}

// partial (parts, o, kernel): one block per element, over `images` images.
__global__ void FilterGradientKernel(const Conv c, const float* x, const float* dy, float* partial,
                                     int64_t images) {
  const int kernel_size = (int)(c.kernel.h * c.kernel.w);
  const int64_t element = blockIdx.x % (c.o * kernel_size);
  const int64_t split = blockIdx.x / (c.o * kernel_size);
  const int64_t o = element / kernel_size, channel = o / (c.o / c.groups);
  const int kernel_offset = (int)(element % kernel_size), out = (int)(c.out.h * c.out.w);
  const int h0 = kernel_offset / (int)c.kernel.w * (int)c.dilation.h - (int)c.pad.h;
  const int w0 = kernel_offset % (int)c.kernel.w * (int)c.dilation.w - (int)c.pad.w;
  const int64_t first = split * images, count = min(images, c.n - first);
  float sum = 0.f;
  for (int64_t k = threadIdx.x; k < count * out; k += kThreads) {
    const int64_t n = first + k / out;
    const int position = (int)(k % out);
    const int h = h0 + position / (int)c.out.w * (int)c.stride.h;
    const int w = w0 + position % (int)c.out.w * (int)c.stride.w;
    if (h >= 0 && h < (int)c.in.h && w >= 0 && w < (int)c.in.w)
      sum = fmaf(dy[(n * c.o + o) * out + position],
                 x[((n * c.c + channel) * c.in.h + h) * c.in.w + w], sum);
  }
  sum = GroupReduce<SumMonoid, kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// ---- launchers ----

constexpr int64_t kMaxSize = int64_t(1) << 30;

void CheckSizes(const char* op, const Conv& c) {
  if (Size(c.in) > kMaxSize || Size(c.out) > kMaxSize || Size(c.kernel) > kMaxSize)
    Fail("%s: inputs or filters of more than %ld elements", op, (long)kMaxSize);
}

void DepthwiseForward(const ConvCall& at, const Conv& c, const float* x, const float* f,
                      const float* bias, float* y) {
  CheckSizes(at.op, c);
  const int64_t numel = c.n * c.o * Size(c.out);
  Launch(at.op, ForwardKernel, Blocks(numel), kThreads, 0, at.stream, c, x, f, bias, y, numel);
}

void DepthwiseDataGradient(const ConvCall& at, const Conv& c, const float* f, const float* dy,
                           float* dx) {
  CheckSizes(at.op, c);
  const int64_t numel = c.n * c.c * Size(c.in);
  Launch(at.op, DataGradientKernel, Blocks(numel), kThreads, 0, at.stream, c, f, dy, dx, numel);
}

void DepthwiseFilterGradient(const ConvCall& at, const Conv& c, const float* x, const float* dy,
                             float* df) {
  CheckSizes(at.op, c);
  const int64_t elements = c.o * Size(c.kernel);
  if (elements > kMaxBlocks)
    Fail("%s: a filter of more than %ld elements", at.op, (long)kMaxBlocks);
  const int64_t wanted = CeilDiv(4 * Multiprocessors(at.ctx.device_id), elements);
  const int64_t images = CeilDiv(c.n, std::max<int64_t>(1, std::min(wanted, c.n)));
  const int64_t parts = c.n ? CeilDiv(c.n, images) : 1;
  const unsigned blocks = (unsigned)(parts * elements);
  if (parts == 1) {
    Launch(at.op, FilterGradientKernel, blocks, kThreads, 0, at.stream, c, x, dy, df, images);
    return;
  }
  Scratch partial(at.ctx, parts * elements * (int64_t)sizeof(float), at.stream);
  Launch(at.op, FilterGradientKernel, blocks, kThreads, 0, at.stream, c, x, dy, partial.floats(),
         images);
  SumAxis(at.op, at.ctx, partial.floats(), 1, parts, elements, 1.f, df, at.stream);
}

const char* Refusal(const ConvCall&, const Conv& conv) {
  return conv.Depthwise() ? nullptr : "it is for one channel a group";
}

}  // namespace

const ConvAlgorithm kDepthwise = {"depthwise",
                                  nullptr,
                                  nullptr,
                                  Refusal,
                                  DepthwiseForward,
                                  DepthwiseDataGradient,
                                  DepthwiseFilterGradient};

}  // namespace cuda
}  // namespace dlsys
