// Depthwise convolution with channels last, direct: a channel meets its own filter alone, so there
// is no product, and memory bandwidth is the limit. channels_last/depthwise.cuh has the contract.
//
// Square filters of 3, 5 and 7 at stride 1 and 2, channels by four: a thread goes down the rows of
// a strip for four channels and a few results side by side. It loads a row of what it reads while
// it multiplies the one before, and adds it to all results that meet it, so that only the columns
// between threads and the rows between strips are read twice. For the filter a thread sums all
// elements of four channels, a block adds its threads, and the parts of blocks are added in a fixed
// order. Of other convolutions a thread gathers one element of y or dx, a block sums one of df for
// 32 filters.
#include <algorithm>
#include <type_traits>

#include "cuda/conv/channels_last/depthwise.cuh"
#include "cuda/conv/channels_last/parts.cuh"
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {
namespace {

constexpr int kQuads = 32;  // of channels, at most, that the threads of a block have side by side

__device__ __forceinline__ void MultiplyAdd(float4& sum, const float4& a, const float4& b) {
  sum.x = fmaf(a.x, b.x, sum.x), sum.y = fmaf(a.y, b.y, sum.y);
  sum.z = fmaf(a.z, b.z, sum.z), sum.w = fmaf(a.w, b.w, sum.w);
}

// ---- strips ----

// Columns side by side of a thread, of x or dx, of which dy has fewer at a stride; those of dy in
// the gradient of a filter; and blocks at once on a multiprocessor, which bounds registers.
constexpr int kCols = 4, kOfFilter = 2;
template <int kSize>
constexpr int kBlocks = kSize == 3 ? 2 : 1;

// Images (n, from) are read, results (n, to) are made in strips of `rows` steps; the threads of a
// block are `lines` items by `lanes` quads of channels.
struct Task {
  int from_h, from_w, to_h, to_w, pad_h, pad_w, channels;
  int lanes, lines, steps, rows, items;  // steps of a column of results
  Divisor by_lanes, by_chunks, by_groups, by_strips;
};

// What a thread has of an item: channels from c on, an image, the strip's first step and the group
// of columns.
struct Place {
  int c, image, top, group;
};
__device__ __forceinline__ int LineOf(const Task& p) { return (int)threadIdx.x / p.by_lanes; }
__device__ __forceinline__ int BlockOf(const Task& p) { return (int)blockIdx.x / p.by_chunks; }
// The first channel of the block, and this thread's among them.
__device__ __forceinline__ int FirstChannel(const Task& p) {
  return ((int)blockIdx.x - BlockOf(p) * (int)p.by_chunks.value) * p.lanes * 4;
}
__device__ __forceinline__ int OwnChannel(const Task& p) {
  return ((int)threadIdx.x - LineOf(p) * p.lanes) * 4;
}
__device__ __forceinline__ Place PlaceOf(const Task& p, int item) {
  const int strip_of_all = item / p.by_groups, group = item - strip_of_all * (int)p.by_groups.value;
  const int image = strip_of_all / p.by_strips;
  const int strip = strip_of_all - image * (int)p.by_strips.value;
  return {FirstChannel(p) + OwnChannel(p), image, strip * p.rows, group};
}

// Quads of kWidth columns of an image, row after row, zeros outside. The next row is in flight.
template <class T, int kWidth>
class Rows {
 public:
  // Rows from `top` on and below `end`; `image` is at its first channel.
  __device__ Rows(const T* image, int height, int width, int channels, int top, int left, int end)
      : from_(image + ((int64_t)top * width + left) * channels),
        pitch_(width * channels),
        channels_(channels),
        row_(top),
        end_(min(height, end)) {
#pragma unroll
    for (int j = 0; j < kWidth; j++)
      columns_ |= (unsigned)((unsigned)(left + j) < (unsigned)width) << j;
    Load();
  }
  __device__ __forceinline__ void Take(float4 (&row)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; j++) row[j] = Floats(next_[j]);
    Load();
  }

 private:
  using Bits = std::conditional_t<sizeof(T) == 4, float4, int2>;
  static __device__ __forceinline__ float4 Floats(const float4& bits) { return bits; }
  static __device__ __forceinline__ float4 Floats(const int2& bits) {
    T values[4];
    memcpy(values, &bits, sizeof bits);
    return make_float4((float)values[0], (float)values[1], (float)values[2], (float)values[3]);
  }
  __device__ __forceinline__ void Load() {
    const unsigned columns = row_ >= 0 && row_ < end_ ? columns_ : 0;
    if (columns == (1u << kWidth) - 1) {
#pragma unroll
      for (int j = 0; j < kWidth; j++) next_[j] = *(const Bits*)(from_ + j * channels_);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; j++)
        next_[j] = columns >> j & 1 ? *(const Bits*)(from_ + j * channels_) : Bits{};
    }
    from_ += pitch_, row_++;
  }

  const T* from_;
  int pitch_, channels_, row_, end_;
  unsigned columns_ = 0;
  Bits next_[kWidth];
};

