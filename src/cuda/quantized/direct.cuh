// Quantized convolutions of few channels, whose windows an implicit GEMM would gather byte by byte:
// a block makes some outputs of one image. It keeps the image's bytes in a frame of what stands for
// 0, quantized on their way where the image is of floats, which may lie in memory of the host. A
// row of a window is bytes in a row, and so is its part of a filter: both are shifted into words
// for dp4a. A thread sums one position of one output, or one row of it, in shared memory: sums of
// integers have no order. Pooling, bounds and requantization follow. Filters, biases and
// multipliers are on their way before the predecessor on the stream has ended, where it does not
// write them. Latency limits it.
#pragma once
#include <algorithm>

#include "cuda/quantized/mma.cuh"
#include "cuda/quantized/product.cuh"

namespace dlsys {
namespace cuda {

// A launch: `groups` blocks of `outputs` outputs each make an image.
struct Direct {
  int images, outputs, groups;
  int window_h, window_w, conv_w;  // conv_w: positions across, before pooling
  int frame_h, frame_w, pitch;     // frame_w and pitch: bytes of a line, and as lines are apart
  int row_words;                   // of a window's row
  uint32_t last_mask;              // of the bytes in the last of them
  int lines;                       // of a window, that a thread sums
  int weights_at, columns_at, sums_at, words;  // in shared memory
  Divisor by_groups, by_line, by_plane, by_in_w, by_positions, by_conv_w, by_slices, by_quads;

