// The product kernels of tensor cores at tf32; before sm_80 they compute nothing and are not
// chosen.
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

void LaunchTf32(const char* op, int tiling, const Problem& problem, DLStream stream) {
  WithTiling<Tf32Tilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, Tf32Accumulator>(op, problem, stream);
  });
}

}  // namespace cuda
}  // namespace dlsys
