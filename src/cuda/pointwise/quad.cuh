// Four neighboring elements at once, as floats: one access of 16 bytes for float32, of 8 for the
// storage types of 16 bits. The address is a multiple of its size.
#pragma once
#include <cuda_runtime.h>

#include "math/storage.h"

namespace dlsys {
namespace cuda {

__device__ __forceinline__ float4 LoadQuad(const float* x) { return *(const float4*)x; }
__device__ __forceinline__ void StoreQuad(float* y, float4 v) { *(float4*)y = v; }

template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T x, y, z, w;
};

template <class T>
__device__ __forceinline__ float4 LoadQuad(const T* x) {
  const Quad<T> q = *(const Quad<T>*)x;
  return make_float4(q.x, q.y, q.z, q.w);
}
template <class T>
__device__ __forceinline__ void StoreQuad(T* y, float4 v) {
  *(Quad<T>*)y = Quad<T>{T(v.x), T(v.y), T(v.z), T(v.w)};
}

}  // namespace cuda
}  // namespace dlsys