// The filters of a block in shared memory, (kSize * kSize, lanes * 4).
template <int kSize>
class Filters {
 public:
  template <class T>
  __device__ Filters(const Task& p, const T* f) : pitch_(p.lanes * 4) {
    constexpr int kKernel = kSize * kSize;
    float* const shared = DynamicShared<float>();
    const int first = FirstChannel(p), count = min(pitch_, p.channels - first) * kKernel;
    for (int k = (int)threadIdx.x; k < count; k += (int)blockDim.x) {
      const int c = k / kKernel;
      shared[(k - c * kKernel) * pitch_ + c] = (float)f[first * kKernel + k];
    }
    __syncthreads();
    own_ = shared + OwnChannel(p);
  }
  // Keeps the compiler from holding all of them in registers.
  __device__ __forceinline__ void BeginRow() const { asm volatile("" ::: "memory"); }
  __device__ __forceinline__ float4 At(int k) const { return *(const float4*)(own_ + k * pitch_); }

 private:
  int pitch_;
  const float* own_;
};

// ---- forward ----

// Of the blocks of a grid: the moments of what each stored, (blocks, channels), and of how many
// positions they are.
struct OfBlocks {
  float2* moments;
  int* counts;
};

// Moments of four channels of what a thread stores, as deviations from its first result.
struct QuadMoments {
  float4 shift = {}, sums = {}, squares = {};
  int count = 0;

  __device__ __forceinline__ void Add(const float4& v) {
    if (count++ == 0) shift = v;
    const float4 d = make_float4(v.x - shift.x, v.y - shift.y, v.z - shift.z, v.w - shift.w);
    sums.x += d.x, sums.y += d.y, sums.z += d.z, sums.w += d.w;
    MultiplyAdd(squares, d, d);
  }
};
__device__ __forceinline__ float2 MeanAndSquares(float shift, float sum, float square, int count) {
  const float mean = sum / (float)max(count, 1);
  return make_float2(shift + mean, fmaf(-sum, mean, square));
}

// Combines the threads of a block by channel, line by line (Chan, Golub and LeVeque 1979). Means
// are deviations from the first thread's shift until they are stored.
__device__ __forceinline__ void StoreMoments(const Task& p, const QuadMoments& m,
                                             const OfBlocks& to) {
  const int width = p.lanes * 4, line = LineOf(p), own = OwnChannel(p);
  float* const origins = DynamicShared<float>();      // (lanes * 4)
  float2* const shared = (float2*)(origins + width);  // (lines, lanes * 4)
  int* const counts = (int*)(shared + p.lines * width);
  __syncthreads();  // the filters have been read
  if (line == 0) *(float4*)(origins + own) = m.shift;
  if (own == 0) counts[line] = m.count;
  __syncthreads();
  const float4 origin = *(const float4*)(origins + own);
  float2* const at = shared + line * width + own;
  at[0] = MeanAndSquares(m.shift.x - origin.x, m.sums.x, m.squares.x, m.count);
  at[1] = MeanAndSquares(m.shift.y - origin.y, m.sums.y, m.squares.y, m.count);
  at[2] = MeanAndSquares(m.shift.z - origin.z, m.sums.z, m.squares.z, m.count);
  at[3] = MeanAndSquares(m.shift.w - origin.w, m.sums.w, m.squares.w, m.count);
  __syncthreads();
  const int first = FirstChannel(p);
  for (int c = (int)threadIdx.x; c < min(width, p.channels - first); c += (int)blockDim.x) {
    float2 all = shared[c];
    float count = (float)counts[0];
    for (int other = 1; other < p.lines && counts[other] > 0; other++) {
      const float2 more = shared[other * width + c];
      const float of_more = (float)counts[other], sum = count + of_more, d = more.x - all.x;
      all.x += d * (of_more / sum);
      all.y += more.y + d * d * (count * of_more / sum);
      count = sum;
    }
    all.x += origins[c];
    to.moments[(int64_t)BlockOf(p) * p.channels + first + c] = all;
    if (first + c == 0) to.counts[BlockOf(p)] = (int)count;
  }
}

