// Captured graphs. Each replay runs the nodes in another order that their dependencies allow.
#include "emulator/order.h"
#include "emulator/runtime.h"

namespace {

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local int captures = 0;

}  // namespace

bool dlsys::emulator::Capturing() { return captures && mode != cudaStreamCaptureModeRelaxed; }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* given) {
  std::swap(mode, *given);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  CUstream_st& on = dlsys::emulator::Of(stream);
  if ((uintptr_t)stream <= 2 || on.graph) return cudaErrorStreamCaptureUnsupported;
  on.graph = new CUgraph_st;
  on.broken = false;
  on.tail.clear();
  captures++;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CUstream_st& on = dlsys::emulator::Of(stream);
  if (!on.graph) return cudaErrorInvalidValue;
  *graph = std::exchange(on.graph, nullptr);
  on.tail.clear();
  captures--;
  if (!on.broken) return cudaSuccess;
  delete std::exchange(*graph, nullptr);
  return cudaErrorStreamCaptureInvalidated;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, void*,
                                     cudaGraph_t*, const cudaGraphNode_t** nodes, void*,
                                     size_t* count) {
  const CUstream_st& on = dlsys::emulator::Of(stream);
  *status = on.graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *nodes = on.tail.data();
  *count = on.tail.size();
  return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* nodes, void*,
                                                size_t count, unsigned) {
  CUstream_st& on = dlsys::emulator::Of(stream);
  if (!on.graph) return cudaErrorInvalidValue;
  on.tail.assign(nodes, nodes + count);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes)
    for (size_t k = 0; k < std::min(*count, graph->nodes.size()); k++)
      nodes[k] = graph->nodes[k].get();
  *count = graph->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node->type;
  return cudaSuccess;
}

cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams* params) {
  params->func = (void*)node->call->function;
  params->gridDim = dim3(node->grid.blocks);
  params->blockDim = dim3(node->grid.threads);
  params->sharedMemBytes = (unsigned)node->grid.shared_nbytes;
  params->kernelParams = node->call->Arguments();
  return cudaSuccess;
}

// ---- instantiated graphs: copies, whose kernels may be given other arguments ----

struct CUgraphExec_st {
  struct Node {
    CUgraphNode_st copy;
    cudaGraphNode_t original;
    std::vector<size_t> behind;
    bool enabled = true;
  };
  std::vector<Node> nodes;

  size_t Find(cudaGraphNode_t original) const {
    for (size_t k = 0; k < nodes.size(); k++)
      if (nodes[k].original == original) return k;
    return nodes.size();
  }
};

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned) {
  auto made = std::make_unique<CUgraphExec_st>();
  for (const auto& node : graph->nodes) {
    CUgraphExec_st::Node copy;
    copy.copy = *node;
    if (node->call) copy.copy.call = std::make_shared<dlsys::emulator::Call>(*node->call);
    copy.original = node.get();
    for (cudaGraphNode_t other : node->behind) copy.behind.push_back(made->Find(other));
    made->nodes.push_back(std::move(copy));
  }
  *exec = made.release();
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  const size_t count = exec->nodes.size();
  std::vector<std::vector<size_t>> before(count);
  std::vector<size_t> missing(count), ready;
  for (size_t k = 0; k < count; k++) {
    missing[k] = exec->nodes[k].behind.size();
    if (!missing[k]) ready.push_back(k);
    for (size_t other : exec->nodes[k].behind) before[other].push_back(k);
  }
  while (!ready.empty()) {
    std::swap(ready[dlsys::emulator::NextDecision() % ready.size()], ready.back());
    const size_t next = ready.back();
    ready.pop_back();
    const CUgraphExec_st::Node& node = exec->nodes[next];
    if (node.enabled) {
      const cudaError_t status = node.copy.Run();
      if (status != cudaSuccess) return status;
    }
    for (size_t k : before[next])
      if (!--missing[k]) ready.push_back(k);
  }
  return cudaSuccess;
}

cudaError_t cudaGraphNodeSetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned enabled) {
  const size_t k = exec->Find(node);
  if (k == exec->nodes.size()) return cudaErrorInvalidValue;
  exec->nodes[k].enabled = enabled != 0;
  return cudaSuccess;
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
  const size_t k = exec->Find(node);
  if (k == exec->nodes.size()) return cudaErrorInvalidValue;
  CUgraphNode_st& copy = exec->nodes[k].copy;
  if (params->func != copy.call->function) return cudaErrorInvalidValue;
  copy.grid.blocks = params->gridDim.x;
  copy.call->Set(params->kernelParams);
  return cudaSuccess;
}
