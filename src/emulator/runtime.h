// The emulated runtime's streams, and the work that is queued or captured on them.
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
  CUgraph_st* graph = nullptr;        // that it captures
  bool broken = false;                // somebody waited for the stream during the capture
  std::vector<cudaGraphNode_t> tail;  // the dependencies of the next node that it captures
};

namespace dlsys {
namespace emulator {

CUstream_st& Of(cudaStream_t stream);

// Runs a node, or adds it to the graph that the stream captures.
cudaError_t Do(cudaStream_t stream, CUgraphNode_st node);

// True while this thread captures and has not relaxed the capture mode.
bool Capturing();

}  // namespace emulator
}  // namespace dlsys
