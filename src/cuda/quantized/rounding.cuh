// How numbers become bytes, the same in every kernel, so that fused and separate ones agree in all
// bits: products that are added are exact in float32, which a compiler may contract, and halves are
// rounded to even.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace dlsys {
namespace cuda {

// x in units of `unit`, 0 at `origin`; NaN is 0.
__device__ __forceinline__ unsigned QuantizedByte(float x, float unit, float origin) {
  const float units = x / unit;
  const float clipped = fminf(fmaxf(units, -origin), 255.f - origin);
  return (unsigned)(int)(rintf(units == units ? clipped : 0.f) + origin);
}

// The sum of two bytes, each with its scale, which are exact in float32.
__device__ __forceinline__ int AddedBytes(int a, int b, float scale_a, float scale_b, float offset,
                                          float low, float high) {
  const float both = (float)a * scale_a + (float)b * scale_b;
  return (int)rintf(fminf(fmaxf(both + offset, low), high));
}

}  // namespace cuda
}  // namespace dlsys
