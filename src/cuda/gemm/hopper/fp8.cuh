// GEMM of floats of 8 bits by wgmma, for sm_90a: what hopper/fp8.cu does for cuda/gemm/fp8.cu.
// Arrays are contiguous and row-major; C overlaps nothing. Large products are limited by the tensor
// cores' power.
#pragma once
#include "cuda/reduce/reduce.cuh"
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// Codes of math/fp8.h, and on the device the float that a code of 1 stands for.
struct Fp8Operand {
  const void* codes;  // (rows, k)
  const float* unit;
  bool wide;  // e5m2, else e4m3
};

// C (m, n) = A (m, k) Bᵀ (n, k), in float32, rounded to C's type; k is a multiple of 16, and rows
// begin at multiples of 16 bytes.
struct Fp8Gemm {
  Fp8Operand a, b;
  Output c;
  int64_t m, n, k;
  DLContext ctx;
};

void RunFp8Gemm(const char* op, const Fp8Gemm& gemm, DLStream stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