template <class T, int kSize, int kStride, bool kMoments>
__global__ void __launch_bounds__(kThreads, kBlocks<kSize>)
    ForwardKernel(const __grid_constant__ Task p, const T* x, const T* f, const T* bias, T* y,
                  OfBlocks of_blocks) {
  constexpr int kLive = (kSize + kStride - 1) / kStride;  // rows of results that a row of x meets
  constexpr int kMade = kCols / kStride, kWidth = (kMade - 1) * kStride + kSize;
  const Filters<kSize> filters(p, f);
  const int item = BlockOf(p) * p.lines + LineOf(p);
  const Place at = PlaceOf(p, item);
  QuadMoments moments;
  if (item < p.items && at.c < p.channels) {
    const int count = min(p.rows, p.steps - at.top), top = at.top * kStride - p.pad_h;
    const int col = at.group * kMade;
    Rows<T, kWidth> rows(x + (int64_t)at.image * p.from_h * p.from_w * p.channels + at.c, p.from_h,
                         p.from_w, p.channels, top, col * kStride - p.pad_w,
                         top + (count - 1) * kStride + kSize);
    const float4 none = bias ? LoadQuad(bias + at.c) : float4{};
    T* to = y + (((int64_t)at.image * p.to_h + at.top) * p.to_w + col) * p.channels + at.c;
    float4 sums[kLive][kMade] = {};
#pragma unroll 1
    for (int step = 1 - kLive; step < count; step++) {
#pragma unroll
      for (int i = 0; i < kStride; i++) {
        float4 row[kWidth];
        rows.Take(row);
        filters.BeginRow();
        // The last results first, so that all others take the registers of those before them.
#pragma unroll
        for (int m = kLive - 1; m >= 0; m--) {
          const int a = m * kStride + i;
          float4 made[kMade];
#pragma unroll
          for (int e = 0; e < kMade; e++) made[e] = i == 0 && m == 0 ? none : sums[m][e];
#pragma unroll
          for (int b = 0; a < kSize && b < kSize; b++) {
            const float4 by = filters.At(a * kSize + b);
#pragma unroll
            for (int e = 0; e < kMade; e++) MultiplyAdd(made[e], by, row[e * kStride + b]);
          }
#pragma unroll
          for (int e = 0; e < kMade; e++) {
            if (i < kStride - 1) {
              sums[m][e] = made[e];
            } else if (m < kLive - 1) {
              sums[m + 1][e] = made[e];
            } else if (step >= 0 && col + e < p.to_w) {
              StoreQuad(to + e * p.channels, made[e]);
              if constexpr (kMoments)
                moments.Add(make_float4((float)T(made[e].x), (float)T(made[e].y),
                                        (float)T(made[e].z), (float)T(made[e].w)));
            }
          }
        }
      }
      if (step >= 0) to += p.to_w * p.channels;
    }
  }
  if constexpr (kMoments) StoreMoments(p, moments, of_blocks);
}

// ---- data gradient ----

