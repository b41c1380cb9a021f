// Launches of grids whose blocks wait for each other: cooperative ones, which begin when the device
// has room for all blocks. They do not overlap the kernel before them (no PDL), which costs some
// microseconds.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

// Queues a grid, of no more blocks than the device can hold, that begins when all of them can run
// at the same time (a cooperative launch). Kernels of other branches of a captured graph may
// otherwise have the places of some, for whom the others then wait in vain if those kernels' blocks
// wait too.
template <class... Params, class... Args>
inline void LaunchTogether(const char* op, void (*kernel)(Params...), unsigned grid, unsigned block,
                           size_t shared_nbytes, DLStream stream, Args... args) {
  if (!BeginLaunch(grid)) return;
  AllowShared(op, (const void*)kernel, shared_nbytes);
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = LaunchConfig(grid, block, shared_nbytes, stream);
  config.attrs = &together;
  config.numAttrs = 1;
  EndLaunch(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

}  // namespace cuda
}  // namespace dlsys
