// Instantiates the tiled GEMM kernels on tensor cores at 3xtf32.
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

void Launch3xTf32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<Tf32Tilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, SplitTf32Accumulator>(op, params, stream);
  });
}

void LaunchLarge3xTf32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<LargeTensorTilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, SplitTf32Accumulator>(op, params, stream);
  });
}

}  // namespace cuda
}  // namespace dlsys
