// The rung `warp`: GEMM in true float32 (FFMA) by the tiled kernels of kernel.cuh. Warps hold tiles
// of the block's tile in registers, panels arrive by asynchronous copies several stages ahead, and
// K is split where C has few tiles. Limited by FFMA issue, 61 TFLOP/s on an H200.
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

// The large tilings follow the others.
TileConfig ConfigOf(const Gemm& p, int variant) {
  if (variant == kHeuristic) {
    Gemm exact = p;
    exact.precision = Precision::kFp32;
    return BestTileConfig(exact);
  }
  static const int small = (int)TiledVariants(KernelFamily::kFp32).size();
  return variant < small ? VariantConfig(KernelFamily::kFp32, variant)
                         : VariantConfig(KernelFamily::kLargeFp32, variant - small);
}

std::vector<std::string> Variants() {
  std::vector<std::string> names = TiledVariants(KernelFamily::kFp32);
  for (std::string& name : TiledVariants(KernelFamily::kLargeFp32)) names.push_back(name);
  return names;
}

bool Fits(const Gemm& p, int variant) { return FitsTiled(p, ConfigOf(p, variant)); }

void Run(const char* op, const Gemm& p, int variant, DLStream stream) {
  RunTiledGemm(op, p, ConfigOf(p, variant), stream);
}

}  // namespace

const GemmRung kWarp = {"warp", Variants, nullptr, RefusalOfU8, Fits, Run};

}  // namespace cuda
}  // namespace dlsys