// A step reads a row of dy and completes kStride rows of dx. The columns of a thread begin where an
// element meets the filter's first column, so that it is known when compiling which meet which.
template <class T, int kSize, int kStride>
__global__ void __launch_bounds__(kThreads, kBlocks<kSize>)
    DataGradientKernel(const __grid_constant__ Task p, const T* f, const T* dy, T* dx) {
  constexpr int kMet = (kSize + kStride - 1) / kStride;  // columns of dy that an element meets
  constexpr int kRead = kCols / kStride, kWidth = kRead + kMet - 1;
  const Filters<kSize> filters(p, f);
  const int item = BlockOf(p) * p.lines + LineOf(p);
  const Place at = PlaceOf(p, item);
  if (item >= p.items || at.c >= p.channels) return;
  const int count = min(p.rows, p.steps - at.top);
  const int top = at.top + p.pad_h / kStride, left = at.group * kRead + p.pad_w / kStride;
  Rows<T, kWidth> rows(dy + (int64_t)at.image * p.from_h * p.from_w * p.channels + at.c, p.from_h,
                       p.from_w, p.channels, top + 1 - kMet, left + 1 - kMet, top + count);
  const int h0 = top * kStride - p.pad_h, w0 = left * kStride - p.pad_w;
  T* const to = dx + (((int64_t)at.image * p.to_h + h0) * p.to_w + w0) * p.channels + at.c;
  float4 sums[kSize][kCols] = {};
#pragma unroll 1
  for (int step = 1 - kMet; step < count; step++) {
    float4 row[kWidth];
    rows.Take(row);
    filters.BeginRow();
#pragma unroll
    for (int a = 0; a < kSize; a++) {
      float4 made[kCols];
#pragma unroll
      for (int e = 0; e < kCols; e++) made[e] = a < kSize - kStride ? sums[a][e] : float4{};
#pragma unroll
      for (int b = 0; b < kSize; b++) {
        const float4 by = filters.At(a * kSize + b);
#pragma unroll
        for (int e = 0; e < kRead; e++)
          MultiplyAdd(made[e * kStride + b % kStride], by, row[e + kMet - 1 - b / kStride]);
      }
      const int row_of_dx = step * kStride + a;
      const bool exists = step >= 0 && (unsigned)(h0 + row_of_dx) < (unsigned)p.to_h;
#pragma unroll
      for (int e = 0; e < kCols; e++) {
        if (a >= kStride)
          sums[a >= kStride ? a - kStride : 0][e] = made[e];
        else if (exists && (unsigned)(w0 + e) < (unsigned)p.to_w)
          StoreQuad(to + ((int64_t)row_of_dx * p.to_w + e) * p.channels, made[e]);
      }
    }
  }
}

// ---- filter gradient ----

// Rows of a filter that a block sums, as many as registers hold.
template <int kSize>
constexpr int kTall = kSize == 7 ? 4 : kSize;

// parts (blocks, kSize, kSize, channels). The grid has all blocks for each kTall rows of a filter.
template <class T, int kSize, int kStride>
__global__ void __launch_bounds__(kThreads, kBlocks<kSize>)
    FilterGradientKernel(const __grid_constant__ Task p, const T* x, const T* dy, float* parts,
                         Divisor by_blocks) {
  constexpr int kRows = kTall<kSize>;
  constexpr int kLive = (kRows + kStride - 1) / kStride;
  constexpr int kWidth = (kOfFilter - 1) * kStride + kSize;
  const int pass = BlockOf(p) / by_blocks, blocks = (int)by_blocks.value;
  const int block = BlockOf(p) - pass * blocks;
  const int line = LineOf(p), own = OwnChannel(p), first_row = pass * kRows;
  const bool exists = FirstChannel(p) + own < p.channels;
  float4 sums[kRows][kSize] = {};
#pragma unroll 1
  for (int item = block * p.lines + line; exists && item < p.items; item += blocks * p.lines) {
    const Place at = PlaceOf(p, item);
    const int count = min(p.rows, p.steps - at.top), col = at.group * kOfFilter;
    const int top = at.top * kStride - p.pad_h + first_row;
    Rows<T, kWidth> rows(x + (int64_t)at.image * p.from_h * p.from_w * p.channels + at.c, p.from_h,
                         p.from_w, p.channels, top, col * kStride - p.pad_w,
                         top + (count - 1) * kStride + kRows);
    Rows<T, kOfFilter> gradients(dy + (int64_t)at.image * p.to_h * p.to_w * p.channels + at.c,
                                 p.to_h, p.to_w, p.channels, at.top, col, at.top + count);
    float4 met[kLive][kOfFilter] = {};
#pragma unroll 1
    for (int step = 1 - kLive; step < count; step++) {
#pragma unroll
      for (int m = kLive - 1; m > 0; m--)
#pragma unroll
        for (int e = 0; e < kOfFilter; e++) met[m][e] = met[m - 1][e];
      gradients.Take(met[0]);
#pragma unroll
      for (int j = 0; j < kStride; j++) {
        float4 row[kWidth];
        rows.Take(row);
#pragma unroll
        for (int m = 0; m < kLive; m++) {
          const int a = m * kStride + j;
          if (a >= kRows) continue;
#pragma unroll
          for (int b = 0; b < kSize; b++)
#pragma unroll
            for (int e = 0; e < kOfFilter; e++)
              MultiplyAdd(sums[a][b], met[m][e], row[e * kStride + b]);
        }
      }
    }
  }
  const int width = p.lanes * 4, first = FirstChannel(p), count = min(width, p.channels - first);
  float* const shared = DynamicShared<float>();  // (lines, kSize, lanes * 4)
#pragma unroll
  for (int a = 0; a < kRows; a++) {
    __syncthreads();
#pragma unroll
    for (int b = 0; b < kSize; b++)
      *(float4*)(shared + (line * kSize + b) * width + own) = sums[a][b];
    __syncthreads();
    for (int k = (int)threadIdx.x; k < kSize * width; k += (int)blockDim.x) {
      float sum = 0.f;
      for (int other = 0; other < p.lines; other++) sum += shared[other * kSize * width + k];
      const int b = k / width, c = k - b * width;
      if (c < count && first_row + a < kSize)
        parts[(((int64_t)block * kSize + first_row + a) * kSize + b) * p.channels + first + c] =
            sum;
    }
  }
}

