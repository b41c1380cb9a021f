// Programs recorded as CUDA graphs: one launch replays every step. Steps in different lanes run
// beside each other, as far as they need not wait for each other.
//
// What changes between runs enters and leaves through ports: one copy kernel before the steps
// brings the feeds to fixed slots, one after them takes the results to where the caller wants them.
// Of several replays in a row the first brings and the last takes; the others leave the copies out.
// Their addresses are parameters of the instantiated graph, rewritten only when they differ from
// those of the run before. All other addresses are baked in.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/runtime/graph.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/stream_order.cuh"
#include "runtime/counters.h"
#include "runtime/device.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- the ports ----

constexpr int kPorts = 32;               // copies of one kernel: its parameters hold them all
constexpr int64_t kBlockNbytes = 16384;  // what a block copies

struct Ports {
  int count;
  int first_block[kPorts + 1];  // of each copy, and behind the last
  DLCopy copies[kPorts];
};

template <class T>
__device__ __forceinline__ void CopyPart(char* dst, const char* src, int64_t begin, int64_t end) {
  for (int64_t i = begin + (int64_t)threadIdx.x * sizeof(T); i < end;
       i += (int64_t)kThreads * sizeof(T))
    *(T*)(dst + i) = *(const T*)(src + i);
}

__global__ void PortsKernel(const __grid_constant__ Ports ports) {
  int k = 0;
  while ((int)blockIdx.x >= ports.first_block[k + 1]) k++;
  const DLCopy copy = ports.copies[k];
  char* dst = (char*)copy.dst;
  const char* src = (const char*)copy.src;
  const int64_t begin = (int64_t)(blockIdx.x - ports.first_block[k]) * kBlockNbytes;
  const int64_t end = min(begin + kBlockNbytes, copy.nbytes);
  const uintptr_t together = (uintptr_t)dst | (uintptr_t)src;
  if (together % 16 == 0) {
    const int64_t whole = end - (end - begin) % 16;
    CopyPart<int4>(dst, src, begin, whole);
    CopyPart<char>(dst, src, whole, end);
  } else {
    CopyPart<char>(dst, src, begin, end);
  }
}

// One side's ports: the caller's table, and the kernels that were made of it.
class Side {
 public:
  Side(const DLCopy* table, int64_t count) : table_(table), known_(table, table + count) {
    for (int64_t first = 0; first < count; first += kPorts) Add(first);
  }

  void Launch(cudaStream_t stream) {
    for (Kernel& kernel : kernels_) {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3((unsigned)kernel.ports.first_block[kernel.ports.count]);
      config.blockDim = dim3(kThreads);
      config.stream = stream;
      if (config.gridDim.x) Check("record", cudaLaunchKernelEx(&config, PortsKernel, kernel.ports));
    }
  }

  // Finds its kernels among the nodes of a recorded graph by the addresses that they copy to.
  void Claim(cudaGraphNode_t node, const Ports& ports) {
    for (Kernel& kernel : kernels_)
      if (!kernel.node && memcmp(&kernel.ports, &ports, sizeof ports) == 0) {
        kernel.node = node;
        return;
      }
  }

  // Whether the next replays make its copies.
  void Enable(cudaGraphExec_t exec, bool enabled) {
    if (enabled == enabled_) return;
    for (Kernel& kernel : kernels_)
      if (kernel.node) Check("replay", cudaGraphNodeSetEnabled(exec, kernel.node, enabled));
    enabled_ = enabled;
  }

  // Rewrites the kernels whose copies are not those of the run before.
  void Update(cudaGraphExec_t exec) {
    for (Kernel& kernel : kernels_) {
      const size_t nbytes = kernel.ports.count * sizeof(DLCopy);
      if (!kernel.node || memcmp(kernel.ports.copies, table_ + kernel.first, nbytes) == 0) continue;
      memcpy(kernel.ports.copies, table_ + kernel.first, nbytes);
      void* arguments[] = {&kernel.ports};
      cudaKernelNodeParams params = {};
      params.func = (void*)PortsKernel;
      params.gridDim = dim3((unsigned)kernel.ports.first_block[kernel.ports.count]);
      params.blockDim = dim3(kThreads);
      params.kernelParams = arguments;
      Check("replay", cudaGraphExecKernelNodeSetParams(exec, kernel.node, &params));
    }
  }

