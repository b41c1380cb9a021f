// Kernels of the rung `hopper` of float32 at tf32: GEMM by wgmma and TMA, in a file of its own
// since ptxas takes a minute for each element type; float32_in_parts.cu has those of 3xtf32.
// hopper/products.cuh has their launches, hopper/kernel.cuh the kernel, its layouts and what limits
// it.
#include "cuda/gemm/hopper/products.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

template void RunOf<float>(const char* op, const HopperGemm& gemm, DLStream stream, int tiling);

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
