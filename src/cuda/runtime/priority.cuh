// Priorities of the kernels of captured graphs.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// Where a stream captures, the kernels behind which it goes on get the highest priority: their
// blocks take the multiprocessors that come free before those of kernels that run beside them.
void Hasten(cudaStream_t stream);

}  // namespace cuda
}  // namespace dlsys
