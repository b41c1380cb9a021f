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

const GemmRung kWarp = {
    "warp",
    [] { return TiledVariants(KernelFamily::kFp32); },
    nullptr,
    RefusalOfU8,
    [](const Gemm& p, int variant) { return FitsTiled(KernelFamily::kFp32, p, variant); },
    [](const char* op, const Gemm& p, int variant, DLStream stream) {
      RunTiledVariant(op, p, KernelFamily::kFp32, variant, stream);
    }};

}  // namespace cuda
}  // namespace dlsys