  __device__ __forceinline__ int Positions() const { return (int)by_positions.value; }
};

constexpr int kDirectLoads = 6;                 // of a thread at once
constexpr int64_t kMostDirectWords = 32 << 20;  // that are multiplied

// Begins to copy the filters of outputs from `first` on, and what their sums are scaled by.
__device__ __forceinline__ void LoadOutputs(const Product& p, const Direct& d, int first,
                                            uint32_t* shared) {
  for (int id = (int)threadIdx.x; id < d.outputs * p.quads; id += kThreads) {
    const int own = id / d.by_quads, quad = id - own * p.quads, output = first + own;
    const uint8_t* from =
        p.w + ((output / kPanel * p.quads + quad) * kPanel + output % kPanel) * kQuad;
    const bool exists = output < p.cols;
    CopyAsync4((float*)shared + d.weights_at + id, (const float*)(exists ? from : p.w), exists);
  }
  for (int own = (int)threadIdx.x; own < d.outputs; own += kThreads)
    CopyColumn(p, first + own, (Column*)(shared + d.columns_at) + own);
  CloseCopies();
}

// Writes a byte of the image to the frame, if it reaches there.
__device__ __forceinline__ void StoreInFrame(const Product& p, const Direct& d, int h, int at,
                                             unsigned byte, uint8_t* frame) {
  const int row = h + p.pad_h, col = p.pad_w * p.channels + at;
  if (row < d.frame_h && col < d.frame_w) frame[row * d.pitch + col] = (uint8_t)byte;
}

// Copies an image of bytes, (H, W, C).
__device__ __forceinline__ void LoadImage(const Product& p, const Direct& d, int image,
                                          uint8_t* frame) {
  const int line = (int)d.by_line.value, all = p.in_h * line;
  const uint8_t* x = p.x + (int64_t)image * all;
  for (int first = (int)threadIdx.x; first < all; first += kDirectLoads * kThreads) {
    unsigned bytes[kDirectLoads];
#pragma unroll
    for (int e = 0; e < kDirectLoads; e++)
      bytes[e] = first + e * kThreads < all ? x[first + e * kThreads] : 0;
#pragma unroll
    for (int e = 0; e < kDirectLoads; e++) {
      const int k = first + e * kThreads, h = k / d.by_line;
      if (k < all) StoreInFrame(p, d, h, k - h * line, bytes[e], frame);
    }
  }
}

// Quantizes an image of floats, (C, H, W).
__device__ __forceinline__ void QuantizeImage(const Product& p, const Direct& d, int image,
                                              uint8_t* frame) {
  const int plane = (int)d.by_plane.value, all = p.channels * plane;
  const float* x = p.images + (int64_t)image * all;
  const float unit = *p.unit, origin = (float)*p.origin;
  for (int first = (int)threadIdx.x; first < all; first += kDirectLoads * kThreads) {
    float values[kDirectLoads];
#pragma unroll
    for (int e = 0; e < kDirectLoads; e++)
      values[e] = first + e * kThreads < all ? x[first + e * kThreads] : 0.f;
#pragma unroll
    for (int e = 0; e < kDirectLoads; e++) {
      const int k = first + e * kThreads, c = k / d.by_plane, rest = k - c * plane;
      const int h = rest / d.by_in_w, w = rest - h * p.in_w;
      if (k < all)
        StoreInFrame(p, d, h, w * p.channels + c, QuantizedByte(values[e], unit, origin), frame);
    }
  }
}

// The products of a row of a window, from byte `at` of the frame on, and of a filter, from byte k
// of it on.
__device__ __forceinline__ int32_t MultiplyRow(const Direct& d, const uint32_t* frame, int at,
                                               const uint32_t* filter, int k, int32_t sum) {
  frame += at / 4;
  filter += k / kQuad;
  uint32_t low = frame[0], left = filter[0];
#pragma unroll 4
  for (int word = 1; word <= d.row_words; word++) {
    const uint32_t high = frame[word], right = filter[word];
    const uint32_t bytes = FourBytes(low, high, at % 4 * 8);
    const uint32_t mask = word < d.row_words ? ~0u : d.last_mask;
    sum = AddFourProducts(bytes, FourBytes(left, right, k % kQuad * 8) & mask, sum);
    low = high, left = right;
  }
  return sum;
}

// Adds the products of the windows of a block's outputs to its sums, (outputs, positions).
__device__ __forceinline__ void SumWindows(const Product& p, const Direct& d, uint32_t* shared) {
  const int slices = (int)d.by_slices.value, of_row = d.window_w * p.channels;
  const int items = d.outputs * slices * d.Positions();
  for (int item = (int)threadIdx.x; item < items; item += kThreads) {
    const int of_all = item / d.by_positions, position = item - of_all * d.Positions();
    const int own = of_all / d.by_slices, first = (of_all - own * slices) * d.lines;
    const int i = position / d.by_conv_w, j = position - i * d.conv_w;
    const uint32_t* filter = shared + d.weights_at + own * p.quads;
    int at = (i * p.stride_h + first) * d.pitch + j * p.stride_w * p.channels;
    int32_t sum = 0;
    for (int line = first; line < first + d.lines; line++, at += d.pitch)
      sum = MultiplyRow(d, shared, at, filter, line * of_row, sum);
    uint32_t* to = shared + d.sums_at + own * d.Positions() + position;
    if (slices == 1)
      *to = (uint32_t)sum;
    else
      atomicAdd(to, (uint32_t)sum);
  }
}

// Pools and requantizes the sums of outputs from `first` on.
__device__ __forceinline__ void StoreWindows(const Product& p, const Direct& d, int image,
                                             int first, const uint32_t* shared) {
  const int windows = (int)p.by_positions.value, across = (int)p.by_width.value;
  const int outputs = min(d.outputs, p.cols - first);
  for (int id = (int)threadIdx.x; id < d.outputs * windows; id += kThreads) {
    const int own = id / p.by_positions, window = id - own * windows;
    if (own >= outputs) break;
    const int i = window / p.by_width, j = window - i * across;
    const uint32_t* sums = shared + d.sums_at + own * d.Positions() + (i * d.conv_w + j) * p.pool;
    int32_t largest = (int32_t)sums[0];
    for (int down = 0; down < p.pool; down++)
      for (int right = 0; right < p.pool; right++)
        largest = max(largest, (int32_t)sums[down * d.conv_w + right]);
    StoreOne(p, ((int64_t)image * windows + window) * p.cols + first + own,
             ((const Column*)(shared + d.columns_at))[own], largest);
  }
}

__global__ void __launch_bounds__(kThreads)
    DirectKernel(const __grid_constant__ Product p, const __grid_constant__ Direct d) {
  uint32_t* const shared = DynamicShared<uint32_t>();
  const int image = (int)blockIdx.x / d.by_groups;
  const int first = ((int)blockIdx.x - image * d.groups) * d.outputs;
  for (int k = (int)threadIdx.x; k < d.weights_at; k += kThreads) shared[k] = p.pad;
  for (int k = d.sums_at + (int)threadIdx.x; k < d.words; k += kThreads) shared[k] = 0;
  if (p.weights_ready) LoadOutputs(p, d, first, shared);
  __syncthreads();
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!p.weights_ready) LoadOutputs(p, d, first, shared);
  p.images ? QuantizeImage(p, d, image, (uint8_t*)shared)
           : LoadImage(p, d, image, (uint8_t*)shared);
  WaitForCopies<0>();
  __syncthreads();
  SumWindows(p, d, shared);
  __syncthreads();
  StoreWindows(p, d, image, first, shared);
}

// ---- launchers ----

// Lays out a block for a product of windows with `pool`, `rows` and `cols`; false where it does not
// serve them.
inline bool LayOutDirect(const Product& p, int device, Direct* out) {
  Direct d = {};
  const int64_t windows = p.by_positions.value, pooled = p.pool * p.pool;
  d.window_w = (int)p.by_window_w.value;
  d.window_h = p.depth / std::max(d.window_w * p.channels, 1);
  const bool sees = d.window_h * d.window_w > 1 && p.dilation_h == 1 && p.dilation_w == 1;
  if (!sees || p.cols < 1 || p.rows < 1) return false;
  const int64_t positions = windows * pooled;
  d.images = (int)(p.rows / positions);
  d.conv_w = (int)p.by_width.value * p.pool;
  const int64_t conv_h = positions / d.conv_w, of_row = (int64_t)d.window_w * p.channels;
  const int64_t frame_h = (conv_h - 1) * p.stride_h + d.window_h;
  const int64_t frame_w = ((d.conv_w - 1) * (int64_t)p.stride_w + d.window_w) * p.channels;
  const int64_t pitch = RoundUp(frame_w, 4), row_words = CeilDiv(of_row, kQuad);
  const int64_t quads = CeilDiv(p.depth, kQuad);
  const int64_t frame_words = frame_h * pitch / 4 + 2;  // a shifted word reaches beyond
  const int64_t all = d.images * positions * p.cols * d.window_h * row_words;
  constexpr int64_t kRoom = kPlainShared / 4;
  if (frame_words > kRoom || all > kMostDirectWords) return false;
  int64_t outputs = CeilDiv((int64_t)d.images * p.cols, 2 * Multiprocessors(device));
  outputs = std::min<int64_t>(outputs, p.cols);
  const auto words = [&] { return frame_words + outputs * (quads + 2 + positions); };
  while (outputs > 1 && words() > kRoom) outputs--;
  if (words() > kRoom) return false;
  d.outputs = (int)outputs;
  d.groups = (int)CeilDiv(p.cols, outputs);
  d.frame_h = (int)frame_h, d.frame_w = (int)frame_w, d.pitch = (int)pitch;
  d.row_words = (int)row_words;
  d.last_mask = of_row % kQuad ? (1u << of_row % kQuad * 8) - 1 : ~0u;
  d.lines = outputs * positions < 2 * kThreads ? 1 : d.window_h;
  d.weights_at = (int)frame_words;
  d.columns_at = (int)(frame_words + outputs * quads);
  d.sums_at = (int)(d.columns_at + 2 * outputs);
  d.words = (int)words();
  d.by_groups = Divisor(d.groups), d.by_line = Divisor((int64_t)p.in_w * p.channels);
  d.by_plane = Divisor((int64_t)p.in_h * p.in_w), d.by_in_w = Divisor(p.in_w);
  d.by_positions = Divisor(positions), d.by_conv_w = Divisor(d.conv_w);
  d.by_slices = Divisor(d.window_h / d.lines), d.by_quads = Divisor(quads);
  *out = d;
  return true;
}

inline void LaunchDirect(const char* op, Product p, const Direct& d, DLStream stream) {
  p.weights_ready = InputsAreReady(1, 3);
  LaunchBeside(op, DirectKernel, (unsigned)(d.images * d.groups), 1, kThreads,
               d.words * sizeof(uint32_t), stream, p, d);
}

}  // namespace cuda
}  // namespace dlsys
