// Integer arithmetic for tilings and grids, on host and device.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define DLSYS_INT_FUNCTION __host__ __device__ constexpr
#else
#define DLSYS_INT_FUNCTION constexpr
#endif

namespace dlsys {

DLSYS_INT_FUNCTION int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }
DLSYS_INT_FUNCTION int CeilDiv32(int n, int d) { return (n + d - 1) / d; }
DLSYS_INT_FUNCTION int64_t RoundUp(int64_t n, int64_t unit) { return CeilDiv(n, unit) * unit; }

#undef DLSYS_INT_FUNCTION

}  // namespace dlsys
