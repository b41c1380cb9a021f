// Depthwise convolution (one channel per group), direct: there is no reduction over channels for a
// GEMM to exploit. float32, NCHW, memory-bound. conv.cuh has the contract.
//
// Square filters of 3, 5 and 7 at stride 1 and 2: a thread goes down a strip of a column of y, so
// that it reads each input row once for all the outputs that meet it; neighbors have neighboring
// columns. The gradient for the data at stride 1 is that with the filter rotated, at stride 2 a row
// of dy goes to the rows of a strip of dx that it reaches. For the filter a
// block goes over the strips of a split of the images, sums all of its elements in registers, and
// splits are added in a fixed order. Other convolutions: a thread computes one element of y or dx
// as a gather, a block one element of df.
#include <type_traits>

#include "cuda/conv/conv.cuh"
#include "cuda/reduce/group.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Images of planes (count, in) and results (count, out) between which windows at `stride` go.
struct Planes {
  int count, in_h, in_w, out_h, out_w, pad_h, pad_w;
  int of_filters, of_multiple;  // plane p of results has filter p % of_filters, and the images'
                                // plane p / of_multiple
};

// Outputs of a strip: as many as share most rows.
template <int kSize>
constexpr int kStrip = kSize == 3 ? 8 : 4;
constexpr int kGradientStrip = 8;  // of a gradient at stride 2

// The strip of a column of a plane.
struct StripCoord {
  int plane, top, col;
};
template <int kSize>
__device__ __forceinline__ StripCoord StripOf(const Planes& p, int64_t item) {
  const int strips = (p.out_h + kStrip<kSize> - 1) / kStrip<kSize>;
  const int rest = (int)(item / p.out_w);
  return {rest / strips, rest % strips * kStrip<kSize>, (int)(item % p.out_w)};
}

// Calls use(row, values) for every input row that a strip meets, counted from its first: the kSize
// elements that the windows see of it, zeros outside.
template <int kSize, int kStride, class Use>
__device__ __forceinline__ void ForEachRow(const Planes& p, const float* x, const StripCoord& at,
                                           Use&& use) {
  const float* plane = x + (int64_t)(at.plane / p.of_multiple) * p.in_h * p.in_w;
  const int top = at.top * kStride - p.pad_h, left = at.col * kStride - p.pad_w;
#pragma unroll
  for (int row = 0; row < (kStrip<kSize> - 1) * kStride + kSize; row++) {
    const int h = top + row;
    const bool inside = (unsigned)h < (unsigned)p.in_h;
    float values[kSize];
#pragma unroll
    for (int b = 0; b < kSize; b++) {
      const bool there = inside && (unsigned)(left + b) < (unsigned)p.in_w;
      values[b] = there ? plane[h * p.in_w + left + b] : 0.f;
    }
    use(row, values);
  }
}

// y of strips: correlation of x with the filters (of_filters, kSize, kSize), or rotated ones.
template <int kSize, int kStride>
__global__ void StripKernel(const Planes p, const float* x, const float* f, bool rotated,
                            const float* bias, float* y, int64_t items) {
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    const StripCoord at = StripOf<kSize>(p, item);
    const int of = at.plane % p.of_filters;
    float filter[kSize][kSize], sums[kStrip<kSize>];
#pragma unroll
    for (int k = 0; k < kSize * kSize; k++)
      filter[k / kSize][k % kSize] = f[of * kSize * kSize + (rotated ? kSize * kSize - 1 - k : k)];
#pragma unroll
    for (int r = 0; r < kStrip<kSize>; r++) sums[r] = bias ? bias[of] : 0.f;
    ForEachRow<kSize, kStride>(p, x, at, [&](int row, const float (&values)[kSize]) {
#pragma unroll
      for (int r = 0; r < kStrip<kSize>; r++) {
        const int a = row - r * kStride;
        if (a < 0 || a >= kSize) continue;
#pragma unroll
        for (int b = 0; b < kSize; b++) sums[r] = fmaf(filter[a][b], values[b], sums[r]);
      }
    });
    float* to = y + ((int64_t)at.plane * p.out_h + at.top) * p.out_w + at.col;
#pragma unroll
    for (int r = 0; r < kStrip<kSize>; r++)
      if (at.top + r < p.out_h) to[r * p.out_w] = sums[r];
  }
}