constexpr int kAdders = 1024;  // threads of 32 elements

// df (filters, kernel) = the sum of parts (count, kernel, filters).
template <class T>
__global__ void __launch_bounds__(kAdders)
    AddInOrderKernel(const float* parts, T* df, int count, int kernel, int filters) {
  __shared__ float sums[kAdders / 32][32];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int k = (int)blockIdx.x * 32 + lane, numel = kernel * filters;
  GridDependencySynchronize();
  float sum = 0.f;
  if (k < numel) {
#pragma unroll 8
    for (int part = warp; part < count; part += kAdders / 32)
      sum += parts[(int64_t)part * numel + k];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || k >= numel) return;
#pragma unroll
  for (int other = 1; other < kAdders / 32; other++) sum += sums[other][lane];
  df[k % filters * kernel + k / filters] = T(sum);
}

// ---- any window ----

// Images (n, in, channels) and (n, out, filters), of which `multiple` filters read a channel.
struct Windows {
  int in_h, in_w, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
  int dilation_h, dilation_w, channels, filters, multiple;
  int64_t items;
  Divisor by_channels, by_w, by_h, by_stride_h, by_stride_w;  // of the items' images
};
struct Item {
  int image, h, w, c;
};
__device__ __forceinline__ Item ItemOf(const Windows& p, int64_t k) {
  const int64_t position = k / p.by_channels.value;
  const int c = (int)(k - position * p.by_channels.value);
  const int line = (int)position / p.by_w, image = line / p.by_h;
  return {image, line - image * (int)p.by_h.value, (int)position - line * (int)p.by_w.value, c};
}

template <class T>
__global__ void GatherKernel(const __grid_constant__ Windows p, const T* x, const T* f,
                             const T* bias, T* y) {
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item at = ItemOf(p, k);
    const T* const from = x + (int64_t)at.image * p.in_h * p.in_w * p.channels + at.c / p.multiple;
    const T* filter = f + (int64_t)at.c * p.kernel_h * p.kernel_w;
    float sum = bias ? (float)bias[at.c] : 0.f;
    for (int a = 0; a < p.kernel_h; a++) {
      const int h = at.h * p.stride_h - p.pad_h + a * p.dilation_h;
      for (int b = 0; b < p.kernel_w; b++, filter++) {
        const int w = at.w * p.stride_w - p.pad_w + b * p.dilation_w;
        if ((unsigned)h < (unsigned)p.in_h && (unsigned)w < (unsigned)p.in_w)
          sum = fmaf((float)*filter, (float)from[((int64_t)h * p.in_w + w) * p.channels], sum);
      }
    }
    y[k] = T(sum);
  }
}

template <class T>
__global__ void GatherGradientKernel(const __grid_constant__ Windows p, const T* f, const T* dy,
                                     T* dx) {
  for (int64_t k = FirstItem(); k < p.items; k += ItemStep()) {
    const Item at = ItemOf(p, k);
    const T* const from = dy + (int64_t)at.image * p.out_h * p.out_w * p.filters;
    float sum = 0.f;
    for (int o = at.c * p.multiple; o < (at.c + 1) * p.multiple; o++) {
      const T* filter = f + (int64_t)o * p.kernel_h * p.kernel_w;
      for (int a = 0; a < p.kernel_h; a++) {
        const int down = at.h + p.pad_h - a * p.dilation_h;
        for (int b = 0; b < p.kernel_w; b++, filter++) {
          const int across = at.w + p.pad_w - b * p.dilation_w;
          if (down < 0 || across < 0) continue;
          const int i = down / p.by_stride_h, j = across / p.by_stride_w;
          if (i * p.stride_h == down && j * p.stride_w == across && i < p.out_h && j < p.out_w)
            sum =
                fmaf((float)*filter, (float)from[((int64_t)i * p.out_w + j) * p.filters + o], sum);
        }
      }
    }
    dx[k] = T(sum);
  }
}

