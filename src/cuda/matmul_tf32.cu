// The product kernels of tensor cores at tf32; before sm_80 they compute nothing and are not
// chosen.
#include "cuda/matmul_kernel.cuh"

namespace dlsys {
namespace cuda {

void LaunchTf32(const char* op, int tiling, const Problem& problem, DLStream stream) {
  LaunchProduct<Tf32Tilings, Tf32Accumulator>(op, tiling, problem, stream);
}

}  // namespace cuda
}  // namespace dlsys