// dx of strips at stride 2, the images being dy's and the results dx's planes: a row of dy reaches
// kSize rows of dx. Strips begin at an even distance from the first output, so that it is known
// when compiling which.
template <int kSize>
__global__ void StridedGradientKernel(const Planes p, const float* dy, const float* f, float* dx,
                                      int64_t items) {
  constexpr int kRows = kGradientStrip,
                kMost = (kSize + 1) / 2;  // kernel offsets that an input meets
  const int strips = (p.out_h + p.pad_h + kRows - 1) / kRows;
  for (int64_t item = FirstItem(); item < items; item += ItemStep()) {
    const int col = (int)(item % p.out_w), rest = (int)(item / p.out_w);
    const int plane = rest / strips, strip = rest % strips;
    const int top = strip * kRows - p.pad_h, first = (col + p.pad_w) % 2;
    float filter[kSize][kMost], sums[kRows] = {};
#pragma unroll
    for (int a = 0; a < kSize; a++)
#pragma unroll
      for (int t = 0; t < kMost; t++) {
        const int b = first + 2 * t;
        filter[a][t] = b < kSize ? f[(plane % p.of_filters * kSize + a) * kSize + b] : 0.f;
      }
    const float* from = dy + (int64_t)plane * p.in_h * p.in_w;
#pragma unroll
    for (int d = 0; d < kRows / 2 + (kSize - 1) / 2; d++) {
      const int i = strip * (kRows / 2) + d - (kSize - 1) / 2;
      float values[kMost];
#pragma unroll
      for (int t = 0; t < kMost; t++) {
        const int j = (col + p.pad_w - first) / 2 - t;
        const bool there = (unsigned)i < (unsigned)p.in_h && (unsigned)j < (unsigned)p.in_w;
        values[t] = there ? from[i * p.in_w + j] : 0.f;
      }
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int a = r - 2 * (d - (kSize - 1) / 2);
        if (a < 0 || a >= kSize) continue;
#pragma unroll
        for (int t = 0; t < kMost; t++) sums[r] = fmaf(filter[a][t], values[t], sums[r]);
      }
    }
    float* to = dx + ((int64_t)plane * p.out_h + top) * p.out_w + col;
#pragma unroll
    for (int r = 0; r < kRows; r++)
      if (top + r >= 0 && top + r < p.out_h) to[r * p.out_w] = sums[r];
  }
}

