// Launches of the GEMM by FFMA and TMA (ffma.cuh), and the copies that it needs: of operands that
// do not lie (k, mn), or whose rows TMA cannot read, to rows of a multiple of 16 bytes in planned
// workspace. C overlaps no operand. Memory bandwidth limits the copies.
#include "cuda/gemm/rungs/ffma.cuh"
#include "cuda/instructions/tensor_map.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kPackMn = 64, kPackK = 32;

// Copies an operand to (k, pitch): element (mn, k) is at x[mn * of_mn + k * of_k].
__global__ void __launch_bounds__(kThreads)
    PackKernel(Operand x, int64_t extent, int64_t k_extent, int64_t pitch, float* packed) {
  __shared__ float tile[kPackK][kPackMn + 1];
  const bool along_k = x.of_k == 1;
  const int64_t mn_tiles = CeilDiv(extent, kPackMn), k_tiles = CeilDiv(k_extent, kPackK);
  for (int64_t t = blockIdx.x; t < mn_tiles * k_tiles; t += gridDim.x) {
    const int64_t mn0 = t / k_tiles * kPackMn, k0 = t % k_tiles * kPackK;
#pragma unroll
    for (int first = 0; first < kPackMn * kPackK; first += kThreads) {
      const int i = first + (int)threadIdx.x;
      const int mn = along_k ? i / kPackK : i % kPackMn, k = along_k ? i % kPackK : i / kPackMn;
      const bool exists = mn0 + mn < extent && k0 + k < k_extent;
      tile[k][mn] = exists ? x.data[(mn0 + mn) * x.of_mn + (k0 + k) * x.of_k] : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int first = 0; first < kPackMn * kPackK; first += kThreads) {
      const int i = first + (int)threadIdx.x, mn = i % kPackMn, k = i / kPackMn;
      if (mn0 + mn < pitch && k0 + k < k_extent) packed[(k0 + k) * pitch + mn0 + mn] = tile[k][mn];
    }
    __syncthreads();
  }
}

bool IsPacked(const Operand& x) { return x.of_mn != 1 || x.of_k % 4 || !Aligned16(x.data); }

double PackUs(const Operand& x, const Gemm& p, int64_t extent) {
  constexpr double kLaunchUs = 2, kNbytesUs = 2.8e6;
  return IsPacked(x) ? kLaunchUs + 8. * (double)extent * (double)p.k / kNbytesUs : 0;
}

}  // namespace

FfmaOperands::FfmaOperands(const char* op, const Gemm& p, DLStream stream) {
  const auto map_of = [&](Operand x, int64_t extent, int box, std::unique_ptr<Scratch>& copy) {
    if (IsPacked(x)) {
      const int64_t pitch = CeilDiv(extent, 4) * 4;
      copy = std::make_unique<Scratch>(p.ctx, pitch * p.k * (int64_t)sizeof(float), stream);
      const int64_t tiles = CeilDiv(extent, kPackMn) * CeilDiv(p.k, kPackK);
      Launch(op, PackKernel, Blocks(tiles, 1), kThreads, 0, stream, x, extent, p.k, pitch,
             copy->floats());
      x = {copy->floats(), 1, pitch};
    }
    return PlainMap(op, x.data, extent, p.k, x.of_k, box, FfmaTiling::kTileK);
  };
  a_ = map_of(OperandA(p), p.m, FfmaTiling::kTileM, packed_a_);
  b_ = map_of(OperandB(p), p.n, FfmaTiling::kTileN, packed_b_);
}

void FfmaOperands::Multiply(const char* op, const GemmParams& params, DLStream stream) const {
  LaunchClusters(op, FfmaKernel<FfmaTiling>, (unsigned)(params.tiles * params.splits),
                 (unsigned)params.splits, FfmaTiling::kThreads, kFfmaNbytes, params.allow_pdl,
                 stream, a_, b_, params);
}

bool FfmaFits(const Gemm& p) {
  constexpr int64_t kMost = int64_t(1) << 30;
  return p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost && !*WgmmaError(p.ctx.device_id);
}

double FfmaPackUs(const Gemm& p) {
  return PackUs(OperandA(p), p, p.m) + PackUs(OperandB(p), p, p.n);
}

}  // namespace cuda
}  // namespace dlsys
