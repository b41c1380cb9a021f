// Programs captured as CUDA graphs: one launch replays every step. Steps of different graph streams
// are parallel branches of the graph.
//
// Feeds and fetches change between runs, so graph I/O copies move them: one copy kernel before the
// steps fills fixed slots with the feeds, one after them takes the results to the caller's arrays.
// Of several replays in a row the first has the input copies and the last the output copies; they
// are disabled in the others. Their addresses are parameters of the instantiated graph, rewritten
// only when they differ from those of the run before. All other addresses are baked in. Where
// outputs go to pinned memory of the host, the last output copy counts the replays there, so that
// the host sees a result as soon as it has arrived. Outputs that the last step itself writes there,
// which are copies from a place to itself, need no copy where its kernel counts, or tells of each
// element of a small one (arrival.cuh).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/runtime/arrival.cuh"
#include "cuda/runtime/fault.cuh"
#include "cuda/runtime/graph.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/pinned.cuh"
#include "cuda/runtime/stream_order.cuh"
#include "cuda/runtime/zeroed.cuh"
#include "runtime/counters.h"
#include "runtime/device.h"

namespace dlsys {
namespace cuda {
namespace {

// ---- graph I/O copies ----

constexpr int kCopies = 32;              // copies of one kernel, all in its parameters
constexpr int64_t kBlockNbytes = 16384;  // copied by one block

// The count of a graph's replays, on the device, and of the blocks of the current one that are
// done.
struct Replays {
  unsigned blocks, count;
};

struct CopyBatch {
  unsigned* blocks_done;  // of the replay, where these copies are the last to tell; null elsewhere
  Arrival arrival;
  int count;
  int first_block[kCopies + 1];  // of each copy, and behind the last
  DLCopy copies[kCopies];
};

template <class T>
__device__ __forceinline__ void CopyPart(char* dst, const char* src, int64_t begin, int64_t end) {
  for (int64_t i = begin + (int64_t)threadIdx.x * sizeof(T); i < end;
       i += (int64_t)kThreads * sizeof(T))
    *(T*)(dst + i) = *(const T*)(src + i);
}

// The last block of a launch tells the host that all have copied.
__device__ __forceinline__ void CountReplay(const CopyBatch& batch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(batch.blocks_done, 1u) + 1 < gridDim.x) return;
  *batch.blocks_done = 0;
  batch.arrival.Tell(batch.arrival.Next());
}

__global__ void CopyBatchKernel(const __grid_constant__ CopyBatch batch) {
  TriggerProgrammaticLaunch();
  GridDependencySynchronize();
  int k = 0;
  while ((int)blockIdx.x >= batch.first_block[k + 1]) k++;
  const DLCopy copy = batch.copies[k];
  char* dst = (char*)copy.dst;
  const char* src = (const char*)copy.src;
  const int64_t begin = (int64_t)(blockIdx.x - batch.first_block[k]) * kBlockNbytes;
  const int64_t end = min(begin + kBlockNbytes, copy.nbytes);
  if (((uintptr_t)dst | (uintptr_t)src) % 16 == 0) {
    const int64_t vectors_end = end - (end - begin) % 16;
    CopyPart<int4>(dst, src, begin, vectors_end);
    CopyPart<char>(dst, src, vectors_end, end);
  } else {
    CopyPart<char>(dst, src, begin, end);
  }
  if (batch.blocks_done) CountReplay(batch);
}

// The input copies or the output copies of a graph: the caller's table, and the kernels made of it.
class GraphCopies {
 public:
  GraphCopies(const DLCopy* table, int64_t count) : table_(table), known_(table, table + count) {
    for (int64_t first = 0; first < count; first += kCopies) Add(first);
  }

  // Lets the last copies count replays, and the first be launched by PDL where the device can: they
  // are never disabled then.
  void Count(unsigned* blocks_done, const Arrival& arrival, bool early) {
    early_ = early;
    kernels_.back().batch.blocks_done = blocks_done;
    kernels_.back().batch.arrival = arrival;
  }