// parts (splits, kernel, filters): a block sums an element of 32 filters over the positions of a
// split.
template <class T>
__global__ void __launch_bounds__(kThreads)
    GatherFilterKernel(const __grid_constant__ Windows p, const T* x, const T* dy, float* parts,
                       int runs, int positions, int slice) {
  __shared__ float sums[kThreads / 32][32];
  const int lane = (int)threadIdx.x % 32, line = (int)threadIdx.x / 32;
  const int kernel = p.kernel_h * p.kernel_w, run = (int)blockIdx.x % runs;
  const int element = (int)blockIdx.x / runs % kernel, split = (int)blockIdx.x / runs / kernel;
  const int o = run * 32 + lane, end = min(positions, (split + 1) * slice);
  const int down = element / p.kernel_w * p.dilation_h - p.pad_h;
  const int across = element % p.kernel_w * p.dilation_w - p.pad_w;
  float sum = 0.f;
  for (int k = split * slice + line; o < p.filters && k < end; k += kThreads / 32) {
    const int row = k / p.by_w, image = row / p.by_h;
    const int h = (row - image * p.out_h) * p.stride_h + down;
    const int w = (k - row * p.out_w) * p.stride_w + across;
    if ((unsigned)h >= (unsigned)p.in_h || (unsigned)w >= (unsigned)p.in_w) continue;
    const int64_t pixel = ((int64_t)image * p.in_h + h) * p.in_w + w;
    sum = fmaf((float)dy[(int64_t)k * p.filters + o], (float)x[pixel * p.channels + o / p.multiple],
               sum);
  }
  sums[line][lane] = sum;
  __syncthreads();
  if (line > 0 || o >= p.filters) return;
#pragma unroll
  for (int other = 1; other < kThreads / 32; other++) sum += sums[other][lane];
  parts[((int64_t)split * kernel + element) * p.filters + o] = sum;
}

// ---- launchers ----

