// Launches of grids that leave most of each multiprocessor idle, beside which kernels of other
// branches of a captured graph run. Larger grids keep the driver's division of a multiprocessor's
// memory, for the cache serves them.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

// Asks for as much shared memory, and as little cache, as a multiprocessor can have. It divides one
// memory into the two anew only when it is idle, so that a kernel that asks for another division
// than the one that runs there waits for that one's end.
void PreferShared(const char* op, const void* kernel);

// LaunchClusters of such a grid.
template <class... Params, class... Args>
inline void LaunchSmall(const char* op, void (*kernel)(Params...), unsigned grid, unsigned cluster,
                        unsigned block, size_t shared_nbytes, bool pdl, DLStream stream,
                        Args... args) {
  if (grid) PreferShared(op, (const void*)kernel);
  LaunchClusters(op, kernel, grid, cluster, block, shared_nbytes, pdl, stream, args...);
}

}  // namespace cuda
}  // namespace dlsys
