// Structs of small elements in one access of 2, 4, 8 or 16 bytes: assignment would copy elements of
// 16 bits one by one.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace dlsys {
namespace cuda {

template <class S>
using BitsAtOnce = std::conditional_t<
    sizeof(S) == 2, uint16_t,
    std::conditional_t<sizeof(S) == 4, float, std::conditional_t<sizeof(S) == 8, float2, float4>>>;

template <class S>
__device__ __forceinline__ S ReadAtOnce(const void* from) {
  static_assert(sizeof(S) == sizeof(BitsAtOnce<S>), "2, 4, 8 or 16 bytes");
  const BitsAtOnce<S> bits = *(const BitsAtOnce<S>*)from;
  S made;
  memcpy(&made, &bits, sizeof made);
  return made;
}

template <class S>
__device__ __forceinline__ void WriteAtOnce(void* to, const S& value) {
  static_assert(sizeof(S) == sizeof(BitsAtOnce<S>), "2, 4, 8 or 16 bytes");
  BitsAtOnce<S> bits;
  memcpy(&bits, &value, sizeof bits);
  *(BitsAtOnce<S>*)to = bits;
}

}  // namespace cuda
}  // namespace dlsys
