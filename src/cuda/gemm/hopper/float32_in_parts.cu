// Kernels of the rung `hopper` of float32 at 3xtf32, in a file of their own as those of tf32 are
// (float32.cu).
#include "cuda/gemm/hopper/products.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

void RunInParts(const char* op, const HopperGemm& gemm, DLStream stream, int tiling) {
  RunBest<float, true>(op, gemm, stream, tiling);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
