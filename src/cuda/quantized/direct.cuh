// Quantized convolutions of few channels, whose windows an implicit GEMM would gather byte by byte:
// a block makes some outputs of one image. It keeps the image's bytes in a frame of what stands for
// 0, quantized on their way where the image is of floats. Those may lie in memory of the host, of
// which the blocks of a cluster read a part each for all. A row of a window is bytes in a row, and
// so is its part of a filter: both are shifted into words for dp4a. A thread has the positions of a
// window that is pooled, or a row of each of them, whose sums are added in shared memory: those of
// integers have no order. Pooling, bounds and requantization follow. Filters, biases and
// multipliers are on their way before the predecessor on the stream has ended, where it does not
// write them. Latency limits it.
#pragma once
#include <algorithm>

#include "cuda/quantized/mma.cuh"
#include "cuda/quantized/product.cuh"
#include "cuda/runtime/pinned.cuh"

namespace dlsys {
namespace cuda {

// A launch: `groups` blocks of `outputs` outputs each make an image.
struct Direct {
  int images, outputs, groups;
  int window_h, window_w;
  int frame_h, frame_w, pitch;  // frame_w and pitch: bytes of a line, and as lines are apart
  int row_words;                // of a window's row
  uint32_t last_mask;           // of the bytes in the last of them
  int lines;                    // of a window, that a thread sums
  bool shares;          // the blocks are one cluster, and read the image together, which is ready
  int part;             // of an image, that a block reads where it shares
  bool triggers_early;  // its successor
  int weights_at, columns_at, sums_at, words;  // in shared memory
  Divisor by_groups, by_line, by_plane, by_in_w, by_slices, by_quads;
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

// Where a byte of the image lies in the frame, -1 if that does not reach there.
__device__ __forceinline__ int InFrame(const Product& p, const Direct& d, int h, int at) {
  const int row = h + p.pad_h, col = p.pad_w * p.channels + at;
  return row < d.frame_h && col < d.frame_w ? row * d.pitch + col : -1;
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
      const int at = InFrame(p, d, h, k - h * line);
      if (k < all && at >= 0) frame[at] = (uint8_t)bytes[e];
    }
  }
}

// Where element k of an image of floats, (C, H, W), lies in the frame.
__device__ __forceinline__ int FloatInFrame(const Product& p, const Direct& d, int k) {
  const int c = k / d.by_plane, rest = k - c * (int)d.by_plane.value, h = rest / d.by_in_w;
  return InFrame(p, d, h, (rest - h * p.in_w) * p.channels + c);
}

// Quantizes an image of floats.
__device__ __forceinline__ void QuantizeImage(const Product& p, const Direct& d, int image,
                                              uint8_t* frame) {
  const int all = p.channels * (int)d.by_plane.value;
  const float* x = p.images + (int64_t)image * all;
  const float unit = *p.unit, origin = (float)*p.origin;
  for (int first = (int)threadIdx.x; first < all; first += kDirectLoads * kThreads) {
    float values[kDirectLoads];
#pragma unroll
    for (int e = 0; e < kDirectLoads; e++)
      values[e] = first + e * kThreads < all ? x[first + e * kThreads] : 0.f;
#pragma unroll
    for (int e = 0; e < kDirectLoads; e++) {
      const int k = first + e * kThreads, at = FloatInFrame(p, d, k);
      if (k < all && at >= 0) frame[at] = (uint8_t)QuantizedByte(values[e], unit, origin);
    }
  }
}

// What a thread copies where the blocks of a cluster quantize an image to the frames of each, as
// QuantizeImage does for one: an element a thread.
struct SharedByte {
  float x, unit, origin;
  int at;  // in a frame, -1: nowhere

  // Begins to read it; memory of the host takes long to answer.
  __device__ __forceinline__ void Begin(const Product& p, const Direct& d) {
    const int k = (int)blockIdx.x * d.part + (int)threadIdx.x;
    const bool exists = (int)threadIdx.x < d.part && k < p.channels * (int)d.by_plane.value;
    x = exists ? p.images[k] : 0.f;
    unit = *p.unit, origin = (float)*p.origin;
    at = exists ? FloatInFrame(p, d, k) : -1;
  }

