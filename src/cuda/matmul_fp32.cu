// The product kernels of true float32.
#include "cuda/matmul_kernel.cuh"

namespace dlsys {
namespace cuda {

void LaunchFp32(const char* op, int tiling, const Problem& problem, DLStream stream) {
  LaunchProduct<Fp32Tilings, Fp32Accumulator>(op, tiling, problem, stream);
}

}  // namespace cuda
}  // namespace dlsys
