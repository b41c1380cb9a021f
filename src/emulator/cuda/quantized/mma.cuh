// src/cuda/quantized/mma.cuh for a CPU.
#pragma once
#include <cuda_runtime.h>

namespace dlsys {
namespace cuda {

void MultiplyAddBytes(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&sums)[4]);

}  // namespace cuda
}  // namespace dlsys
