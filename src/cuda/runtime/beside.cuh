// Launches of short kernels of few blocks in a row, as inference has: the next kernel's blocks may
// come beside those that still run, and bring what they may read ahead.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

// As LaunchClusters with PDL, where the device has that, but blocks are not kept apart: the kernel
// has to call GridDependencySynchronize. More than one block in a cluster needs sm_90.
template <class... Params, class... Args>
inline void LaunchBeside(const char* op, void (*kernel)(Params...), unsigned grid, unsigned cluster,
                         unsigned block, size_t shared_nbytes, DLStream stream, Args... args) {
  if (!BeginLaunch(grid)) return;
  int device = 0;
  Check(op, cudaGetDevice(&device));
  const bool pdl = ComputeMajor(device) >= 9, serialized = pdl && allow_pdl;
  if (pdl && !serialized) AddProgrammaticEdge(op, Native(stream));
  if (shared_nbytes > kPlainShared) AllowShared(op, (const void*)kernel, shared_nbytes);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = LaunchConfig(grid, block, shared_nbytes, stream);
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (serialized ? 1 : 0);
  EndLaunch(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

}  // namespace cuda
}  // namespace dlsys
