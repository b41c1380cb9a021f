// The rung `warp`: GEMM in true float32 (FFMA) by the tiled kernels of kernel.cuh. Warps hold tiles
// of the block's tile in registers, panels arrive by asynchronous copies several stages ahead, and
// K is split where C has few tiles. On sm_90a large products run by the kernel of ffma.cuh. Limited
// by FFMA issue, 67 TFLOP/s on an H200 at its highest clock.
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

void LaunchFp32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<Fp32Tilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, Fp32Accumulator>(op, params, stream);
  });
}

void LaunchLargeFp32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<LargeTilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, OuterAccumulator>(op, params, stream);
  });
}

namespace {

constexpr KernelFamily kFamily = KernelFamily::kFp32;

std::vector<std::string> Variants() { return TiledVariants(kFamily); }

bool Fits(const Gemm& p, int variant) { return FitsTiled(kFamily, p, variant); }

void Run(const char* op, const Gemm& p, int variant, DLStream stream) {
  RunTiledGemm(op, p, VariantConfig(kFamily, p, variant), stream);
}

}  // namespace

const GemmRung kWarp = {"warp", Variants, nullptr, RefusalOfU8, Fits, Run};

}  // namespace cuda
}  // namespace dlsys
