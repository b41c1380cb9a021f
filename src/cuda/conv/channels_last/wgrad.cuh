// The gradient of a filter in float32 with channels last by mma.sync at tf32, for sm_90a: operands
// lie across K, which wgmma would have from a transposed copy alone and mma.sync takes from
// registers, so that a small product reads its images once. channels_last/wgrad.cu has the kernel.
#pragma once
#include <cuda.h>

#include "cuda/conv/channels_last/sources.cuh"
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

// C (m, n) = Aᵀ B in `splits` parts, each of its share of `panels` of 32 positions; one operand is
// the filters' columns, which `pixels` reads from images, or neither where both are matrices.
enum class Pixels { kNone, kA, kB };
struct WgradTask {
  int m, n, panels, splits;
  Pixels pixels;
  PixelLayout layout;
  float* parts;  // (splits, m, n)
};

// Tiles of C that a block sums: 64 x 64, 64 x 128, 64 x 256 and 128 x 256.
constexpr int kWgradTiles = 4;

// Maps of boxes of 32 positions by 32 channels. n is a multiple of four.
void MultiplyAcross(const char* op, DLStream stream, int tile, const CUtensorMap& a,
                    const CUtensorMap& b, const WgradTask& task);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
