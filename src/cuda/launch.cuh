// The one door for launches, and the shape of one-dimensional grids.
#pragma once
#include "cuda/context.cuh"

namespace dlsys {
namespace cuda {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t(1) << 20;

inline int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Blocks for n items at `per_block` items a block; kernels loop, so the number is capped.
inline unsigned Blocks(int64_t n, int64_t per_block = kThreads) {
  const int64_t blocks = CeilDiv(n, per_block);
  return (unsigned)(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

// Queues a kernel on the stream; a grid without blocks is no work and no launch.
template <class... Params, class... Args>
inline void Launch(const char* op, void (*kernel)(Params...), unsigned grid, unsigned block,
                   size_t shared_nbytes, DLStream stream, Args... args) {
  if (grid == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_nbytes;
  config.stream = Native(stream);
  Check(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

// The first item of this thread and the step to its next one, for loops over more items than
// threads.
__device__ __forceinline__ int64_t FirstItem() {
  return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t ItemStep() { return (int64_t)gridDim.x * blockDim.x; }

}  // namespace cuda
}  // namespace dlsys
