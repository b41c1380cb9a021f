// The kernels of conv + bias + relu + max-pool share this: a block copies padded channels of an
// image to shared memory, and a thread computes a patch of output positions for several outputs by
// direct convolution blocked in registers, sliding its rows down the kernel. operators/conv_pool.h
// has the contract. Rows of filters in shared memory are an odd number of vectors apart, which
// avoids bank conflicts. FFMA issue and the reads from shared memory limit it.
#pragma once
#include <algorithm>

#include "cuda/conv/conv_pool/sparse.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/conv_pool.h"

namespace dlsys {
namespace cuda {

constexpr int kMaxSharedFloats = 48 * 1024 / (int)sizeof(float);  // what every GPU grants
constexpr int kSlack = 8;  // floats behind the last row that a thread may load but not use

constexpr int VectorWidth(int outputs) { return outputs % 4 == 0 ? 4 : outputs % 2 == 0 ? 2 : 1; }

// Vector loads of the weights of kOutputs outputs. Rows are an odd number of vectors apart, which
// avoids bank conflicts as they are stored.
template <int kOutputs>
struct Vectors {
  static constexpr int kWidth = VectorWidth(kOutputs);
  static __device__ __forceinline__ void Read(const float* from, float (&to)[kOutputs]) {
    if constexpr (kWidth == 4) {
#pragma unroll
      for (int k = 0; k < kOutputs; k += 4) {
        const float4 v = *(const float4*)(from + k);
        to[k] = v.x, to[k + 1] = v.y, to[k + 2] = v.z, to[k + 3] = v.w;
      }
    } else if constexpr (kWidth == 2) {
#pragma unroll
      for (int k = 0; k < kOutputs; k += 2) {
        const float2 v = *(const float2*)(from + k);
        to[k] = v.x, to[k + 1] = v.y;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kOutputs; k++) to[k] = from[k];
    }
  }
};

constexpr int kOutputsPerThread[] = {2, 4, 6};  // of the gradients

inline int PitchOf(int outputs, int64_t groups) {
  const int width = VectorWidth(outputs), pitch = (int)RoundUp(groups * outputs, width);
  return pitch / width % 2 ? pitch : pitch + width;
}

// Channels in shared memory: `rows` of `width` floats, `pitch` floats apart; channels are
// `channel_pitch` floats apart.
struct Frame {
  int rows, width, pitch, channel_pitch;
};

// Channels of h x w whose element (0, 0) belongs at (top, left) of a frame.
struct Plane {
  int h, w, top, left;
  int step;  // elements that are read together: 2 where rows allow it
  Divisor of_plane, of_row;

