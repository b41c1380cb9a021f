// Host to device copies from any host memory.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// Queues a copy of nbytes from host memory to `device`, which is current. The host memory may be
// reused on return; the stream is not synchronized. Any number of threads may copy at once.
void CopyFromHost(int device, void* dst, const void* src, size_t nbytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace dlsys
