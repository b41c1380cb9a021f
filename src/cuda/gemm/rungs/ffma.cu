// Launches of the GEMM by FFMA and TMA (ffma.cuh), and the copies that it needs: of operands that
// do not lie (k, mn), or whose rows TMA cannot read, to rows of a multiple of 16 bytes in planned
// workspace. C overlaps no operand. Memory bandwidth limits the copies.
#include "cuda/gemm/rungs/ffma.cuh"
#include "cuda/instructions/tensor_map.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kPackMn = 64, kPackK = 64;

// Copies an operand to (k, pitch): element (mn, k) is at x[mn * of_mn + k * of_k]. kInQuads: it
// lies along K, in rows of whole quads, so that eight lanes read a line of 128 bytes.
template <bool kInQuads>
__global__ void __launch_bounds__(kThreads)
    PackKernel(Operand x, int64_t extent, int64_t k_extent, int64_t pitch, float* packed) {
  __shared__ float tile[kPackK][kPackMn + 1];
  const bool along_k = x.of_k == 1;
  const int64_t k_tiles = CeilDiv(k_extent, kPackK);
  const int64_t mn0 = blockIdx.x / k_tiles * kPackMn, k0 = blockIdx.x % k_tiles * kPackK;
  const int mn_valid = (int)min((int64_t)kPackMn, extent - mn0);
  const int k_valid = (int)min((int64_t)kPackK, k_extent - k0);
  const float* const from = x.data + mn0 * x.of_mn + k0 * x.of_k;
  if constexpr (kInQuads) {
    constexpr int kInRow = kPackK / 4, kStep = kThreads / kInRow;
    const int k = (int)threadIdx.x % kInRow * 4;
#pragma unroll
    for (int mn = (int)threadIdx.x / kInRow; mn < kPackMn; mn += kStep) {
      const bool exists = mn < mn_valid && k < k_valid;
      const float4 v = exists ? *(const float4*)(from + mn * x.of_mn + k) : make_float4(0, 0, 0, 0);
      tile[k][mn] = v.x, tile[k + 1][mn] = v.y, tile[k + 2][mn] = v.z, tile[k + 3][mn] = v.w;
    }
  } else {
#pragma unroll 8
    for (int i = threadIdx.x; i < kPackMn * kPackK; i += kThreads) {
      const int mn = along_k ? i / kPackK : i % kPackMn, k = along_k ? i % kPackK : i / kPackMn;
      tile[k][mn] = mn < mn_valid && k < k_valid ? from[mn * x.of_mn + k * x.of_k] : 0.f;
    }
  }
  __syncthreads();
  const int mn = (int)threadIdx.x % kPackMn;
  float* const to = packed + k0 * pitch + mn0 + mn;
  if (mn0 + mn >= pitch) return;
#pragma unroll
  for (int k = (int)threadIdx.x / kPackMn; k < kPackK; k += kThreads / kPackMn)
    if (k < k_valid) to[k * pitch] = tile[k][mn];
}

bool IsPacked(const Operand& x) { return x.of_mn != 1 || x.of_k % 4 || !Aligned16(x.data); }

// Whether the kernel reads an A that lies along K, in rows of whole quads, as it is. It is then 8 %
// slower, which an A of few columns of C is worth: a copy costs as much as some 700 of them.
bool IsReadAlongK(const Gemm& p) {
  constexpr int64_t kMostColumns = 512;
  const Operand a = OperandA(p);
  return p.n <= kMostColumns && a.of_k == 1 && a.of_mn % 4 == 0 && Aligned16(a.data);
}

double PackUs(const Operand& x, const Gemm& p, int64_t extent) {
  constexpr double kLaunchUs = 2, kNbytesUs = 2.8e6;
  return IsPacked(x) ? kLaunchUs + 8. * (double)extent * (double)p.k / kNbytesUs : 0;
}

}  // namespace

FfmaOperands::FfmaOperands(const char* op, const Gemm& p, int tiling, DLStream stream)
    : tiling_(tiling) {
  const auto map_of = [&](Operand x, int64_t extent, int box, int depth,
                          std::unique_ptr<Scratch>& copy) {
    if (IsPacked(x)) {
      const int64_t pitch = CeilDiv(extent, 4) * 4;
      copy = std::make_unique<Scratch>(p.ctx, pitch * p.k * (int64_t)sizeof(float), stream);
      const int64_t tiles = CeilDiv(extent, kPackMn) * CeilDiv(p.k, kPackK);
      const bool in_quads = x.of_k == 1 && x.of_mn % 4 == 0 && Aligned16(x.data);
      Launch(op, in_quads ? PackKernel<true> : PackKernel<false>, (unsigned)tiles, kThreads, 0,
             stream, x, extent, p.k, pitch, copy->floats());
      x = {copy->floats(), 1, pitch};
    }
    return PlainMap(op, x.data, extent, p.k, x.of_k, box, depth);
  };
  WithTiling<FfmaTilings>(tiling, [&](auto of) {
    using T = typename decltype(of)::type;
    if (IsReadAlongK(p))
      a_ = BoxMap(op, DL_FLOAT32, p.a, p.k, p.m, p.k, 1, T::kTileM, false);
    else
      a_ = map_of(OperandA(p), p.m, T::kTileM, T::kTileK, packed_a_);
    b_ = map_of(OperandB(p), p.n, T::kTileN, T::kTileK, packed_b_);
  });
}

void FfmaOperands::Multiply(const char* op, const GemmParams& params, DLStream stream) const {
  const bool along_k = IsReadAlongK(params.gemm);
  const int cluster = params.partial ? 1 : params.splits;
  WithTiling<FfmaTilings>(tiling_, [&](auto of) {
    using T = typename decltype(of)::type;
    LaunchClusters(op, along_k ? FfmaKernel<T, true> : FfmaKernel<T, false>,
                   (unsigned)(params.tiles * params.splits), (unsigned)cluster, T::kThreads,
                   kFfmaNbytes<T>, params.allow_pdl, stream, a_, b_, params);
  });
}

bool FfmaFits(const Gemm& p) {
  constexpr int64_t kMost = int64_t(1) << 30;
  return p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost && !*WgmmaError(p.ctx.device_id);
}

double FfmaPackUs(const Gemm& p) {
  const double of_a = IsReadAlongK(p) ? 0 : PackUs(OperandA(p), p, p.m);
  return of_a + PackUs(OperandB(p), p, p.n);
}

}  // namespace cuda
}  // namespace dlsys
