// Groups of lanes that work on one row: part of a warp (up to 32 lanes) or a block of kThreads.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

struct SumOf {
  static __device__ float Join(float a, float b) { return a + b; }
};
struct MaxOf {
  static __device__ float Join(float a, float b) { return fmaxf(a, b); }
};

// Joins `value` over the kLanes lanes of each group; every lane gets the result. All threads of the
// block call it.
template <class Op, int kLanes>
__device__ float Join(float value) {
  static_assert(kLanes <= 32 || kLanes == kThreads,
                "a group is a part of a warp or the whole block");
  constexpr int kWidth = kLanes < 32 ? kLanes : 32;
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2)
    value = Op::Join(value, __shfl_xor_sync(0xffffffffu, value, distance, kWidth));
  if constexpr (kLanes > 32) {
    __shared__ float of_warp[kLanes / 32];
    __syncthreads();  // the previous call's readers are done
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < kLanes / 32; warp++) value = Op::Join(value, of_warp[warp]);
  }
  return value;
}

}  // namespace cuda
}  // namespace dlsys
