// What the kernels of conv + bias + relu + max-pool on tensor cores share (tensor.cu,
// tensor_dgrad.cu and tensor_wgrad.cu): dy as words of its windows, images in shared memory, and
// how blocks are launched.
#pragma once
#include <algorithm>

#include "cuda/conv/conv_pool/conv_pool.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

constexpr int kWarps = kThreads / 32;
constexpr int kSide = 2;  // of a window
constexpr int kTile = 8;  // patches, outputs and channels in a fragment

// A window's dy, rounded to tf32, with its code in the bits that tensor cores leave out: 7, which
// no position has, where relu cut it off.
__device__ __forceinline__ uint32_t Word(float dy, unsigned code) {
  return (__float_as_uint(RoundedToTf32(dy)) & ~0x1fffu) | (code & 7);
}

constexpr int64_t kMostFloats = 64 * 1024 / (int)sizeof(float);  // with two blocks resident

inline bool OnTensorCores(const ConvPool& p, int device) {
  return p.window == kSide && !p.Empty() && ComputeMajor(device) >= 8 && p.conv.n <= INT32_MAX / 2;
}

// Images of a block: as many as make two blocks a multiprocessor, and as there is room for, but at
// most four.
inline int ImagesOfBlock(int images, int64_t room, int device) {
  const int64_t even = CeilDiv(images, 2 * Multiprocessors(device));
  return (int)std::max<int64_t>(1, std::min<int64_t>({4, room, even}));
}

// Images, their padded channels in shared memory, and the rows of filters: pairs of a channel and a
// kernel row.
struct Images {
  int images, channels, kh;
  Plane plane;
  int rows, groups;  // of filters; of eight rows
  int per_block, tiles;
  int numel;  // of an image in shared memory
  Frame frame;
  Divisor of_kh;

  static Images Of(const float* x, const Conv& conv) {
    Images in{};
    in.images = (int)conv.n, in.channels = (int)conv.c, in.kh = (int)conv.kernel.h;
    in.plane = Plane::Of(x, conv.in.h, conv.in.w, conv.pad.h, conv.pad.w);
    in.rows = in.channels * in.kh;
    in.groups = CeilDiv32(in.rows, kTile);
    in.of_kh = Divisor(in.kh);
    return in;
  }

  // Padded channels of `height` x `width`. Rows are a number of banks apart that fits; the next
  // channel follows as if it began `after` rows behind this one.
  template <class Fits>
  void LayOut(int64_t height, int64_t width, int64_t after, const Fits& fits) {
    int pitch = (int)width;
    while (!fits(pitch % 32)) pitch++;
    int channel_pitch = (int)height * pitch;
    while (channel_pitch % 32 != (int)after * pitch % 32) channel_pitch++;
    frame = {(int)height, (int)width, pitch, channel_pitch};
    numel = channels * channel_pitch;
  }

  // Among blocks, of which shared memory has room for so many.
  void Divide(int64_t room, int device) {
    per_block = ImagesOfBlock(images, room, device), tiles = CeilDiv32(images, per_block);
  }
  __device__ __forceinline__ int RowAt(int row) const {
    const int channel = row / of_kh;
    return channel * frame.channel_pitch + (row - channel * kh) * frame.pitch;
  }
};

struct TensorLaunch {
  const char* op;
  int device;
  DLStream stream;

  bool Fits(int64_t nbytes) const { return nbytes + 2048 <= (int64_t)SharedLimit(device); }
  template <class... Params, class... Args>
  void operator()(void (*kernel)(Params...), int tiles, size_t nbytes, Args... args) const {
    AllowShared(op, (const void*)kernel, nbytes);
    const unsigned grid = TiledGrid(op, kernel, kThreads, nbytes, tiles, device);
    LaunchSmall(op, kernel, grid, 1, kThreads, nbytes, ComputeMajor(device) >= 9, stream, args...);
  }
};

}  // namespace cuda
}  // namespace dlsys
