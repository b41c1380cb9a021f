// The one door for launches, and the shape of one-dimensional grids.
#pragma once
#include "cuda/runtime/context.cuh"
#include "cuda/runtime/ptx.cuh"
#include "runtime/counters.h"

namespace dlsys {
namespace cuda {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t(1) << 20;
// Of shared memory, what a launch may have unasked beside 4 KB that its kernel declares.
constexpr size_t kPlainShared = 44 << 10;

inline int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Blocks for n items at `per_block` items a block; kernels loop, so the number is capped.
inline unsigned Blocks(int64_t n, int64_t per_block = kThreads) {
  const int64_t blocks = CeilDiv(n, per_block);
  return (unsigned)(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

// Whether this thread's next kernel may be launched early. A recording says no where the kernel
// waits for others than the one before it in its lane.
inline thread_local bool next_may_be_early = true;

// Where a recording said no: what that kernel waits for. Of nodes[early], a kernel, it need not see
// the end, if it is hung behind them here; true if it was.
struct Behind {
  cudaGraphNode_t* nodes;
  size_t count, early;
};
inline thread_local const Behind* next_is_behind = nullptr;
bool HangEarly(const char* op, cudaStream_t stream);

// Which inputs of this thread's next kernel, by bit in the order of its step, are there before the
// kernel before it is done, and may be read before WaitForEarlierKernels. Only a recording knows.
inline thread_local uint64_t settled_inputs = 0;

inline bool AreSettled(int first, int count) {
  if (first + count >= 64) return false;
  const uint64_t wanted = ((uint64_t(1) << count) - 1) << first;
  return (settled_inputs & wanted) == wanted;
}

inline void CountLaunch() {
  next_may_be_early = true;  // within a step each kernel waits for the one before
  next_is_behind = nullptr;
  settled_inputs = 0;
  Counters::kernel_launches.fetch_add(1, std::memory_order_relaxed);
}

// Lets a kernel take `nbytes` of shared memory as it is launched. It may then have all that a block
// can: a limit by launch would fall under that of another thread's.
inline void AllowShared(const char* op, const void* kernel, size_t nbytes) {
  if (nbytes <= kPlainShared) return;
  int device = 0;
  cudaFuncAttributes attributes;
  Check(op, cudaGetDevice(&device));
  Check(op, cudaFuncGetAttributes(&attributes, kernel));
  Check(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)(SharedLimit(device) - attributes.sharedSizeBytes)));
}

// Whether a multiprocessor has registers for no more than so many blocks.
inline bool RegistersHold(const char* op, const void* kernel, unsigned threads, int64_t blocks) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes;
  Check(op, cudaGetDevice(&device));
  Check(op, cudaDeviceGetAttribute(&most, cudaDevAttrMaxRegistersPerMultiprocessor, device));
  Check(op, cudaFuncGetAttributes(&attributes, kernel));
  const int64_t of_block = CeilDiv(attributes.numRegs, 8) * 8 * threads;
  return (blocks + 1) * of_block > most;
}

// So much shared memory in place of `nbytes` that no multiprocessor has more blocks of a launch
// than it has to: where blocks come early, the first that becomes free would take those of others.
inline size_t SpreadOut(const char* op, unsigned blocks, size_t nbytes) {
  int device = 0, most = 0;
  Check(op, cudaGetDevice(&device));
  Check(op, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  const size_t crowded = (size_t)most / (CeilDiv(blocks, Multiprocessors(device)) + 1);
  const size_t room = SharedLimit(device) - 4096;  // what a kernel declares comes besides
  return nbytes < crowded && crowded <= room ? crowded : nbytes;
}

// Queues a kernel on the stream; a grid without blocks is no work and no launch, and a workspace
// query launches nothing.
template <class... Params, class... Args>
inline void Launch(const char* op, void (*kernel)(Params...), unsigned grid, unsigned block,
                   size_t shared_nbytes, DLStream stream, Args... args) {
  if (grid == 0 || Workspace::Querying()) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_nbytes;
  config.stream = Native(stream);
  Check(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
  CountLaunch();
}

// The same for a grid of clusters of `cluster` blocks each; more than 1 needs sm_90. `early` lets
// the kernel be set up while those before it still run: it has to call WaitForEarlierKernels.
template <class... Params, class... Args>
inline void LaunchClusters(const char* op, void (*kernel)(Params...), unsigned grid,
                           unsigned cluster, unsigned block, size_t shared_nbytes, bool early,
                           DLStream stream, Args... args) {
  if (grid == 0 || Workspace::Querying()) return;
  const bool alone = early && next_may_be_early;
  early = alone || (early && HangEarly(op, Native(stream)));
  if (alone && shared_nbytes > 0) {
    int device = 0;
    Check(op, cudaGetDevice(&device));
    const int64_t on_each = CeilDiv(grid, Multiprocessors(device));
    if (!RegistersHold(op, (const void*)kernel, block, on_each))
      shared_nbytes = SpreadOut(op, grid, shared_nbytes);
  }
  AllowShared(op, (const void*)kernel, shared_nbytes);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = alone;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_nbytes;
  config.stream = Native(stream);
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (alone ? 1 : 0);
  Check(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
  CountLaunch();
}

// The first item of this thread and the step to its next one, for loops over more items than
// threads.
__device__ __forceinline__ int64_t FirstItem() {
  return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t ItemStep() { return (int64_t)gridDim.x * blockDim.x; }

}  // namespace cuda
}  // namespace dlsys