  void Launch(cudaStream_t stream) {
    for (Kernel& kernel : kernels_) {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3((unsigned)kernel.batch.first_block[kernel.batch.count]);
      config.blockDim = dim3(kThreads);
      config.stream = stream;
      cudaLaunchAttribute early = {};
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
      config.attrs = &early;
      config.numAttrs = early_ && allow_pdl ? 1 : 0;
      if (config.gridDim.x)
        Check("capture", cudaLaunchKernelEx(&config, CopyBatchKernel, kernel.batch));
    }
  }

  // Recognizes its kernels among the nodes of a captured graph by their parameters.
  void Claim(cudaGraphNode_t node, const CopyBatch& batch) {
    for (Kernel& kernel : kernels_)
      if (!kernel.node && memcmp(&kernel.batch, &batch, sizeof batch) == 0) {
        kernel.node = node;
        return;
      }
  }

  // Enables or disables the copies in the next replays.
  void Enable(cudaGraphExec_t exec, bool enabled) {
    if (enabled == enabled_) return;
    for (Kernel& kernel : kernels_)
      if (kernel.node) Check("replay", cudaGraphNodeSetEnabled(exec, kernel.node, enabled));
    enabled_ = enabled;
  }

  // Rewrites the kernels whose copies are not those of the run before.
  void Update(cudaGraphExec_t exec) {
    for (Kernel& kernel : kernels_) {
      const size_t nbytes = kernel.batch.count * sizeof(DLCopy);
      if (!kernel.node || memcmp(kernel.batch.copies, table_ + kernel.first, nbytes) == 0) continue;
      memcpy(kernel.batch.copies, table_ + kernel.first, nbytes);
      void* arguments[] = {&kernel.batch};
      cudaKernelNodeParams params = {};
      params.func = (void*)CopyBatchKernel;
      params.gridDim = dim3((unsigned)kernel.batch.first_block[kernel.batch.count]);
      params.blockDim = dim3(kThreads);
      params.kernelParams = arguments;
      Check("replay", cudaGraphExecKernelNodeSetParams(exec, kernel.node, &params));
    }
  }

 private:
  struct Kernel {
    int64_t first;
    CopyBatch batch;
    cudaGraphNode_t node;
  };

  void Add(int64_t first) {
    Kernel kernel{first, {}, nullptr};
    CopyBatch& batch = kernel.batch;
    const int64_t left = (int64_t)known_.size() - first;
    batch.count = (int)(left < kCopies ? left : kCopies);
    for (int k = 0; k < batch.count; k++) {
      batch.copies[k] = known_[first + k];
      batch.first_block[k + 1] =
          batch.first_block[k] + (int)CeilDiv(batch.copies[k].nbytes, kBlockNbytes);
    }
    kernels_.push_back(kernel);
  }

  const DLCopy* table_;  // its owner writes new addresses into it between runs
  std::vector<DLCopy> known_;
  std::vector<Kernel> kernels_;
  bool enabled_ = true, early_ = false;
};

// ---- graph streams ----

using Nodes = std::vector<cudaGraphNode_t>;

#ifdef DLSYS_EMULATED  // which knows no priorities
constexpr unsigned kByNodePriority = 0;
#else
constexpr unsigned kByNodePriority = cudaGraphInstantiateFlagUseNodePriority;
#endif

// The nodes that the next one captured on the stream will depend on.
Nodes CaptureDependencies(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  Check("capture",
        cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, nullptr, &count));
#else
  Check("capture", cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &nodes, &count));
#endif
  return Nodes(nodes, nodes + count);
}

void SetCaptureDependencies(cudaStream_t stream, Nodes& nodes) {
#if CUDART_VERSION >= 13000
  Check("capture", cudaStreamUpdateCaptureDependencies(stream, nodes.data(), nullptr, nodes.size(),
                                                       cudaStreamSetCaptureDependencies));
#else
  Check("capture", cudaStreamUpdateCaptureDependencies(stream, nodes.data(), nodes.size(),
                                                       cudaStreamSetCaptureDependencies));
#endif
}

