// GEMM of bytes by wgmma, for sm_90a: what hopper/uint8.cu does for matmul_u8 of uint8 A and
// float32 B at tf32. Arrays are contiguous and row-major; C overlaps nothing. It is for small
// products, which latency limits.
#pragma once
#include "cuda/gemm/gemm.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// True where it serves the product, at a number of tiles of 64 x 32 that the caller judges.
bool U8Fits(const Gemm& gemm);
void RunU8(const char* op, const Gemm& gemm, DLStream stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
