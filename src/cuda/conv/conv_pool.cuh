// The kernels of conv + bias + relu + max-pool share this: a block copies padded channels of an
// image to shared memory, and a thread computes a patch of output positions for several outputs by
// direct convolution blocked in registers, sliding its rows down the kernel. math/conv_pool.h has
// the contract. Rows of filters in shared memory are an odd number of vectors apart, which avoids
// bank conflicts. FFMA issue and the reads from shared memory limit it.
#pragma once
#include "cuda/runtime/launch.cuh"
#include "math/conv_pool.h"

namespace dlsys {
namespace cuda {

constexpr int kMaxSharedFloats = 48 * 1024 / (int)sizeof(float);  // what every GPU grants
constexpr int kSlack = 8;  // floats behind the last row that a thread may load but not use

// Vector loads of the weights of kOutputs outputs. Rows are an odd number of vectors apart, which
// avoids bank conflicts as they are stored.
template <int kOutputs>
struct Vectors {
  static constexpr int kWidth = kOutputs % 4 == 0 ? 4 : 2;
  static int Pitch(int64_t groups) {
    const int pitch = (int)RoundUp(groups * kOutputs, kWidth);
    return pitch / kWidth % 2 ? pitch : pitch + kWidth;
  }
  static __device__ __forceinline__ void Read(const float* from, float (&to)[kOutputs]) {
    if constexpr (kWidth == 4) {
#pragma unroll
      for (int k = 0; k < kOutputs; k += 4) {
        const float4 v = *(const float4*)(from + k);
        to[k] = v.x, to[k + 1] = v.y, to[k + 2] = v.z, to[k + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kOutputs; k += 2) {
        const float2 v = *(const float2*)(from + k);
        to[k] = v.x, to[k + 1] = v.y;
      }
    }
  }
};

template <>
struct Vectors<1> {
  static __device__ __forceinline__ void Read(const float* from, float (&to)[1]) { to[0] = *from; }
};

constexpr int kOutputsPerThread[] = {2, 4, 6};

inline int PitchOf(int option, int64_t groups) {
  using Pitch = int (*)(int64_t);
  static constexpr Pitch pitches[] = {Vectors<2>::Pitch, Vectors<4>::Pitch, Vectors<6>::Pitch};
  return pitches[option](groups);
}

// Channels in shared memory: `rows` of `width` floats, `pitch` floats apart; channels are
// `channel_pitch` floats apart.
struct Frame {
  int rows, width, pitch, channel_pitch;
};

// Copies channels of h x w so that element (0, 0) lands at (top, left), zeros around it.
__device__ inline void LoadInput(const float* from, int channels, int h, int w, int top, int left,
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
__device__ __forceinline__ void PoolWindow(const float (&values)[kCount], float bias, bool relu,
                                           float* largest, uint8_t* code) {
  float best = values[0] + bias;
  int position = 0;
#pragma unroll
  for (int k = 1; k < kCount; k++) {
    const float value = values[k] + bias;
    const bool larger = !(value <= best) && best == best;  // NaN is larger than every other value
    best = larger ? value : best;
    position = larger ? k : position;
  }
  *largest = relu && best < 0.f ? 0.f : best;
  *code = relu && !(best > 0.f) ? kCut : (uint8_t)position;
}

// Cost model: `instructions` per thread; more warps per scheduler hide more latency.
inline double CostOf(double threads, double instructions, int multiprocessors) {
  const double warps = threads / 32 / (4 * multiprocessors);
  return instructions * (0.5 + (warps > 1 ? warps : 1));
}

// Index of the instantiation for a kernel width: 3, 5 or 7.
inline int KernelWidthIndex(int64_t width) { return width <= 3 ? 0 : width <= 5 ? 1 : 2; }

}  // namespace cuda
}  // namespace dlsys