  static Plane Of(const float* from, int64_t h, int64_t w, int64_t top, int64_t left) {
    const int step = w % 2 == 0 && (uintptr_t)from % sizeof(float2) == 0 ? 2 : 1;
    return {(int)h, (int)w, (int)top, (int)left, step, Divisor(h * w / step), Divisor(w / step)};
  }
};

template <bool kTf32>
__device__ __forceinline__ float Staged(float x) {
  return kTf32 ? RoundedToTf32(x) : x;
}

// Copies channels into frames, whose elements around them are zeros already; rounded for tensor
// cores with kTf32. kAtOnce loads of a thread are under way together.
template <int kAtOnce, bool kTf32 = false>
__device__ __forceinline__ void LoadPlanes(const float* from, int channels, const Plane& plane,
                                           const Frame& frame, float* to) {
  const int all = channels * (int)plane.of_plane.value;
  const bool inside = plane.h + plane.top <= frame.rows && plane.w + plane.left <= frame.width;
  const bool aligned = (plane.left | frame.pitch | frame.channel_pitch) % 2 == 0;
  const bool pairs = plane.step == 2 && inside;  // all that is read is stored
  for (int first = (int)threadIdx.x; first < all; first += kAtOnce * (int)blockDim.x) {
    float2 x[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * (int)blockDim.x;
      if (k >= all) break;
      if (plane.step == 2)
        x[e] = ((const float2*)from)[k];
      else
        x[e].x = from[k];
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; e++) {
      const int k = first + e * (int)blockDim.x;
      if (k >= all) break;
      const int channel = k / plane.of_plane, rest = k - channel * (int)plane.of_plane.value;
      const int row = rest / plane.of_row, i = row + plane.top;
      const int j = (rest - row * (int)plane.of_row.value) * plane.step + plane.left;
      float* const at = to + channel * frame.channel_pitch + i * frame.pitch + j;
      if (pairs) {
        const float2 pair = make_float2(Staged<kTf32>(x[e].x), Staged<kTf32>(x[e].y));
        if (aligned)
          *(float2*)at = pair;
        else
          at[0] = pair.x, at[1] = pair.y;
        continue;
      }
      if (i < frame.rows && j < frame.width) at[0] = Staged<kTf32>(x[e].x);
      if (i < frame.rows && j + 1 < frame.width && plane.step == 2) at[1] = Staged<kTf32>(x[e].y);
    }
  }
}

// The same of some rows, with zeros around them; top may be below 0.
__device__ inline void LoadBand(const float* from, int channels, int h, int w, int top, int left,
                                const Frame& frame, float* to) {
  const int row_threads = frame.width > 16 ? 32 : frame.width > 8 ? 16 : 8;  // threads a row
  const int lane = (int)threadIdx.x % row_threads, step = (int)blockDim.x / row_threads;
#pragma unroll 4
  for (int k = (int)threadIdx.x / row_threads; k < channels * frame.rows; k += step) {
    const int channel = k / frame.rows, row = k - channel * frame.rows, i = row - top;
    const float* source = from + ((int64_t)channel * h + i) * w - left;
    float* target = to + channel * frame.channel_pitch + row * frame.pitch;
    for (int col = lane; col < frame.width; col += row_threads) {
      const int j = col - left;
      target[col] = i >= 0 && i < h && j >= 0 && j < w ? source[col] : 0.f;
    }
  }
}

// Zeroes `numel` floats and up to three behind them.
__device__ __forceinline__ void Clear(float* to, int numel) {
  const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
  const int quads = CeilDiv32(numel, 4);
  for (int k = (int)threadIdx.x; k < quads; k += (int)blockDim.x) ((float4*)to)[k] = zeros;
}

template <int kSide, int kCount>
__device__ __forceinline__ void ReadRow(const float* from, float (&to)[kCount]) {
  if constexpr (kSide % 2 == 0 && kCount % 2 == 0) {
#pragma unroll
    for (int k = 0; k < kCount; k += 2) {
      const float2 v = *(const float2*)(from + k);
      to[k] = v.x, to[k + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; k++) to[k] = from[k];
  }
}

// sum[o][i * kSide + j] += over channels and kernel offsets: filter times x, for kOutputs outputs
// and a patch of kSide x kSide output positions whose window begins at x[0]. Filters are (channels,
// kh, kw, pitch). kw is kKernelW or one less; 1 to 3 for kKernelW = 3.
template <int kKernelW, int kSide, int kOutputs>
__device__ __forceinline__ void Correlate(const float* x, int channels, const Frame& frame, int kh,
                                          int kw, const float* filter, int pitch,
                                          float (&sum)[kOutputs][kSide * kSide]) {
  constexpr int kRow = kSide + kKernelW - 1, kLeast = kKernelW == 3 ? 1 : kKernelW - 1;
  for (int c = 0; c < channels; c++, x += frame.channel_pitch) {
    float rows[kSide][kRow];
#pragma unroll
    for (int i = 1; i < kSide; i++) ReadRow<kSide>(x + (i - 1) * frame.pitch, rows[i]);
    const float* next = x + (kSide - 1) * frame.pitch;
#pragma unroll 1
    for (int a = 0; a < kh; a++, next += frame.pitch, filter += kw * pitch) {
#pragma unroll
      for (int i = 1; i < kSide; i++)
#pragma unroll
        for (int j = 0; j < kRow; j++) rows[i - 1][j] = rows[i][j];
      ReadRow<kSide>(next, rows[kSide - 1]);
#pragma unroll
      for (int b = 0; b < kKernelW; b++) {
        if (b >= kLeast && b >= kw) continue;
        float weights[kOutputs];
        Vectors<kOutputs>::Read(filter + b * pitch, weights);
#pragma unroll
        for (int o = 0; o < kOutputs; o++)
#pragma unroll
          for (int k = 0; k < kSide * kSide; k++)
            sum[o][k] = fmaf(weights[o], rows[k / kSide][k % kSide + b], sum[o][k]);
      }
    }
  }
}

// Max of a window and its position; with relu, 0 replaces what is below it.
template <int kCount>
__device__ __forceinline__ void Pool(const float (&values)[kCount], bool relu, float* largest,
                                     uint8_t* code) {
  float best = values[0];
#pragma unroll
  for (int k = 1; k < kCount; k++) best = MaxOrNan(best, values[k]);
  int position = kCount - 1;
#pragma unroll
  for (int k = kCount - 2; k >= 0; k--) position = values[k] == best ? k : position;
  if (best != best) {
#pragma unroll
    for (int k = kCount - 1; k >= 0; k--) position = values[k] != values[k] ? k : position;
  }
  *largest = relu && best < 0.f ? 0.f : best;
  *code = relu && !(best > 0.f) ? kCut : (uint8_t)position;
}

// Cost model: `instructions` per thread; one of a warp takes some six cycles, so that a scheduler
// of fewer warps is idle in between.
inline double CostOf(double threads, double instructions, int multiprocessors) {
  const double warps = threads / 32 / (4 * multiprocessors);
  return instructions * std::max(6., 0.5 + warps);
}

// Index of the instantiation for a kernel width: 3, 5 or 7.
inline int KernelWidthIndex(int64_t width) { return width <= 3 ? 0 : width <= 5 ? 1 : 2; }

// Blocks for so many tiles: as many as are resident together, or fewer where that leaves each as
// many tiles.
template <class... Params>
unsigned TiledGrid(const char* op, void (*kernel)(Params...), int threads, size_t nbytes, int tiles,
                   int device) {
  int resident = 1;
  Check(op, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, nbytes));
  const int64_t concurrent = (int64_t)std::max(resident, 1) * Multiprocessors(device);
  return (unsigned)CeilDiv(tiles, CeilDiv(tiles, concurrent));
}

// ---- the same on tensor cores in tf32 (conv_pool/tensor.cu); false for layers that they are not
// for

bool ConvPoolTensor(const char* op, const ConvPool& p, const float* x, const float* f,
                    const float* bias, bool relu, float* y, uint8_t* code, int device,
                    DLStream stream);
bool ConvPoolTensorDataGradient(const char* op, const ConvPool& p, const float* f, const float* dy,
                                const uint8_t* code, float* dx, int device, DLStream stream);
bool ConvPoolTensorFilterGradient(const char* op, const ConvPool& p, const float* x,
                                  const float* dy, const uint8_t* code, const AddWorkers& add,
                                  DLContext ctx, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
