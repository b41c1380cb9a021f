// Convolution fused with bias, relu and max-pool for a few images, where ConvPoolKernel's blocks of
// whole images would leave most multiprocessors idle: a block makes one output of one image. It
// keeps the image's padded channels and one filter in shared memory; a thread accumulates a window
// over some of the channels, whose sums are added in a fixed order. Filters are on their way before
// the predecessor on the stream has ended, where it does not write them, and beside the image: that
// may come from memory of the host, of which the blocks of a cluster read a part each for all,
// before anything else. It triggers its successor at once where it may, so that this one's weights
// are on their way as early. Latency limits it.
#pragma once
#include "cuda/conv/conv_pool/conv_pool.cuh"

namespace dlsys {
namespace cuda {

// Channels in frames of zeros; (down, across) windows; `slices` of `of_slice` channels each.
struct FewImages {
  int channels, outputs, kh, kw, down, across, slices, of_slice, filter_numel;
  int part;     // of an image, that a block reads where it shares
  Plane plane;  // of a channel
  Frame frame;
  bool relu, filters_ready, triggers_early;
  bool shares;  // the blocks are one cluster, and read the image together, which is ready

  __host__ __device__ int Windows() const { return down * across; }
};

constexpr int kLoadsAtOnce = 6;  // of a thread

// What a thread copies where the blocks of a cluster copy an image to the frames of each, as
// LoadPlanes does for one: a load a thread.
struct SharedLoad {
  float2 x;
  int at;  // in a frame
  bool first, second;

  // Begins the load; memory of the host takes long to answer.
  __device__ __forceinline__ void Begin(const FewImages& t, const float* from) {
    const Plane& plane = t.plane;
    const int k = (int)blockIdx.x * t.part + (int)threadIdx.x, channel = k / plane.of_plane;
    const bool exists = (int)threadIdx.x < t.part && channel < t.channels;
    x = {};
    if (exists && plane.step == 2)
      x = ((const float2*)from)[k];
    else if (exists)
      x.x = from[k];
    const int rest = k - channel * (int)plane.of_plane.value, row = rest / plane.of_row;
    const int i = row + plane.top;
    const int j = (rest - row * (int)plane.of_row.value) * plane.step + plane.left;
    at = channel * t.frame.channel_pitch + i * t.frame.pitch + j;
    first = exists && i < t.frame.rows && j < t.frame.width;
    second = exists && i < t.frame.rows && j + 1 < t.frame.width && plane.step == 2;
  }

  __device__ __forceinline__ void End(const FewImages& t, const float* frames) const {
    MeetCluster();  // the frames are clear
#pragma unroll 1
    for (int peer = 0; peer < t.outputs; peer++) {
      float* const there = (float*)OfPeer(frames, peer) + at;
      if (first) there[0] = x.x;
      if (second) there[1] = x.y;
    }
    MeetCluster();
  }
};

template <int kKernelW, int kSide>
__global__ void __launch_bounds__(kThreads)
    ConvPoolFewKernel(const FewImages t, const float* x, const float* f, const float* bias,
                      float* y, uint8_t* code) {
  constexpr int kCount = kSide * kSide;
  float *filter = DynamicShared<float>(), *input = filter + t.filter_numel;
  const int image = (int)blockIdx.x / t.outputs, output = (int)blockIdx.x % t.outputs;
  const int rest = t.channels * t.kh * t.kw, windows = t.Windows();
  const auto load_filter = [&] {
    for (int k = (int)threadIdx.x; k < rest; k += (int)blockDim.x)
      CopyAsync4(filter + k, f + output * rest + k, true);
    CloseCopies();
  };
  SharedLoad load;
  if (t.shares) load.Begin(t, x);
  if (t.triggers_early) TriggerProgrammaticLaunch();
  Clear(input, t.channels * t.frame.channel_pitch);
  if (t.filters_ready) load_filter();
  const int slice = (int)threadIdx.x / windows, window = (int)threadIdx.x % windows;
  const int channel = slice * t.of_slice, i = window / t.across, j = window - i * t.across;
  __syncthreads();
  GridDependencySynchronize();
  if (!t.triggers_early) TriggerProgrammaticLaunch();
  if (!t.filters_ready) load_filter();
  if (t.shares)
    load.End(t, input);
  else
    LoadPlanes<kLoadsAtOnce>(x + (int64_t)image * t.channels * t.plane.h * t.plane.w, t.channels,
                             t.plane, t.frame, input);
  const float add = bias ? bias[output] : 0.f;
  WaitForCopies<0>();
  __syncthreads();
  float sum[1][kCount] = {};
  if (slice < t.slices)
    Correlate<kKernelW, kSide, 1>(
        input + channel * t.frame.channel_pitch + (i * t.frame.pitch + j) * kSide,
        min(t.of_slice, t.channels - channel), t.frame, t.kh, t.kw, filter + channel * t.kh * t.kw,
        1, sum);
  if (t.slices > 1) {
    __syncthreads();  // the channels have been read
    if (slice < t.slices)
      for (int k = 0; k < kCount; k++) input[(slice * kCount + k) * windows + window] = sum[0][k];
    __syncthreads();
    if (slice == 0)
      for (int s = 1; s < t.slices; s++)
#pragma unroll
        for (int k = 0; k < kCount; k++) sum[0][k] += input[(s * kCount + k) * windows + window];
  }
  if (slice > 0) return;
#pragma unroll
  for (int k = 0; k < kCount; k++) sum[0][k] += add;
  const int64_t at = (int64_t)blockIdx.x * windows + window;
  Pool(sum[0], t.relu, y + at, code + at);
}

}  // namespace cuda
}  // namespace dlsys