 private:
  struct Kernel {
    int64_t first;
    Ports ports;
    cudaGraphNode_t node;
  };

  void Add(int64_t first) {
    Kernel kernel{first, {}, nullptr};
    Ports& ports = kernel.ports;
    const int64_t left = (int64_t)known_.size() - first;
    ports.count = (int)(left < kPorts ? left : kPorts);
    for (int k = 0; k < ports.count; k++) {
      ports.copies[k] = known_[first + k];
      ports.first_block[k + 1] =
          ports.first_block[k] + (int)CeilDiv(ports.copies[k].nbytes, kBlockNbytes);
    }
    kernels_.push_back(kernel);
  }

  const DLCopy* table_;  // its owner writes new addresses into it between runs
  std::vector<DLCopy> known_;
  std::vector<Kernel> kernels_;
  bool enabled_ = true;
};

// ---- lanes ----

using Nodes = std::vector<cudaGraphNode_t>;

// The nodes that what the stream records next will wait for.
Nodes Place(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  Check("record",
        cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, nullptr, &count));
#else
  Check("record", cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &nodes, &count));
#endif
  return Nodes(nodes, nodes + count);
}

void MoveTo(cudaStream_t stream, Nodes& nodes) {
#if CUDART_VERSION >= 13000
  Check("record", cudaStreamUpdateCaptureDependencies(stream, nodes.data(), nullptr, nodes.size(),
                                                      cudaStreamSetCaptureDependencies));
#else
  Check("record", cudaStreamUpdateCaptureDependencies(stream, nodes.data(), nodes.size(),
                                                      cudaStreamSetCaptureDependencies));
#endif
}

// Whether these are one kernel.
bool IsKernel(const Nodes& nodes) {
  cudaGraphNodeType type = cudaGraphNodeTypeMemset;
  if (nodes.size() == 1) Check("record", cudaGraphNodeGetType(nodes[0], &type));
  return nodes.size() == 1 && type == cudaGraphNodeTypeKernel;
}

// Hangs each part of a script behind those that it waits for. One stream records them all and is
// moved about in the graph, which takes neither further streams nor events.
class Weaver {
 public:
  Weaver(const DLLanes* lanes, int64_t parts, cudaStream_t stream)
      : lanes_(lanes), stream_(stream), ends_(parts), tails_(parts), queued_(parts) {}
  ~Weaver() {
    next_may_be_early = true;
    next_is_behind = nullptr;
    settled_inputs = 0;
  }

  template <class F>
  void Record(int64_t part, F&& queue) {
    if (!lanes_) return queue();
    const int32_t lane = lanes_->lane[part];
    Nodes behind = tails_[lane];
    for (; next_ < lanes_->nwaits && lanes_->waits[2 * next_] == part; next_++) {
      const Nodes& end = ends_[lanes_->waits[2 * next_ + 1]];
      behind.insert(behind.end(), end.begin(), end.end());
    }
    std::sort(behind.begin(), behind.end());
    behind.erase(std::unique(behind.begin(), behind.end()), behind.end());
    MoveTo(stream_, behind);
    next_may_be_early = behind.size() == 1 && behind == tails_[lane];
    Behind several = {behind.data(), behind.size(), 0};
    const bool among = behind.size() > 1 && queued_[lane] && IsKernel(tails_[lane]);
    if (among)
      several.early = std::find(behind.begin(), behind.end(), tails_[lane][0]) - behind.begin();
    next_is_behind = among ? &several : nullptr;
    const bool told = lanes_->settled && (next_may_be_early || among) && queued_[lane];
    settled_inputs = told ? lanes_->settled[part] : 0;
    queue();
    next_is_behind = nullptr;
    settled_inputs = 0;
    ends_[part] = tails_[lane] = Place(stream_);
    queued_[lane] = ends_[part] != behind;
  }

 private:
  const DLLanes* lanes_;
  const cudaStream_t stream_;
  std::vector<Nodes> ends_;   // of each part
  std::vector<Nodes> tails_;  // of each lane: the ends of its last part so far
  std::vector<bool> queued_;  // of each lane: whether that part has nodes
  int64_t next_ = 0;          // of the waits
};

// ---- recording ----

