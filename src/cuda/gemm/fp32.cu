// Instantiates the tiled GEMM kernels in true float32 (FFMA).
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

void LaunchFp32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<Fp32Tilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, Fp32Accumulator>(op, params, stream);
  });
}

}  // namespace cuda
}  // namespace dlsys
