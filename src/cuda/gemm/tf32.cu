// Instantiates the tiled GEMM kernels on tensor cores at tf32. Before sm_80 they compute nothing
// and are not chosen.
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

void LaunchTf32(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  WithTiling<Tf32Tilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, Tf32Accumulator>(op, params, stream);
  });
}

}  // namespace cuda
}  // namespace dlsys