  __device__ __forceinline__ void End(const Direct& d, const uint32_t* frames) const {
    const uint8_t byte = (uint8_t)QuantizedByte(x, unit, origin);
    MeetCluster();  // the frames are filled
#pragma unroll 1
    for (int peer = 0; peer < d.groups && at >= 0; peer++)
      ((uint8_t*)OfPeer((const float*)frames, peer))[at] = byte;
    MeetCluster();
  }
};

// Adds the products of rows of a window's kPool x kPool positions, from bytes `at` of the frame on,
// and of a filter, from byte k of it on.
template <int kPool>
__device__ __forceinline__ void MultiplyRows(const Direct& d, const uint32_t* frame,
                                             const int (&at)[kPool * kPool], const uint32_t* filter,
                                             int k, int32_t (&sums)[kPool * kPool]) {
  constexpr int kPositions = kPool * kPool;
  const uint32_t* from[kPositions];
  uint32_t low[kPositions], left = filter[k / kQuad];
#pragma unroll
  for (int e = 0; e < kPositions; e++) {
    from[e] = frame + at[e] / 4;
    low[e] = from[e][0];
  }
#pragma unroll 4
  for (int word = 1; word <= d.row_words; word++) {
    const uint32_t right = filter[k / kQuad + word];
    const uint32_t mask = word < d.row_words ? ~0u : d.last_mask;
    const uint32_t weights = FourBytes(left, right, k % kQuad * 8) & mask;
    left = right;
#pragma unroll
    for (int e = 0; e < kPositions; e++) {
      const uint32_t high = from[e][word];
      sums[e] = AddFourProducts(FourBytes(low[e], high, at[e] % 4 * 8), weights, sums[e]);
      low[e] = high;
    }
  }
}

// Adds the products of a block's windows to its sums, (outputs, windows, positions): a thread has
// some rows of all positions of a window that is pooled.
template <int kPool>
__device__ __forceinline__ void SumWindows(const Product& p, const Direct& d, uint32_t* shared) {
  constexpr int kPositions = kPool * kPool;
  const int slices = (int)d.by_slices.value, of_row = d.window_w * p.channels;
  const int windows = (int)p.by_positions.value, items = d.outputs * slices * windows;
  for (int item = (int)threadIdx.x; item < items; item += kThreads) {
    const int of_all = item / p.by_positions, window = item - of_all * windows;
    const int own = of_all / d.by_slices, first = (of_all - own * slices) * d.lines;
    const int i = window / p.by_width * kPool;
    const int j = (window - i / kPool * (int)p.by_width.value) * kPool;
    const uint32_t* filter = shared + d.weights_at + own * p.quads;
    int at[kPositions];
    int32_t sums[kPositions] = {};
#pragma unroll
    for (int e = 0; e < kPositions; e++)
      at[e] = ((i + e / kPool) * p.stride_h + first) * d.pitch +
              (j + e % kPool) * p.stride_w * p.channels;
    for (int line = first; line < first + d.lines; line++) {
      MultiplyRows<kPool>(d, shared, at, filter, line * of_row, sums);
#pragma unroll
      for (int e = 0; e < kPositions; e++) at[e] += d.pitch;
    }
    uint32_t* to = shared + d.sums_at + (own * windows + window) * kPositions;
#pragma unroll
    for (int e = 0; e < kPositions; e++) {
      if (slices == 1)
        to[e] = (uint32_t)sums[e];
      else
        atomicAdd(to + e, (uint32_t)sums[e]);
    }
  }
}

// Pools and requantizes the sums of outputs from `first` on.
template <int kPool>
__device__ __forceinline__ void StoreWindows(const Product& p, const Direct& d, int image,
                                             int first, const uint32_t* shared) {
  const int windows = (int)p.by_positions.value;
  for (int id = (int)threadIdx.x; id < d.outputs * windows; id += kThreads) {
    const int own = id / p.by_positions, window = id - own * windows;
    if (first + own >= p.cols) break;
    const uint32_t* sums = shared + d.sums_at + id * kPool * kPool;
    int32_t largest = (int32_t)sums[0];
#pragma unroll
    for (int e = 1; e < kPool * kPool; e++) largest = max(largest, (int32_t)sums[e]);
    StoreOne(p, ((int64_t)image * windows + window) * p.cols + first + own,
             ((const Column*)(shared + d.columns_at))[own], largest);
  }
}

template <int kPool>
__global__ void __launch_bounds__(kThreads)
    DirectKernel(const __grid_constant__ Product p, const __grid_constant__ Direct d) {
  uint32_t* const shared = DynamicShared<uint32_t>();
  const int image = (int)blockIdx.x / d.by_groups;
  const int first = ((int)blockIdx.x - image * d.groups) * d.outputs;
  SharedByte load;
  if (d.shares) load.Begin(p, d);
  if (d.triggers_early) TriggerProgrammaticLaunch();
  for (int k = (int)threadIdx.x; k < d.weights_at; k += kThreads) shared[k] = p.pad;
  for (int k = d.sums_at + (int)threadIdx.x; k < d.words; k += kThreads) shared[k] = 0;
  if (p.weights_ready) LoadOutputs(p, d, first, shared);
  __syncthreads();
  GridDependencySynchronize();
  if (!d.triggers_early) TriggerProgrammaticLaunch();
  if (!p.weights_ready) LoadOutputs(p, d, first, shared);
  if (d.shares)
    load.End(d, shared);
  else if (p.images)
    QuantizeImage(p, d, image, (uint8_t*)shared);
  else
    LoadImage(p, d, image, (uint8_t*)shared);
  WaitForCopies<0>();
  __syncthreads();
  SumWindows<kPool>(p, d, shared);
  __syncthreads();
  StoreWindows<kPool>(p, d, image, first, shared);
}

// ---- launchers ----

// Lays out a block for a product of windows with `pool`, `rows` and `cols`; false where it does not
// serve them.
inline bool LayOutDirect(const Product& p, int device, Direct* out) {
  Direct d = {};
  const int64_t windows = p.by_positions.value, pooled = p.pool * p.pool;
  d.window_w = (int)p.by_window_w.value;
  d.window_h = p.depth / std::max(d.window_w * p.channels, 1);
  const bool pools = p.pool == 1 || p.pool == kMostPool;
  const bool sees = pools && d.window_h * d.window_w > 1 && p.dilation_h == 1 && p.dilation_w == 1;
  if (!sees || p.cols < 1 || p.rows < 1) return false;
  const int64_t positions = windows * pooled;
  d.images = (int)(p.rows / positions);
  const int64_t conv_w = p.by_width.value * p.pool;
  const int64_t conv_h = positions / conv_w, of_row = (int64_t)d.window_w * p.channels;
  const int64_t frame_h = (conv_h - 1) * p.stride_h + d.window_h;
  const int64_t frame_w = ((conv_w - 1) * p.stride_w + d.window_w) * p.channels;
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
  d.lines = 2 * outputs * windows < kThreads ? 1 : d.window_h;  // atomics take longer than a row
  d.weights_at = (int)frame_words;
  d.columns_at = (int)(frame_words + outputs * quads);
  d.sums_at = (int)(d.columns_at + 2 * outputs);
  d.words = (int)words();
  d.by_groups = Divisor(d.groups), d.by_line = Divisor((int64_t)p.in_w * p.channels);
  d.by_plane = Divisor((int64_t)p.in_h * p.in_w), d.by_in_w = Divisor(p.in_w);
  d.by_slices = Divisor(d.window_h / d.lines), d.by_quads = Divisor(quads);
  *out = d;
  return true;
}

constexpr int kMostInputs = 7;  // x, w, bias, multiplier, a residual and the units of x

inline void LaunchDirect(const char* op, Product p, Direct d, int device, DLStream stream) {
  p.weights_ready = InputsAreReady(1, 3);
  d.triggers_early = MayTriggerEarly();
  d.part = PartOfEach((int64_t)p.channels * p.in_h * p.in_w, d.groups);
  d.shares = d.images == 1 && d.groups <= kPortableCluster && ComputeMajor(device) >= 9 &&
             d.part <= kThreads && InputsAreReady(0, kMostInputs) && IsPinned(p.images);
  const auto kernel = p.pool == 1 ? DirectKernel<1> : DirectKernel<kMostPool>;
  LaunchBeside(op, kernel, (unsigned)(d.images * d.groups), d.shares ? (unsigned)d.groups : 1,
               kThreads, d.words * sizeof(uint32_t), stream, p, d);
}

}  // namespace cuda
}  // namespace dlsys