// Calls run(std::integral_constant of the size, of the stride) where there are strips for arrays at
// these addresses, and says whether.
template <class Run>
bool WithStrips(const Conv& c, const void* x, const void* y, Run&& run) {
  const HW one{1, 1}, two{2, 2};
  const bool fits = c.o == c.c && c.c % 4 == 0 && c.kernel.h == c.kernel.w && c.dilation == one &&
                    (c.stride == one || c.stride == two) && Aligned16(x) && Aligned16(y);
  if (!fits) return false;
  const auto with_size = [&](auto size) {
    if (c.stride == one)
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

// The task of `steps` rows in groups of `cols` of `columns`, in strips that leave few of `on_each`
// blocks a multiprocessor idle; a strip reads `more` rows beside those of its steps.
Task TaskOf(const Call& at, const Conv& c, HW from, HW to, int64_t steps, int64_t columns,
            int64_t more, int cols, int on_each) {
  Task p{};
  p.from_h = (int)from.h, p.from_w = (int)from.w, p.to_h = (int)to.h, p.to_w = (int)to.w;
  p.pad_h = (int)c.pad.h, p.pad_w = (int)c.pad.w, p.channels = (int)c.c;
  const int64_t quads = c.c / 4, chunks = CeilDiv(quads, kQuads), lanes = CeilDiv(quads, chunks);
  const int64_t lines = kThreads / lanes, groups = CeilDiv(columns, cols);
  const int64_t at_once = (int64_t)on_each * Multiprocessors(at.ctx.device_id);
  int64_t least = INT64_MAX, rows = steps;
  for (int64_t strips = 1; strips <= CeilDiv(steps, 4); strips++) {
    const int64_t tall = CeilDiv(steps, strips);
    const int64_t blocks = chunks * CeilDiv(c.n * CeilDiv(steps, tall) * groups, lines);
    const int64_t cost = CeilDiv(blocks, at_once) * (tall + more + 1);
    if (cost < least) least = cost, rows = tall;
  }
  const int64_t strips = CeilDiv(steps, rows);
  p.lanes = (int)lanes, p.lines = (int)lines, p.steps = (int)steps, p.rows = (int)rows;
  p.items = (int)(c.n * strips * groups);
  p.by_lanes = Divisor(lanes), p.by_chunks = Divisor(chunks);
  p.by_groups = Divisor(groups), p.by_strips = Divisor(strips);
  return p;
}
int64_t BlocksOf(const Task& p) { return CeilDiv(p.items, p.lines); }
unsigned ThreadsOf(const Task& p) { return (unsigned)(p.lanes * p.lines); }
size_t FilterNbytes(const Task& p, int size) {
  return (size_t)(size * size * p.lanes * 4) * sizeof(float);
}

template <class T>
bool StripForward(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y,
                  const Statistics* statistics) {
  if (!Aligned16(bias)) return false;
  return WithStrips(c, x, y, [&](auto size, auto stride) {
    const Task p = TaskOf(at, c, c.in, c.out, c.out.h, c.out.w, (size + stride - 1) / stride - 1,
                          kCols / stride, kBlocks<size>);
    const int64_t blocks = BlocksOf(p);
    const unsigned grid = (unsigned)(blocks * p.by_chunks.value);
    const size_t of_filters = FilterNbytes(p, size);
    if (!statistics)
      return Launch(at.op, ForwardKernel<T, size, stride, false>, grid, ThreadsOf(p), of_filters,
                    at.stream, p, x, f, bias, y, OfBlocks{});
    const Scratch moments(at.ctx, blocks * c.c * (int64_t)sizeof(float2), at.stream);
    const Scratch counts(at.ctx, blocks * (int64_t)sizeof(int), at.stream);
    const size_t of_moments =
        (size_t)p.lines * ((size_t)p.lanes * 4 * sizeof(float2) + sizeof(int)) +
        (size_t)p.lanes * 4 * sizeof(float);
    const OfBlocks of_blocks{(float2*)moments.data(), (int*)counts.data()};
    Launch(at.op, ForwardKernel<T, size, stride, true>, grid, ThreadsOf(p),
           std::max(of_filters, of_moments), at.stream, p, x, f, bias, y, of_blocks);
    CombineMoments(at.op, at.ctx, of_blocks.moments, of_blocks.counts, c.n * Size(c.out), blocks,
                   c.c, statistics->mean, statistics->variance, at.stream);
  });
}

// Steps from the first that completes elements of dx on.
int64_t GradientSteps(int64_t in, int64_t pad, int64_t stride) {
  return (in - 1 + pad) / stride - pad / stride + 1;
}

template <class T>
bool StripDataGradient(const Call& at, const Conv& c, const T* f, const T* dy, T* dx) {
  return WithStrips(c, dx, dy, [&](auto size, auto stride) {
    const int64_t steps = GradientSteps(c.in.h, c.pad.h, stride);
    const int64_t columns = GradientSteps(c.in.w, c.pad.w, stride);
    const Task p = TaskOf(at, c, c.out, c.in, steps, columns, (size + stride - 1) / stride - 1,
                          kCols / stride, kBlocks<size>);
    Launch(at.op, DataGradientKernel<T, size, stride>, (unsigned)(BlocksOf(p) * p.by_chunks.value),
           ThreadsOf(p), FilterNbytes(p, size), at.stream, p, f, dy, dx);
  });
}

template <class T>
bool StripFilterGradient(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  return WithStrips(c, x, dy, [&](auto size, auto stride) {
    constexpr int kRows = kTall<size>;
    const int64_t passes = CeilDiv(size, kRows);
    const Task p = TaskOf(at, c, c.in, c.out, c.out.h, c.out.w, (kRows + stride - 1) / stride - 1,
                          kOfFilter, kBlocks<size>);
    const int64_t chunks = p.by_chunks.value;
    const int64_t wanted = kBlocks<size> * Multiprocessors(at.ctx.device_id) / (chunks * passes);
    const int64_t blocks = std::max<int64_t>(1, std::min(wanted, BlocksOf(p)));
    const int64_t numel = c.c * Size(c.kernel);
    const Scratch parts(at.ctx, blocks * numel * (int64_t)sizeof(float), at.stream);
    Launch(at.op, FilterGradientKernel<T, size, stride>, (unsigned)(blocks * passes * chunks),
           ThreadsOf(p), (size_t)(p.lines * size * p.lanes * 4) * sizeof(float), at.stream, p, x,
           dy, parts.floats(), Divisor(blocks));
    AddInOrder(at, parts.floats(), blocks, size * size, c.c, df);
  });
}

// `of` are the images that threads go over, of `channels` channels.
Windows WindowsOf(const Conv& c, HW of, int64_t channels) {
  Windows p{};
  p.in_h = (int)c.in.h, p.in_w = (int)c.in.w, p.out_h = (int)c.out.h, p.out_w = (int)c.out.w;
  p.kernel_h = (int)c.kernel.h, p.kernel_w = (int)c.kernel.w;
  p.stride_h = (int)c.stride.h, p.stride_w = (int)c.stride.w;
  p.pad_h = (int)c.pad.h, p.pad_w = (int)c.pad.w;
  p.dilation_h = (int)c.dilation.h, p.dilation_w = (int)c.dilation.w;
  p.channels = (int)c.c, p.filters = (int)c.o, p.multiple = (int)c.GroupFilters();
  p.items = c.n * Size(of) * channels;
  p.by_channels = Divisor(channels), p.by_w = Divisor(of.w), p.by_h = Divisor(of.h);
  p.by_stride_h = Divisor(c.stride.h), p.by_stride_w = Divisor(c.stride.w);
  return p;
}

}  // namespace

template <class T>
void AddInOrder(const Call& at, const float* parts, int64_t count, int64_t kernel, int64_t filters,
                T* df) {
  LaunchClusters(at.op, AddInOrderKernel<T>, (unsigned)CeilDiv(kernel * filters, 32), 1, kAdders, 0,
                 ComputeMajor(at.ctx.device_id) >= 9, at.stream, parts, df, (int)count, (int)kernel,
                 (int)filters);
}

bool IsDepthwise(const Conv& c) {
  constexpr int64_t kMost = int64_t(1) << 30;
  return c.Depthwise() && c.n * Size(c.in) < kMost && c.n * Size(c.out) < kMost &&
         std::max(c.in.w, c.out.w) * c.o < kMost && c.o * Size(c.kernel) < kMost &&
         Size(c.kernel) > 0;
}

template <class T>
void DepthwiseForward(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y,
                      const Statistics* statistics) {
  if (StripForward(at, c, x, f, bias, y, statistics)) return;
  const Windows p = WindowsOf(c, c.out, c.o);
  Launch(at.op, GatherKernel<T>, Blocks(p.items), kThreads, 0, at.stream, p, x, f, bias, y);
  if (statistics)
    ChannelStatistics(at.op, at.ctx, y, Channels(c.n * Size(c.out), c.o, 1), statistics->mean,
                      statistics->variance, at.stream);
}

template <class T>
void DepthwiseDataGradient(const Call& at, const Conv& c, const T* f, const T* dy, T* dx) {
  if (StripDataGradient(at, c, f, dy, dx)) return;
  const Windows p = WindowsOf(c, c.in, c.c);
  Launch(at.op, GatherGradientKernel<T>, Blocks(p.items), kThreads, 0, at.stream, p, f, dy, dx);
}

template <class T>
void DepthwiseFilterGradient(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  if (StripFilterGradient(at, c, x, dy, df)) return;
  const Windows p = WindowsOf(c, c.out, c.o);
  const int64_t runs = CeilDiv(c.o, 32), kernel = Size(c.kernel), positions = c.n * Size(c.out);
  const int64_t wanted = 8 * Multiprocessors(at.ctx.device_id) / (runs * kernel);
  const int64_t splits = std::max<int64_t>(1, std::min(wanted, CeilDiv(positions, kThreads)));
  if (splits * runs * kernel > INT32_MAX)
    Fail("%s: a filter of more than %ld elements", at.op, (long)INT32_MAX);
  const Scratch parts(at.ctx, splits * c.o * kernel * (int64_t)sizeof(float), at.stream);
  Launch(at.op, GatherFilterKernel<T>, (unsigned)(splits * runs * kernel), kThreads, 0, at.stream,
         p, x, dy, parts.floats(), (int)runs, (int)positions, (int)CeilDiv(positions, splits));
  AddInOrder(at, parts.floats(), splits, kernel, c.o, df);
}

#define DLSYS_DEPTHWISE(T)                                                                   \
  template void DepthwiseForward(const Call&, const Conv&, const T*, const T*, const T*, T*, \
                                 const Statistics*);                                         \
  template void DepthwiseDataGradient(const Call&, const Conv&, const T*, const T*, T*);     \
  template void DepthwiseFilterGradient(const Call&, const Conv&, const T*, const T*, T*);   \
  template void AddInOrder(const Call&, const float*, int64_t, int64_t, int64_t, T*)
DLSYS_DEPTHWISE(float);
DLSYS_DEPTHWISE(bfloat16);
DLSYS_DEPTHWISE(float16);
#undef DLSYS_DEPTHWISE

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