struct CudaGraph : Recorded {
  CudaGraph(int id, const Script& script)
      : id(id), before(script.before, script.nbefore), after(script.after, script.nafter) {}
  ~CudaGraph() override {
    // The last replay may still be running on memory that goes back now, and another thread's
    // stream may have made it. At exit the driver may be gone already: nobody is left to be told.
    try {
      if (stream) Settle();
    } catch (const Error&) {
    }
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
  }

  void Replay(DLStream on, int64_t times) override {
    Use("replay", id);
    stream = Native(on);
    for (int64_t k = 0; k < times; k++) {
      before.Enable(exec, k == 0);
      if (k == 0) before.Update(exec);
      // Parameters are set right before the launch that they are for: a node that is switched off
      // in between comes back with older ones.
      after.Enable(exec, k == times - 1);
      if (k == times - 1) after.Update(exec);
      Check("replay", cudaGraphLaunch(exec, stream));
    }
    Counters::program_launches += times;
  }

  void Settle() const {
    Use("free a recording", id);
    WaitFor("free a recording", id, stream);
  }

  void Describe(DLGraphInfo* out) const override { *out = info; }

  const int id;
  Side before, after;
  DLGraphInfo info = {};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaStream_t stream = nullptr;  // of the last replay
};

// Queues on a stream that records. A failure ends the recording, so that the stream is usable.
void RecordInto(CudaGraph* made, cudaStream_t stream, const Script& script) {
  BeginRecording(made->id, stream);
  try {
    Weaver weaver(script.lanes, script.count + 2, stream);
    weaver.Record(0, [&] { made->before.Launch(stream); });
    for (int64_t k = 0; k < script.count; k++)
      weaver.Record(k + 1, [&] { script.body(script.state, k); });
    weaver.Record(script.count + 1, [&] { made->after.Launch(stream); });
  } catch (...) {
    cudaGraph_t broken = nullptr;
    EndRecording(made->id, stream, &broken);
    if (broken) cudaGraphDestroy(broken);
    cudaGetLastError();
    throw;
  }
  Check("record", EndRecording(made->id, stream, &made->graph));
}

void CountNode(CudaGraph* made, cudaGraphNode_t node) {
  cudaGraphNodeType type;
  Check("record", cudaGraphNodeGetType(node, &type));
  made->info.nodes++;
  if (type == cudaGraphNodeTypeMemcpy) made->info.copies++;
  if (type == cudaGraphNodeTypeMemset) made->info.fills++;
  if (type != cudaGraphNodeTypeKernel) return;
  made->info.kernels++;
  cudaKernelNodeParams params = {};
  // Kernels of other libraries may be ones that the runtime cannot describe.
  if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  if (params.func != (void*)PortsKernel) return;
  const Ports& ports = *(const Ports*)params.kernelParams[0];
  made->before.Claim(node, ports);
  made->after.Claim(node, ports);
}

}  // namespace

bool HangEarly(const char* op, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  if (!next_is_behind) return false;
  const Nodes behind(next_is_behind->nodes, next_is_behind->nodes + next_is_behind->count);
  Nodes place = Place(stream);
  std::sort(place.begin(), place.end());
  if (place != behind) return false;  // the step has queued something that this kernel waits for
  std::vector<cudaGraphEdgeData> edges(next_is_behind->count);
  cudaGraphEdgeData& edge = edges[next_is_behind->early];
  edge.from_port = cudaGraphKernelNodePortProgrammatic;
  edge.type = cudaGraphDependencyTypeProgrammatic;
  Check(op, cudaStreamUpdateCaptureDependencies(stream, next_is_behind->nodes, edges.data(),
                                                edges.size(), cudaStreamSetCaptureDependencies));
  return true;
#else
  return false;
#endif
}

std::unique_ptr<Recorded> Record(int id, DLStream stream, const Script& script) {
  Use("record", id);
  auto made = std::make_unique<CudaGraph>(id, script);
  RecordInto(made.get(), Native(stream), script);
  size_t count = 0;
  Check("record", cudaGraphGetNodes(made->graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count) Check("record", cudaGraphGetNodes(made->graph, nodes.data(), &count));
  for (cudaGraphNode_t node : nodes) CountNode(made.get(), node);
  Check("record", cudaGraphInstantiate(&made->exec, made->graph, 0));
  Check("record", cudaGraphUpload(made->exec, Native(stream)));
  return made;
}

}  // namespace cuda
}  // namespace dlsys
