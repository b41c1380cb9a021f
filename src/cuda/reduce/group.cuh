// Reductions by a monoid over the threads of a block, all of which get the result. GroupReduce
// joins a thread group, a power of 2 of the lanes of a warp or all threads of the block:
// lanes combine by a butterfly of warp shuffles, then the warps in their order through shared
// memory. ColumnReduce joins the threads of a column of a tile by a tree in shared memory. Either
// order is fixed, so every run gives the same bits.
#pragma once
#include <cstring>
#include <type_traits>

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

template <class State>
__device__ __forceinline__ State ShuffleXor(State value, int distance, int width) {
  if constexpr (std::is_arithmetic_v<State>) {
    return __shfl_xor_sync(0xffffffffu, value, distance, width);
  } else {
    unsigned words[sizeof(State) / sizeof(unsigned)];
    memcpy(words, &value, sizeof value);
#pragma unroll
    for (unsigned& word : words) word = __shfl_xor_sync(0xffffffffu, word, distance, width);
    memcpy(&value, words, sizeof value);
    return value;
  }
}

// Combines `value` over the kGroup threads of each group, all of which get the result. It contains
// barriers: all threads of the block call it.
template <class Op, int kGroup, class State>
__device__ State GroupReduce(State value) {
  static_assert(kGroup <= 32 || kGroup % 32 == 0,
                "a thread group lies within a warp or is the block");
  constexpr int kWidth = kGroup < 32 ? kGroup : 32;
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2)
    value = Op::Combine(value, ShuffleXor(value, distance, kWidth));
  if constexpr (kGroup > 32) {
    __shared__ State warp_values[kGroup / 32];
    __syncthreads();  // the previous call's readers are done
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_values[0];
#pragma unroll
    for (int warp = 1; warp < kGroup / 32; warp++) value = Op::Combine(value, warp_values[warp]);
  }
  return value;
}

// Combines one value a thread over the kRows threads of its column of a tile of kCols columns, all
// of which get the result. All threads of the block call it.
template <class Op, int kCols, int kRows, class State>
__device__ State ColumnReduce(State value, int row, int col) {
  if constexpr (kRows == 1) {
    return value;
  } else {
    __shared__ State values[kRows][kCols];
    __syncthreads();  // the previous call's readers are done
    values[row][col] = value;
    __syncthreads();
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2) {
      if (row < half) values[row][col] = Op::Combine(values[row][col], values[row + half][col]);
      __syncthreads();
    }
    return values[0][col];
  }
}

}  // namespace cuda
}  // namespace dlsys
