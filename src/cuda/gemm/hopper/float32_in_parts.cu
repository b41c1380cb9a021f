// The tilings of hopper/products.cuh for float32 at 3xtf32, compiled in a file of their own: each
// compiles for a minute, as those of tf32 do (float32.cu). Tensor cores limit large products, at a
// third of the rate of tf32.
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