bool IsOneKernel(const Nodes& nodes) {
  cudaGraphNodeType type = cudaGraphNodeTypeMemset;
  if (nodes.size() == 1) Check("capture", cudaGraphNodeGetType(nodes[0], &type));
  return nodes.size() == 1 && type == cudaGraphNodeTypeKernel;
}

// Builds the dependencies of each task as it is captured. One CUDA stream captures all tasks: its
// capture dependencies are set before each, which takes neither further streams nor events.
class DependencyBuilder {
 public:
  DependencyBuilder(const DLGraphStreams* streams, int64_t tasks, cudaStream_t stream)
      : streams_(streams), stream_(stream), ends_(tasks), tails_(tasks), has_nodes_(tasks) {}
  ~DependencyBuilder() {
    allow_pdl = true;
    next_dependencies = nullptr;
    next_arrival = nullptr;
    graph_counters = nullptr;
    ready_inputs = 0;
  }

  template <class F>
  void Capture(int64_t task, F&& queue) {
    if (!streams_) return queue();
    const int32_t own = streams_->stream[task];
    Nodes dependencies = tails_[own];
    for (; next_ < streams_->nwaits && streams_->waits[2 * next_] == task; next_++) {
      const Nodes& end = ends_[streams_->waits[2 * next_ + 1]];
      dependencies.insert(dependencies.end(), end.begin(), end.end());
    }
    std::sort(dependencies.begin(), dependencies.end());
    dependencies.erase(std::unique(dependencies.begin(), dependencies.end()), dependencies.end());
    SetCaptureDependencies(stream_, dependencies);
    allow_pdl = dependencies.size() == 1 && dependencies == tails_[own];
    Dependencies several = {dependencies.data(), dependencies.size(), 0};
    const bool pdl_edge = dependencies.size() > 1 && has_nodes_[own] && IsOneKernel(tails_[own]);
    if (pdl_edge)
      several.pdl = std::find(dependencies.begin(), dependencies.end(), tails_[own][0]) -
                    dependencies.begin();
    next_dependencies = pdl_edge ? &several : nullptr;
    const uint64_t told = streams_->ready_inputs ? streams_->ready_inputs[task] : 0;
    const bool known = (allow_pdl || pdl_edge) && has_nodes_[own];
    ready_inputs = dependencies.empty() ? ~uint64_t(0) : known ? told : 0;  // empty: all are ready
    ready_inputs = (ready_inputs & ~kTriggersEarly) | (told & kTriggersEarly);
    queue();
    next_dependencies = nullptr;
    ready_inputs = 0;
    ends_[task] = tails_[own] = CaptureDependencies(stream_);
    has_nodes_[own] = ends_[task] != dependencies;
  }

 private:
  const DLGraphStreams* streams_;
  const cudaStream_t stream_;
  std::vector<Nodes> ends_;      // the last nodes of each task
  std::vector<Nodes> tails_;     // the last nodes of each graph stream so far
  std::vector<bool> has_nodes_;  // of each graph stream: its last task has added nodes
  int64_t next_ = 0;             // of the waits
};

// ---- capture and replay ----

constexpr int64_t kLooks = 1 << 16;     // at a count in pinned memory, between two at the stream
constexpr int64_t kMostElements = 512;  // of a result, that are told one by one

