// Integer arithmetic for tilings and grids, on host and device.
#pragma once
#include <cstdint>

#include "math/functors.h"

namespace dlsys {

DLSYS_HD constexpr int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }
DLSYS_HD constexpr int CeilDiv32(int n, int d) { return (n + d - 1) / d; }
DLSYS_HD constexpr int64_t RoundUp(int64_t n, int64_t unit) { return CeilDiv(n, unit) * unit; }

}  // namespace dlsys
