// Products of bytes: one function for the instruction mma m16n8k32 of unsigned times signed bytes,
// which sm_80 and later have; what older GPUs do instead gives the same integers, by shuffles and
// dp4a, and is limited by them. And one thread's dp4a. src/emulator/cuda/quantized/mma.cuh has them
// for a CPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace dlsys {
namespace cuda {

// sum + the four products of unsigned bytes of a and signed ones of b.
__device__ __forceinline__ int32_t AddFourProducts(uint32_t a, uint32_t b, int32_t sum) {
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
  return sum;
}

// Four bytes of the eight of low and high, from bit `shift` below 32 on.
__device__ __forceinline__ uint32_t FourBytes(uint32_t low, uint32_t high, int shift) {
  return __funnelshift_r(low, high, (unsigned)shift);
}

// sums (16, 8) += a (16, 32) b (32, 8), by all lanes of a warp, over bytes, four in a word,
// unsigned in a and signed in b. Lane l holds of a the rows l / 4 and l / 4 + 8 at the depths l % 4
// * 4 and on, then both rows 16 deeper, of b those depths, then 16 deeper, at column l / 4. Before
// sm_80 each lane takes what its sums need from the others.
__device__ __forceinline__ void MultiplyAddBytes(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                 int32_t (&sums)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 16; k++) {
    const int sum = k % 4, part = k / 8 * 2 + sum / 2, from = k / 4 % 2 * 2;
#pragma unroll
    for (int t = from; t < from + 2; t++) {
      const unsigned left = __shfl_sync(~0u, a[part], lane / 4 * 4 + t);
      const unsigned right = __shfl_sync(~0u, b[k / 8], (lane % 4 * 2 + sum % 2) * 4 + t);
      sums[sum] = AddFourProducts(left, right, sums[sum]);
    }
  }
#endif
}

}  // namespace cuda
}  // namespace dlsys