struct CudaGraph : CapturedGraph {
  CudaGraph(int id, const CaptureRequest& request)
      : id(id),
        inputs(request.inputs, request.ninputs),
        outputs(request.outputs, request.noutputs) {
    const int64_t last = request.noutputs - 1;
    if (last < 0 || !request.outputs[last].nbytes || !IsPinned(request.outputs[last].dst)) return;
    const RelaxedCapture relaxed;
    Check("capture", cudaMalloc((void**)&replays, sizeof *replays));
    Check("capture", cudaMemset(replays, 0, sizeof *replays));
    seen = (volatile uint32_t*)AllocPinned(id, sizeof *seen);
    *seen = 0;
    outputs.Count(&replays->blocks, arrival(), ComputeMajor(id) >= 9);
    in_place = std::all_of(request.outputs, request.outputs + request.noutputs,
                           [](const DLCopy& copy) { return copy.dst == copy.src; });
    result = request.outputs[last];
    const int64_t count = result.nbytes / (int64_t)sizeof(uint32_t);
    if (!in_place || last > 0 || count > kMostElements) return;
    elements = (volatile uint64_t*)AllocPinned(id, count * sizeof *elements);
    memset((void*)elements, 0, count * sizeof *elements);
  }
  ~CudaGraph() override {
    // The last replay may still be running, on another thread's stream, in memory that is freed
    // now. At exit the driver may be gone already, and nobody is left to see an error.
    try {
      if (stream) Synchronize();
    } catch (const Error&) {
    }
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
    if (replays) cudaFree(replays);
    if (seen) FreePinned(id, (void*)seen);
    if (elements) FreePinned(id, (void*)elements);
    cudaGetLastError();
  }

  void Replay(DLStream on, int64_t times) override {
    Use("replay", id);
    stream = Native(on);
    counters.Clear("replay", stream);
    for (int64_t k = 0; k < times; k++) {
      inputs.Enable(exec, k == 0);
      if (k == 0) inputs.Update(exec);
      // Parameters are set right before the launch that they are for: a node that is disabled in
      // between comes back with older ones.
      outputs.Enable(exec, k == times - 1);
      if (k == times - 1) outputs.Update(exec);
      Check("replay", cudaGraphLaunch(exec, stream));
    }
    Counters::program_launches += times;
    launched += (uint32_t)(offer.taken ? times : 1);  // only the last one has its output copies
  }

  void Wait() override {
    if (!seen) {
      Synchronize();
    } else if (offer.by_elements) {
      for (int64_t k = 0; k < result.nbytes / (int64_t)sizeof(uint32_t); k++) {
        Await([&] { return elements[k] >> 32 == launched; });
        ((uint32_t*)result.dst)[k] = (uint32_t)elements[k];
      }
    } else {
      Await([&] { return *seen == launched; });
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    Counters::synchronizations++;
    RaiseFault(id);
  }

  // Waits for what the GPU writes to pinned memory; fails where the stream stops without it.
  template <class F>
  void Await(F&& arrived) const {
    for (int64_t looks = 1; !arrived(); looks++) {
      if (looks % kLooks != 0) continue;
      const cudaError_t status = cudaStreamQuery(stream);
      if (status == cudaErrorNotReady) {
        cudaGetLastError();
        continue;
      }
      Check("replay", status);
      if (!arrived()) Fail("replay: the results of a captured program did not arrive");
    }
  }

  void Synchronize() const {
    Use("free a graph", id);
    WaitFor("free a graph", id, stream);
  }

  void Describe(DLGraphInfo* out) const override { *out = info; }

  Arrival arrival() const { return {&replays->count, seen, nullptr}; }

  const int id;
  GraphCopies inputs, outputs;
  GraphCounters counters;
  Replays* replays = nullptr;
  volatile uint32_t* seen = nullptr;      // the replays whose results have arrived in pinned memory
  volatile uint64_t* elements = nullptr;  // of a small result, with the replay that made each
  DLCopy result = {};                     // the last output
  uint32_t launched = 0;
  bool in_place = false;    // the last step writes the outputs where the host reads them
  ArrivalOffer offer = {};  // to its kernel, which counts where it takes it
  DLGraphInfo info = {};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaStream_t stream = nullptr;  // of the last replay
};

// Queues the tasks on a capturing stream. A failure ends the capture, so that the stream is usable.
void CaptureInto(CudaGraph* graph, cudaStream_t stream, const CaptureRequest& request) {
  BeginCapture(graph->id, stream);
  may_leave_faults = false;
  try {
    DependencyBuilder builder(request.streams, request.count + 2, stream);
    graph_counters = &graph->counters;
    builder.Capture(0, [&] { graph->inputs.Launch(stream); });
    for (int64_t k = 0; k < request.count; k++) {
      if (graph->in_place && k + 1 == request.count) {
        graph->offer.arrival = graph->arrival();
        // A fault is told before a result, which takes the fence of the count.
        graph->offer.arrival.elements = may_leave_faults ? nullptr : graph->elements;
        next_arrival = &graph->offer;
      }
      builder.Capture(k + 1, [&] { request.body(request.state, k); });
    }
    next_arrival = nullptr;
    builder.Capture(request.count + 1, [&] {
      if (!graph->offer.taken) graph->outputs.Launch(stream);
    });
  } catch (...) {
    cudaGraph_t broken = nullptr;
    EndCapture(graph->id, stream, &broken);
    if (broken) cudaGraphDestroy(broken);
    cudaGetLastError();
    throw;
  }
  Check("capture", EndCapture(graph->id, stream, &graph->graph));
}

void CountNode(CudaGraph* graph, cudaGraphNode_t node) {
  cudaGraphNodeType type;
  Check("capture", cudaGraphNodeGetType(node, &type));
  graph->info.nodes++;
  if (type == cudaGraphNodeTypeMemcpy) graph->info.copies++;
  if (type == cudaGraphNodeTypeMemset) graph->info.fills++;
  if (type != cudaGraphNodeTypeKernel) return;
  graph->info.kernels++;
  cudaKernelNodeParams params = {};
  // Kernels of other libraries may be ones that the runtime cannot describe.
  if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  if (params.func != (void*)CopyBatchKernel) return;
  const CopyBatch& batch = *(const CopyBatch*)params.kernelParams[0];
  graph->inputs.Claim(node, batch);
  graph->outputs.Claim(node, batch);
}

}  // namespace

