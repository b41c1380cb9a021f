// Division by a number that is known before the launch, without dividing.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace dlsys {
namespace cuda {

// Divides numbers from 0 to 2^31: Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication" (1994).
struct Divisor {
  unsigned value, magic, shift;

  Divisor() = default;
  explicit Divisor(int64_t by) : value((unsigned)std::min<int64_t>(by, INT32_MAX)), shift(0) {
    while ((uint64_t(1) << shift) < value) shift++;
    magic = (unsigned)((uint64_t(1) << 32) * ((uint64_t(1) << shift) - value) / value + 1);
  }
};
__device__ __forceinline__ int operator/(int n, const Divisor& by) {
  return (int)((__umulhi((unsigned)n, by.magic) + (unsigned)n) >> by.shift);
}

}  // namespace cuda
}  // namespace dlsys
