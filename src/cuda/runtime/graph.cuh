// Capturing and replaying programs; see graph.cu.
#pragma once
#include <memory>

#include "cuda/runtime/context.cuh"
#include "runtime/device.h"

namespace dlsys {
namespace cuda {

std::unique_ptr<CapturedGraph> Capture(int id, DLStream stream, const CaptureRequest& request);

// Where a stream captures, the kernels behind which it goes on get the highest priority: their
// blocks take the multiprocessors that come free before those of kernels that run beside them.
void Hasten(cudaStream_t stream);

}  // namespace cuda
}  // namespace dlsys
