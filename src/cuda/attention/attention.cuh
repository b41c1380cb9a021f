// Attention on a GPU: the interface of the rung `tiled`, one set of kernels for each way to
// multiply (tile.cuh). forward.cuh and backward.cuh have the kernels, tiled_*.cu their
// instantiations, attention.cu the launchers.
#pragma once
#include "cuda/runtime/launch.cuh"
#include "operators/attention.h"

namespace dlsys {
namespace cuda {
namespace attention {

constexpr int kWarps = 4, kBlockThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;     // of the tile that a block owns: 16 a warp
constexpr int64_t kLargestHead = 256;  // the tiles are 32, 64, 128 or 256 wide

// The head sizes' tile: the least that holds both.
inline int WidthOf(const Attention& p) {
  const int64_t size = p.size > p.value_size ? p.size : p.value_size;
  return size <= 32 ? 32 : size <= 64 ? 64 : size <= 128 ? 128 : 256;
}

// Arrays of attention, of the storage type of the Multiplier that is told.
struct ForwardArrays {
  const void *q, *k, *v;
  void* y;
  float* lse;
};
struct BackwardArrays {
  const void *q, *k, *v, *dy;
  const float *lse, *row_sums;  // Σ y dy of each row
  void *dq, *dk, *dv;
};

// What the kernels of one Multiplier are to the launchers.
struct Tiled {
  size_t (*shared_nbytes)(int width);  // of a block, at most
  void (*forward)(const char* op, const Attention& p, const ForwardArrays& arrays, DLStream stream);
  void (*backward)(const char* op, const Attention& p, const BackwardArrays& arrays,
                   DLStream stream);
};
extern const Tiled kTiledFp32, kTiledTf32, kTiledBfloat16, kTiledFloat16;

}  // namespace attention
}  // namespace cuda
}  // namespace dlsys
