// Four neighboring elements at once, as floats: one access of 16 bytes for float32, of 8 for the
// storage types of 16 bits. The address is a multiple of its size. Kernels that memory bandwidth
// limits use them, since fewer and wider accesses keep more bytes in flight.
#pragma once
#include <cuda_runtime.h>

#include "cuda/instructions/ptx.cuh"
#include "math/storage.h"

namespace dlsys {
namespace cuda {

__device__ __forceinline__ float4 LoadQuad(const float* x) { return *(const float4*)x; }
__device__ __forceinline__ void StoreQuad(float* y, float4 v) { *(float4*)y = v; }

// The same to global memory in one access, where the compiler would take it apart: where constants
// are stored as well.
__device__ __forceinline__ void StoreWholeQuad(float* y, float4 v) {
  StoreQuadTo(y, v.x, v.y, v.z, v.w);
}

template <class T>
struct alignas(4 * sizeof(T)) QuadOf {
  T x, y, z, w;
};

template <class T>
__device__ __forceinline__ float4 LoadQuad(const T* x) {
  const QuadOf<T> q = *(const QuadOf<T>*)x;
  return make_float4(q.x, q.y, q.z, q.w);
}
template <class T>
__device__ __forceinline__ void StoreQuad(T* y, float4 v) {
  *(QuadOf<T>*)y = QuadOf<T>{T(v.x), T(v.y), T(v.z), T(v.w)};
}

template <class T>
__device__ __forceinline__ void StoreWholeQuad(T* y, float4 v) {
  StoreQuad(y, v);
}

// The quad at index i of an array of them.
template <class T>
__device__ __forceinline__ float4 LoadQuad(const T* x, int i) {
  return LoadQuad((const T*)((const QuadOf<T>*)x + i));
}
template <class T>
__device__ __forceinline__ void StoreQuad(T* y, int i, float4 v) {
  StoreQuad((T*)((QuadOf<T>*)y + i), v);
}

// Streaming loads, for what is not read again: it is evicted first.
__device__ __forceinline__ float LoadLast(const float* x) { return __ldcs(x); }
__device__ __forceinline__ float4 LoadQuadLast(const float* x) { return __ldcs((const float4*)x); }
template <class T>
__device__ __forceinline__ float LoadLast(const T* x) {
  T value;
  value.bits = __ldcs(&x->bits);
  return value;
}
template <class T>
__device__ __forceinline__ float4 LoadQuadLast(const T* x) {
  const int2 bits = __ldcs((const int2*)x);
  QuadOf<T> q;
  memcpy(&q, &bits, sizeof q);
  return make_float4(q.x, q.y, q.z, q.w);
}

}  // namespace cuda
}  // namespace dlsys
