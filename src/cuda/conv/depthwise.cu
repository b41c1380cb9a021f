// Depthwise convolution: one channel a group, so there is no product to block. A thread computes
// one element of y or of dx; a block sums for one element of df over a part of the images, and the
// parts are added in a fixed order. conv.cuh has the contract.
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
    const int64_t plane = k / out, o = plane % c.o;
    const int place = (int)(k % out), i = place / (int)c.out.w, j = place % (int)c.out.w;
    const float* from = x + (plane / c.o * c.c + o / multiple) * (c.plane.h * c.plane.w);
    const float* filter = f + o * c.size.h * c.size.w;
    const int h0 = i * (int)c.stride.h - (int)c.before.h;
    const int w0 = j * (int)c.stride.w - (int)c.before.w;
    float sum = bias ? bias[o] : 0.f;
    for (int a = 0; a < (int)c.size.h; a++) {
      const int h = h0 + a * (int)c.dilation.h;
      if (h < 0 || h >= (int)c.plane.h) continue;
      for (int b = 0; b < (int)c.size.w; b++) {
        const int w = w0 + b * (int)c.dilation.w;
        if (w >= 0 && w < (int)c.plane.w)
          sum = fmaf(filter[a * (int)c.size.w + b], from[(int64_t)h * c.plane.w + w], sum);
      }
    }
    y[k] = sum;
  }
}

// Sum over the taps that carry element (h, w) to dy (out).
__device__ float GatherTaps(const Conv& c, const float* filter, const float* dy, int h, int w) {
  float sum = 0.f;
  for (int a = 0; a < (int)c.size.h; a++) {
    const int down = h + (int)c.before.h - a * (int)c.dilation.h;
    if (down < 0 || down % (int)c.stride.h || down / (int)c.stride.h >= (int)c.out.h) continue;
    for (int b = 0; b < (int)c.size.w; b++) {
      const int across = w + (int)c.before.w - b * (int)c.dilation.w;
      if (across < 0 || across % (int)c.stride.w || across / (int)c.stride.w >= (int)c.out.w)
        continue;
      const int64_t place = down / (int)c.stride.h * c.out.w + across / (int)c.stride.w;
      sum = fmaf(filter[a * (int)c.size.w + b], dy[place], sum);
    }
  }
  return sum;
}

// dx (n, c, plane)
__global__ void DataGradientKernel(const Conv c, const float* f, const float* dy, float* dx,
                                   int64_t numel) {
  const int64_t size = c.plane.h * c.plane.w, multiple = c.o / c.groups;
  for (int64_t k = FirstItem(); k < numel; k += ItemStep()) {
    const int64_t plane = k / size;
    const int place = (int)(k % size);
    float sum = 0.f;
    for (int64_t m = 0; m < multiple; m++)
      sum += GatherTaps(c, f + (plane % c.c * multiple + m) * c.size.h * c.size.w,
                        dy + (plane * multiple + m) * c.out.h * c.out.w, place / (int)c.plane.w,
                        place % (int)c.plane.w);
    dx[k] = sum;
  }
}

// partial (parts, o, size): a block an element, over `images` images.
__global__ void FilterGradientKernel(const Conv c, const float* x, const float* dy, float* partial,
                                     int64_t images) {
  const int taps = (int)(c.size.h * c.size.w);
  const int64_t element = blockIdx.x % (c.o * taps), part = blockIdx.x / (c.o * taps);
  const int64_t o = element / taps, channel = o / (c.o / c.groups);
  const int tap = (int)(element % taps), out = (int)(c.out.h * c.out.w);
  const int h0 = tap / (int)c.size.w * (int)c.dilation.h - (int)c.before.h;
  const int w0 = tap % (int)c.size.w * (int)c.dilation.w - (int)c.before.w;
  const int64_t first = part * images, count = min(images, c.n - first);
  float sum = 0.f;
  for (int64_t k = threadIdx.x; k < count * out; k += kThreads) {
    const int64_t n = first + k / out;
    const int place = (int)(k % out);
    const int h = h0 + place / (int)c.out.w * (int)c.stride.h;
    const int w = w0 + place % (int)c.out.w * (int)c.stride.w;
    if (h >= 0 && h < (int)c.plane.h && w >= 0 && w < (int)c.plane.w)
      sum = fmaf(dy[(n * c.o + o) * out + place],
                 x[((n * c.c + channel) * c.plane.h + h) * c.plane.w + w], sum);
  }
  sum = GroupReduce<SumMonoid, kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// ---- launchers ----

constexpr int64_t kMostPlane = int64_t(1) << 30;

void CheckSizes(const char* op, const Conv& c) {
  if (Size(c.plane) > kMostPlane || Size(c.out) > kMostPlane || Size(c.size) > kMostPlane)
    Fail("%s: planes of more than %ld elements", op, (long)kMostPlane);
}

void DepthwiseForward(const Place& at, const Conv& c, const float* x, const float* f,
                      const float* bias, float* y) {
  CheckSizes(at.op, c);
  const int64_t numel = c.n * c.o * Size(c.out);
  Launch(at.op, ForwardKernel, Blocks(numel), kThreads, 0, at.stream, c, x, f, bias, y, numel);
}

void DepthwiseDataGradient(const Place& at, const Conv& c, const float* f, const float* dy,
                           float* dx) {
  CheckSizes(at.op, c);
  const int64_t numel = c.n * c.c * Size(c.plane);
  Launch(at.op, DataGradientKernel, Blocks(numel), kThreads, 0, at.stream, c, f, dy, dx, numel);
}

void DepthwiseFilterGradient(const Place& at, const Conv& c, const float* x, const float* dy,
                             float* df) {
  CheckSizes(at.op, c);
  const int64_t elements = c.o * Size(c.size);
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

bool FitsDepthwise(const Place&, const Conv& conv) { return conv.Depthwise(); }

std::vector<std::string> Variants(Pass) { return {""}; }

}  // namespace

const ConvAlgorithm kDepthwise = {"depthwise",
                                  Variants,
                                  nullptr,
                                  FitsDepthwise,
                                  DepthwiseForward,
                                  DepthwiseDataGradient,
                                  DepthwiseFilterGradient};

}  // namespace cuda
}  // namespace dlsys
