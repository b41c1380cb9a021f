// GroupReduce: a reduction by a monoid over a thread group, which is a power of 2 of the lanes of a
// warp, or the block's kThreads threads.
//
// Lanes combine by a butterfly of warp shuffles; the warps of a block then combine in shared
// memory, in the order of the warps. The order is fixed, so every run gives the same bits.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

// ---- monoids of floats ----

struct SumMonoid {
  static __device__ float Combine(float a, float b) { return a + b; }
};
struct MaxMonoid {
  static __device__ float Combine(float a, float b) { return fmaxf(a, b); }
};

// Combines `value` over the kGroup threads of each group, all of which get the result. It contains
// barriers: all threads of the block call it.
template <class Op, int kGroup>
__device__ float GroupReduce(float value) {
  static_assert(kGroup <= 32 || kGroup == kThreads,
                "a thread group lies within a warp or is the block");
  constexpr int kWidth = kGroup < 32 ? kGroup : 32;
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2)
    value = Op::Combine(value, __shfl_xor_sync(0xffffffffu, value, distance, kWidth));
  if constexpr (kGroup > 32) {
    __shared__ float warp_values[kGroup / 32];
    __syncthreads();  // the previous call's readers are done
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_values[0];
#pragma unroll
    for (int warp = 1; warp < kGroup / 32; warp++) value = Op::Combine(value, warp_values[warp]);
  }
  return value;
}

}  // namespace cuda
}  // namespace dlsys
