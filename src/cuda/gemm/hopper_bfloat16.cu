// Kernels of the rung `hopper` of bfloat16. hopper_products.cuh has their launches,
// hopper_kernel.cuh the kernel and what limits it.
#include "cuda/gemm/hopper_products.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

template void RunOf<bfloat16>(const char* op, const HopperGemm& gemm, DLStream stream, int tiling);

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
