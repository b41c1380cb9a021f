// What the parts of the emulated runtime share: streams, and what is queued or recorded on them.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "emulator/cuda_runtime.h"

struct CUgraphNode_st {
  cudaGraphNodeType type;
  std::shared_ptr<dlsys::emulator::Call> call;  // of a kernel
  dlsys::emulator::Grid grid;
  std::function<void()> act;  // of the others
  std::vector<cudaGraphNode_t> behind;
  cudaError_t Run() const;
};

struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};

constexpr int kHost = -1;  // of what belongs to no device

struct CUstream_st {
  int device = kHost;                 // of the legacy stream, which is any device's
  CUgraph_st* graph = nullptr;        // that it records
  bool broken = false;                // whether somebody waited for it meanwhile
  std::vector<cudaGraphNode_t> tail;  // that what it records next will wait for
};

namespace dlsys {
namespace emulator {

CUstream_st& Of(cudaStream_t stream);

// Runs it, or records it where the stream records.
cudaError_t Do(cudaStream_t stream, CUgraphNode_st node);

// Whether this thread records, and has not said that others' calls are no matter of the recording.
bool Recording();

}  // namespace emulator
}  // namespace dlsys
