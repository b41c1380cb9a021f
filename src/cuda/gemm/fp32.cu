// The product kernels of true float32.
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

void LaunchFp32(const char* op, int tiling, const Problem& problem, DLStream stream) {
  WithTiling<Fp32Tilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, Fp32Accumulator>(op, problem, stream);
  });
}

}  // namespace cuda
}  // namespace dlsys