// partial (splits, of_filters, kSize, kSize): a block sums one filter over `images` images.
template <int kSize, int kStride>
__global__ void StripFilterKernel(const Planes p, const float* x, const float* dy, float* partial,
                                  int images) {
  const int of = (int)blockIdx.x % p.of_filters, first = (int)blockIdx.x / p.of_filters * images;
  const int count = min(images, p.count / p.of_filters - first);
  const int strips = (p.out_h + kStrip<kSize> - 1) / kStrip<kSize>;
  float sums[kSize][kSize] = {};
  for (int item = (int)threadIdx.x; item < count * strips * p.out_w; item += kThreads) {
    StripCoord at = StripOf<kSize>(p, item);  // its plane counts images
    at.plane = (first + at.plane) * p.of_filters + of;
    const float* from = dy + ((int64_t)at.plane * p.out_h + at.top) * p.out_w + at.col;
    float gradients[kStrip<kSize>];
#pragma unroll
    for (int r = 0; r < kStrip<kSize>; r++)
      gradients[r] = at.top + r < p.out_h ? from[r * p.out_w] : 0.f;
    ForEachRow<kSize, kStride>(p, x, at, [&](int row, const float (&values)[kSize]) {
#pragma unroll
      for (int r = 0; r < kStrip<kSize>; r++) {
        const int a = row - r * kStride;
        if (a < 0 || a >= kSize) continue;
#pragma unroll
        for (int b = 0; b < kSize; b++) sums[a][b] = fmaf(gradients[r], values[b], sums[a][b]);
      }
    });
  }
  float* to = partial + (int64_t)blockIdx.x * kSize * kSize;
#pragma unroll
  for (int k = 0; k < kSize * kSize; k++) {
    const float sum = GroupReduce<SumMonoid, kThreads>(sums[k / kSize][k % kSize]);
    if (threadIdx.x == 0) to[k] = sum;
  }
}

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
  // Without dilation every stride-th kernel offset meets an output.
  const bool dense = c.dilation.h == 1 && c.dilation.w == 1;
  const int from_h = dense ? (h + (int)c.pad.h) % (int)c.stride.h : 0;
  const int from_w = dense ? (w + (int)c.pad.w) % (int)c.stride.w : 0;
  const int by_h = dense ? (int)c.stride.h : 1, by_w = dense ? (int)c.stride.w : 1;
  float sum = 0.f;
  for (int a = from_h; a < (int)c.kernel.h; a += by_h) {
    const int h_scaled = h + (int)c.pad.h - a * (int)c.dilation.h;
    if (h_scaled < 0 || h_scaled % (int)c.stride.h || h_scaled / (int)c.stride.h >= (int)c.out.h)
      continue;
    for (int b = from_w; b < (int)c.kernel.w; b += by_w) {
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

// partial (splits, o, kernel): one block per element, over `images` images.
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

// Calls run(std::integral_constant of the size, of the stride) where strips can, and says whether.
template <class Run>
bool WithStrips(const Conv& c, HW stride, Run&& run) {
  const HW one{1, 1}, two{2, 2};
  const bool fits =
      c.kernel.h == c.kernel.w && c.dilation == one && (stride == one || stride == two);
  if (!fits || c.n * std::max(c.o, c.c) * std::max(Size(c.in), Size(c.out)) > INT32_MAX)
    return false;
  const auto with_size = [&](auto size) {
    if (stride == one)
      run(size, std::integral_constant<int, 1>{});
    else
      run(size, std::integral_constant<int, 2>{});
    return true;
  };
  switch (c.kernel.h) {
    case 3:
      return with_size(std::integral_constant<int, 3>{});
    case 5:
      return with_size(std::integral_constant<int, 5>{});
    case 7:
      return with_size(std::integral_constant<int, 7>{});
    default:
      return false;
  }
}

Planes PlanesOf(const Conv& c) {
  return {(int)(c.n * c.o), (int)c.in.h,  (int)c.in.w, (int)c.out.h,         (int)c.out.w,
          (int)c.pad.h,     (int)c.pad.w, (int)c.o,    (int)(c.o / c.groups)};
}

template <int kSize>
int64_t Strips(const Planes& p) {
  return (int64_t)p.count * CeilDiv(p.out_h, kStrip<kSize>) * p.out_w;
}

bool StripForward(const ConvCall& at, const Conv& c, const float* x, const float* f,
                  const float* bias, float* y) {
  return WithStrips(c, c.stride, [&](auto size, auto stride) {
    const Planes p = PlanesOf(c);
    const int64_t items = Strips<size>(p);
    Launch(at.op, StripKernel<size, stride>, Blocks(items), kThreads, 0, at.stream, p, x, f, false,
           bias, y, items);
  });
}

// At stride 1 the correlation of dy with the rotated filters, at stride 2 a kernel of its own.
bool StripDataGradient(const ConvCall& at, const Conv& c, const float* f, const float* dy,
                       float* dx) {
  if (c.o != c.c || c.kernel.h <= c.pad.h || c.kernel.w <= c.pad.w) return false;
  Planes p{(int)(c.n * c.c), (int)c.out.h, (int)c.out.w,
           (int)c.in.h,      (int)c.in.w,  (int)c.pad.h,
           (int)c.pad.w,     (int)c.c,     1};
  return WithStrips(c, c.stride, [&](auto size, auto stride) {
    if constexpr (stride == 1) {
      p.pad_h = size - 1 - p.pad_h, p.pad_w = size - 1 - p.pad_w;
      const int64_t items = Strips<size>(p);
      Launch(at.op, StripKernel<size, stride>, Blocks(items), kThreads, 0, at.stream, p, dy, f,
             true, (const float*)nullptr, dx, items);
    } else {
      const int64_t items = (int64_t)p.count * CeilDiv(p.out_h + p.pad_h, kGradientStrip) * p.out_w;
      Launch(at.op, StridedGradientKernel<size>, Blocks(items), kThreads, 0, at.stream, p, dy, f,
             dx, items);
    }
  });
}

// Splits the images so that every multiprocessor has blocks for `elements` sums.
int64_t ImagesOfSplit(const ConvCall& at, const Conv& c, int64_t elements) {
  const int64_t wanted = CeilDiv(8 * Multiprocessors(at.ctx.device_id), elements);
  return CeilDiv(c.n, std::max<int64_t>(1, std::min(wanted, c.n)));
}

// Calls run(partial) for `splits` of df, and adds them behind it.
template <class Run>
void InSplits(const ConvCall& at, int64_t splits, int64_t numel, float* df, Run&& run) {
  if (splits == 1) return run(df);
  const Scratch partial(at.ctx, splits * numel * (int64_t)sizeof(float), at.stream);
  run(partial.floats());
  SumAxis(at.op, at.ctx, partial.floats(), 1, splits, numel, 1.f, df, at.stream);
}

bool StripFilterGradient(const ConvCall& at, const Conv& c, const float* x, const float* dy,
                         float* df) {
  if (c.n == 0) return false;
  return WithStrips(c, c.stride, [&](auto size, auto stride) {
    const Planes p = PlanesOf(c);
    const int64_t images = ImagesOfSplit(at, c, c.o), splits = CeilDiv(c.n, images);
    InSplits(at, splits, c.o * size * size, df, [&](float* to) {
      Launch(at.op, StripFilterKernel<size, stride>, (unsigned)(splits * c.o), kThreads, 0,
             at.stream, p, x, dy, to, (int)images);
    });
  });
}

void DepthwiseForward(const ConvCall& at, const Conv& c, const float* x, const float* f,
                      const float* bias, float* y) {
  CheckSizes(at.op, c);
  if (StripForward(at, c, x, f, bias, y)) return;
  const int64_t numel = c.n * c.o * Size(c.out);
  Launch(at.op, ForwardKernel, Blocks(numel), kThreads, 0, at.stream, c, x, f, bias, y, numel);
}

void DepthwiseDataGradient(const ConvCall& at, const Conv& c, const float* f, const float* dy,
                           float* dx) {
  CheckSizes(at.op, c);
  if (StripDataGradient(at, c, f, dy, dx)) return;
  const int64_t numel = c.n * c.c * Size(c.in);
  Launch(at.op, DataGradientKernel, Blocks(numel), kThreads, 0, at.stream, c, f, dy, dx, numel);
}

void DepthwiseFilterGradient(const ConvCall& at, const Conv& c, const float* x, const float* dy,
                             float* df) {
  CheckSizes(at.op, c);
  if (StripFilterGradient(at, c, x, dy, df)) return;
  const int64_t elements = c.o * Size(c.kernel);
  if (elements > kMaxBlocks)
    Fail("%s: a filter of more than %ld elements", at.op, (long)kMaxBlocks);
  const int64_t images = ImagesOfSplit(at, c, elements), splits = c.n ? CeilDiv(c.n, images) : 1;
  InSplits(at, splits, elements, df, [&](float* to) {
    Launch(at.op, FilterGradientKernel, (unsigned)(splits * elements), kThreads, 0, at.stream, c, x,
           dy, to, images);
  });
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
