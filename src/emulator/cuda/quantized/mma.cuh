// src/cuda/quantized/mma.cuh for a CPU.
#pragma once
#include <cuda_runtime.h>

namespace dlsys {
namespace cuda {

inline int32_t AddFourProducts(uint32_t a, uint32_t b, int32_t sum) {
  for (int e = 0; e < 32; e += 8) sum += (int32_t)(uint8_t)(a >> e) * (int8_t)(uint8_t)(b >> e);
  return sum;
}

inline uint32_t FourBytes(uint32_t low, uint32_t high, int shift) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> shift);
}

void MultiplyAddBytes(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&sums)[4]);

}  // namespace cuda
}  // namespace dlsys
