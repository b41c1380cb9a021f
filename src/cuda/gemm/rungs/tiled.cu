// The rung `tiled`: GEMM in true float32 by tiles in shared memory. A block computes 32 x 32 of C,
// a thread one element; the block loads a 32 x 32 panel of op(A) and of op(B), multiplies them, and
// goes on along K, so that global memory is read a 32nd as often as by `naive`. Limited by shared
// memory: each multiply-add still loads both operands from there.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kTile = 32;

// Loads element (mn, k) of a panel into panel[k][mn]; outside is 0. Adjacent threads read along the
// stride of 1. The padding keeps both ways of writing free of bank conflicts.
__device__ __forceinline__ void LoadPanel(float (&panel)[kTile][kTile + 1], const Operand& from,
                                          int64_t mn0, int64_t extent, int64_t k0, int64_t k_end) {
  const int fast = (int)threadIdx.x % kTile, slow = (int)threadIdx.x / kTile;
  const int mn = from.of_k == 1 ? slow : fast, k = from.of_k == 1 ? fast : slow;
  const bool inside = mn0 + mn < extent && k0 + k < k_end;
  panel[k][mn] = inside ? from.data[(mn0 + mn) * from.of_mn + (k0 + k) * from.of_k] : 0.f;
}

__global__ void __launch_bounds__(kTile* kTile) TiledGemmKernel(const Gemm gemm) {
  __shared__ float panel_a[kTile][kTile + 1], panel_b[kTile][kTile + 1];
  const Operand a = OperandA(gemm), b = OperandB(gemm);
  const int row = (int)threadIdx.x / kTile, col = (int)threadIdx.x % kTile;
  const int64_t col_tiles = CeilDiv(gemm.n, kTile), tiles = CeilDiv(gemm.m, kTile) * col_tiles;
  // Loop bounds are uniform in the block, as __syncthreads requires.
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t row0 = tile / col_tiles * kTile, col0 = tile % col_tiles * kTile;
    float sum = 0.f;
    for (int64_t k0 = 0; k0 < gemm.k; k0 += kTile) {
      LoadPanel(panel_a, a, row0, gemm.m, k0, gemm.k);
      LoadPanel(panel_b, b, col0, gemm.n, k0, gemm.k);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kTile; k++) sum = fmaf(panel_a[k][row], panel_b[k][col], sum);
      __syncthreads();  // before the panels are overwritten
    }
    if (row0 + row < gemm.m && col0 + col < gemm.n) WriteElement(gemm, row0 + row, col0 + col, sum);
  }
}

void Run(const char* op, const Gemm& p, int, DLStream stream) {
  const int64_t tiles = CeilDiv(p.m, kTile) * CeilDiv(p.n, kTile);
  Launch(op, TiledGemmKernel, Blocks(tiles, 1), kTile * kTile, 0, stream, p);
  if (p.sums) RunOperandSums(op, p, stream);
}

}  // namespace

const GemmRung kTiled = {"tiled", nullptr, nullptr, RefusalOfU8, nullptr, Run};

}  // namespace cuda
}  // namespace dlsys