bool AddProgrammaticEdge(const char* op, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  if (!next_dependencies) return false;
  const Nodes wanted(next_dependencies->nodes, next_dependencies->nodes + next_dependencies->count);
  Nodes now = CaptureDependencies(stream);
  std::sort(now.begin(), now.end());
  if (now != wanted) return false;  // the step has queued a node that this kernel depends on
  std::vector<cudaGraphEdgeData> edges(next_dependencies->count);
  cudaGraphEdgeData& edge = edges[next_dependencies->pdl];
  edge.from_port = cudaGraphKernelNodePortProgrammatic;
  edge.type = cudaGraphDependencyTypeProgrammatic;
  Check(op, cudaStreamUpdateCaptureDependencies(stream, next_dependencies->nodes, edges.data(),
                                                edges.size(), cudaStreamSetCaptureDependencies));
  return true;
#else
  return false;
#endif
}

std::unique_ptr<CapturedGraph> Capture(int id, DLStream stream, const CaptureRequest& request) {
  Use("capture", id);
  auto graph = std::make_unique<CudaGraph>(id, request);
  CaptureInto(graph.get(), Native(stream), request);
  size_t count = 0;
  Check("capture", cudaGraphGetNodes(graph->graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count) Check("capture", cudaGraphGetNodes(graph->graph, nodes.data(), &count));
  for (cudaGraphNode_t node : nodes) CountNode(graph.get(), node);
  Check("capture", cudaGraphInstantiate(&graph->exec, graph->graph, kByNodePriority));
  Check("capture", cudaGraphUpload(graph->exec, Native(stream)));
  return graph;
}

void Hasten(cudaStream_t stream) {
#ifndef DLSYS_EMULATED
  cudaStreamCaptureStatus status;
  Check("capture", cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusActive) return;
  int least = 0;
  cudaKernelNodeAttrValue highest = {};
  Check("capture", cudaDeviceGetStreamPriorityRange(&least, &highest.priority));
  for (cudaGraphNode_t node : CaptureDependencies(stream)) {
    cudaGraphNodeType type;
    Check("capture", cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeKernel) continue;
    Check("capture",
          cudaGraphKernelNodeSetAttribute(node, cudaKernelNodeAttributePriority, &highest));
  }
#endif
}

}  // namespace cuda
}  // namespace dlsys
