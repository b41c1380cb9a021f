// The instances of the tiled GEMM of kernel.cuh at 3xtf32: operands are split into an upper and a
// lower tf32 part, of which three products go through mma.sync (tile.cuh), with errors like
// float32's. They stand in a file of their own so that a build compiles them beside tensor.cu.
// gemm.cuh has the contract. Limited by mma issue, at a third of the rate of tf32.
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
