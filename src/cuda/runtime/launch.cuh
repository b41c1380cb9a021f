// Launches of kernels, all through here, and the shape of one-dimensional grids.
#pragma once
#include "cuda/instructions/ptx.cuh"
#include "cuda/runtime/context.cuh"
#include "math/int_math.h"

namespace dlsys {
namespace cuda {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t(1) << 20;
// Dynamic shared memory of a launch without an opt-in, beside 4 KB that its kernel declares.
constexpr size_t kPlainShared = 44 << 10;

// Blocks of the largest cluster that each GPU with clusters grants.
constexpr int kPortableCluster = 8;

// Blocks for n items at `per_block` items a block; kernels loop, so the number is capped.
inline unsigned Blocks(int64_t n, int64_t per_block = kThreads) {
  const int64_t blocks = CeilDiv(n, per_block);
  return (unsigned)(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

// True where this thread's next kernel may be launched by PDL (programmatic dependent launch),
// which sets it up while its predecessor on the stream ends. A capture clears it for a kernel that
// depends on more than that predecessor.
inline thread_local bool allow_pdl = true;

// The dependencies of the next captured kernel when it has several. The edge from nodes[pdl], a
// kernel, may be programmatic; AddProgrammaticEdge sets it and returns true where it could.
struct Dependencies {
  cudaGraphNode_t* nodes;
  size_t count, pdl;
};
inline thread_local const Dependencies* next_dependencies = nullptr;
bool AddProgrammaticEdge(const char* op, cudaStream_t stream);

// The inputs of this thread's next kernel, as bits in the order of its step, that its predecessor
// does not write: it may read them before GridDependencySynchronize. Only a capture knows them.
inline thread_local uint64_t ready_inputs = 0;

inline bool InputsAreReady(int first, int count) {
  if (first + count >= 64) return false;
  const uint64_t wanted = ((uint64_t(1) << count) - 1) << first;
  return (ready_inputs & wanted) == wanted;
}

// True where this thread's next kernel may trigger its successor before GridDependencySynchronize:
// no kernel of the graph writes what that one reads so early. It is bit 63 of the ready inputs.
constexpr uint64_t kTriggersEarly = uint64_t(1) << 63;
inline bool MayTriggerEarly() { return (ready_inputs & kTriggersEarly) != 0; }

// What every launch begins with, false where there is nothing to launch: a grid without blocks is
// no work, and a workspace query launches nothing. What it ends with: a failure, or a count.
bool BeginLaunch(unsigned grid);
void EndLaunch(const char* op, cudaError_t status);

inline cudaLaunchConfig_t LaunchConfig(unsigned grid, unsigned block, size_t shared_nbytes,
                                       DLStream stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_nbytes;
  config.stream = Native(stream);
  return config;
}

// Lets a kernel take `nbytes` of shared memory as it is launched. It may then have all that a block
// can: a limit by launch would fall under that of another thread's.
void AllowShared(const char* op, const void* kernel, size_t nbytes);

// True where the registers of a multiprocessor hold at most `blocks` blocks.
bool RegistersHold(const char* op, const void* kernel, unsigned threads, int64_t blocks);

// Raises `nbytes` of shared memory so that no multiprocessor holds more blocks of a launch than an
// even distribution gives it: under PDL the first one to become free would take those of others.
size_t SpreadOut(const char* op, unsigned blocks, size_t nbytes);

// Queues a kernel on the stream.
template <class... Params, class... Args>
inline void Launch(const char* op, void (*kernel)(Params...), unsigned grid, unsigned block,
                   size_t shared_nbytes, DLStream stream, Args... args) {
  if (!BeginLaunch(grid)) return;
  const cudaLaunchConfig_t config = LaunchConfig(grid, block, shared_nbytes, stream);
  EndLaunch(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

// Asks for as much shared memory, and as little cache, as a multiprocessor can have. It divides one
// memory into the two anew only when it is idle, so that a kernel that asks for another division
// than the one that runs there waits for that one's end.
void PreferShared(const char* op, const void* kernel);

// True where a launch under PDL depends on its predecessor in the stream alone; where it cannot,
// its edges of a captured graph become programmatic if they may.
inline bool DependsOnLast(const char* op, bool pdl, DLStream stream) {
  if (pdl && !allow_pdl) AddProgrammaticEdge(op, Native(stream));
  return pdl && allow_pdl;
}

// Queues a grid as the launches below want it.
template <class... Params, class... Args>
inline void QueueGrid(const char* op, void (*kernel)(Params...), unsigned grid, unsigned cluster,
                      unsigned block, size_t shared_nbytes, bool serialized, DLStream stream,
                      Args... args) {
  AllowShared(op, (const void*)kernel, shared_nbytes);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = serialized;
  cudaLaunchConfig_t config = LaunchConfig(grid, block, shared_nbytes, stream);
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (serialized ? 1 : 0);
  EndLaunch(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

// Queues a grid of clusters of `cluster` blocks each; more than 1 needs sm_90. `pdl` asks for
// programmatic dependent launch: the kernel has to call GridDependencySynchronize.
template <class... Params, class... Args>
inline void LaunchClusters(const char* op, void (*kernel)(Params...), unsigned grid,
                           unsigned cluster, unsigned block, size_t shared_nbytes, bool pdl,
                           DLStream stream, Args... args) {
  if (!BeginLaunch(grid)) return;
  const bool serialized = DependsOnLast(op, pdl, stream);
  if (serialized && shared_nbytes > 0) {
    int device = 0;
    Check(op, cudaGetDevice(&device));
    const int64_t on_each = CeilDiv(grid, Multiprocessors(device));
    if (!RegistersHold(op, (const void*)kernel, block, on_each))
      shared_nbytes = SpreadOut(op, grid, shared_nbytes);
  }
  QueueGrid(op, kernel, grid, cluster, block, shared_nbytes, serialized, stream, args...);
}

// The same of a grid that leaves most of each multiprocessor idle, beside which kernels of other
// branches of a captured graph run. Larger grids keep the driver's division of a multiprocessor's
// memory, for the cache serves them.
template <class... Params, class... Args>
inline void LaunchSmall(const char* op, void (*kernel)(Params...), unsigned grid, unsigned cluster,
                        unsigned block, size_t shared_nbytes, bool pdl, DLStream stream,
                        Args... args) {
  if (grid) PreferShared(op, (const void*)kernel);
  LaunchClusters(op, kernel, grid, cluster, block, shared_nbytes, pdl, stream, args...);
}

// The same of short kernels of few blocks in a row, as inference has, under PDL where the device
// has it: blocks are not spread out, so that those of the next kernel come beside those that still
// run, and bring what they may read ahead.
template <class... Params, class... Args>
inline void LaunchBeside(const char* op, void (*kernel)(Params...), unsigned grid, unsigned cluster,
                         unsigned block, size_t shared_nbytes, DLStream stream, Args... args) {
  if (!BeginLaunch(grid)) return;
  int device = 0;
  Check(op, cudaGetDevice(&device));
  const bool serialized = DependsOnLast(op, ComputeMajor(device) >= 9, stream);
  QueueGrid(op, kernel, grid, cluster, block, shared_nbytes, serialized, stream, args...);
}

// The first item of this thread and the step to its next one, for loops over more items than
// threads.
__device__ __forceinline__ int64_t FirstItem() {
  return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t ItemStep() { return (int64_t)gridDim.x * blockDim.x; }

}  // namespace cuda
}  // namespace dlsys
