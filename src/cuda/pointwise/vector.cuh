// Neighboring elements of a storage type, one access of up to 16 bytes; kept as they lie in memory
// until they are used, so that loads in flight take few registers. Addresses are multiples of the
// size.
#pragma once
#include <cuda_runtime.h>

#include <cstring>

#include "math/storage.h"

namespace dlsys {
namespace cuda {

template <class T>
inline constexpr int kWide = 16 / (int)sizeof(T);  // elements in the widest access

template <class T, int kVector>
struct alignas(kVector * sizeof(T)) Vec {
  T elements[kVector];
  __device__ __forceinline__ float operator[](int e) const { return (float)elements[e]; }
};

template <int kVector, class T>
__device__ __forceinline__ Vec<T, kVector> Read(const T* p) {
  if constexpr (kVector == 1) {
    return {{*p}};
  } else {
    static_assert(kVector == kWide<T>);
    const int4 bits = *(const int4*)p;
    Vec<T, kVector> v;
    memcpy(&v, &bits, sizeof v);
    return v;
  }
}
// Streaming load, for what is not read again: it is evicted first.
template <int kVector, class T>
__device__ __forceinline__ Vec<T, kVector> ReadLast(const T* p) {
  if constexpr (kVector == 1) {
    return Read<1>(p);
  } else {
    const int4 bits = __ldcs((const int4*)p);
    Vec<T, kVector> v;
    memcpy(&v, &bits, sizeof v);
    return v;
  }
}
template <int kVector, class T>
__device__ __forceinline__ void Write(T* p, const float (&from)[kVector]) {
  Vec<T, kVector> v;
#pragma unroll
  for (int e = 0; e < kVector; e++) v.elements[e] = T(from[e]);
  if constexpr (kVector == 1) {
    *p = v.elements[0];
  } else {
    int4 bits;
    memcpy(&bits, &v, sizeof v);
    *(int4*)p = bits;
  }
}

}  // namespace cuda
}  // namespace dlsys
