// The rung `tensor`: GEMM on tensor cores by mma.sync, which every GPU from sm_80 on has, at tf32,
// or at 3xtf32 with errors like float32's; of bytes also at fp32 (uint8.cuh). Otherwise the kernels
// are those of `warp`. Limited by the copies of operands to shared memory and from there to
// registers. Before sm_80 the kernels compute nothing and are not selected.
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {
namespace {

const char* Refusal(const Gemm& p) {
  if (p.precision == Precision::kFp32 && p.u8 == U8Operand::kNone)
    return "it multiplies at tf32 or 3xtf32, and the precision is fp32";
  if (ComputeMajor(p.ctx.device_id) < 8) return "tensor cores take tf32 from sm_80 on";
  return nullptr;
}

bool Fits(const Gemm& p, int variant) { return FitsTiled(FamilyOf(p), p, variant); }

void Run(const char* op, const Gemm& p, int variant, DLStream stream) {
  RunTiledGemm(op, p, VariantConfig(FamilyOf(p), p, variant), stream);
}

}  // namespace

void LaunchTf32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<Tf32Tilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, Tf32Accumulator>(op, params, stream);
  });
}

void LaunchLargeTf32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<LargeTensorTilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, Tf32Accumulator>(op, params, stream);
  });
}

const GemmRung kTensor = {
    "tensor", [] { return TiledVariants(KernelFamily::kTf32); }, nullptr, Refusal, Fits, Run};

}  // namespace cuda
}  // namespace dlsys
