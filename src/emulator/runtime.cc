// CUDA's runtime over the memory and the time of the CPU: two devices, their memory, streams,
// events and launches. Graphs are in capture.cc.
#include "emulator/runtime.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

// The figures of an H200, so that launchers take the paths that they take there; less memory.
constexpr int kGpus = 2;
constexpr int kMultiprocessors = 132, kMajor = 9, kMinor = 0;
constexpr size_t kPlainSharedNbytes = 48 << 10;
constexpr size_t kSharedOfMultiprocessor = 228 << 10, kSharedOfEachBlock = 1 << 10;
constexpr unsigned kMostThreads = 1024, kThreadsOfMultiprocessor = 2048;

using dlsys::emulator::Grid;

namespace {

struct Block {
  size_t nbytes;
  int device;  // kHost of pinned memory
};

std::mutex mutex;  // over what follows
std::map<const void*, Block> blocks;
size_t in_use[kGpus] = {};
// Of kernels that asked for more, each device by itself.
std::map<std::pair<int, const void*>, size_t> allowed_shared;
CUstream_st legacy;
thread_local int current = 0;
std::atomic<cudaError_t> lost{cudaSuccess};

size_t Said(const char* variable, size_t usual) {
  const char* text = getenv(variable);
  return text ? strtoull(text, nullptr, 10) : usual;
}

// The shared memory of a block on a smaller GPU, at most, and its memory in all.
size_t MostSharedNbytes() {
  static const size_t nbytes = Said("DLSYS_EMULATED_SHARED", 227 << 10);
  return nbytes;
}
size_t TotalNbytes() {
  static const size_t nbytes = Said("DLSYS_EMULATED_MEMORY", size_t(8) << 30);
  return nbytes;
}

// True where a pointer leads to another GPU's memory, where a kernel of this one faults. Under the
// mutex.
bool IsElsewhere(const void* pointer) {
  auto after = blocks.upper_bound(pointer);
  if (after == blocks.begin()) return false;
  const auto& [data, block] = *--after;
  const bool inside = (const char*)pointer < (const char*)data + block.nbytes;
  return inside && block.device != current && block.device != kHost;
}

}  // namespace

namespace dlsys {
namespace emulator {

Call::Call(const void* function, const Types& types, const void* const* arguments)
    : function(function), types_(types) {
  const auto slots = [&](size_t k) { return (types.kinds[k].nbytes - 1) / sizeof(Slot) + 1; };
  size_t count = 0;
  for (size_t k = 0; k < types.count; k++) count += slots(k);
  slots_.resize(count);
  Slot* next = slots_.data();
  for (size_t k = 0; k < types.count; next += slots(k++)) addresses_.push_back(next);
  Set(arguments);
}

void Call::Set(const void* const* arguments) {
  for (size_t k = 0; k < types_.count; k++)
    memcpy(addresses_[k], arguments[k], types_.kinds[k].nbytes);
}

std::vector<const void*> Call::Pointers() const {
  std::vector<const void*> found;
  for (size_t k = 0; k < types_.count; k++)
    if (types_.kinds[k].is_pointer) found.push_back(*(const void* const*)addresses_[k]);
  return found;
}

CUstream_st& Of(cudaStream_t stream) { return (uintptr_t)stream > 2 ? *stream : legacy; }

cudaError_t Do(cudaStream_t stream, CUgraphNode_st node) {
  CUgraph_st* graph = Of(stream).graph;
  if (!graph) return node.Run();
  node.behind = Of(stream).tail;
  graph->nodes.push_back(std::make_unique<CUgraphNode_st>(std::move(node)));
  Of(stream).tail = {graph->nodes.back().get()};
  return cudaSuccess;
}

cudaError_t Launch(const cudaLaunchConfig_t& config, const Call& call) {
  if (config.gridDim.x == 0 || config.blockDim.x == 0 || config.blockDim.x > kMostThreads)
    return cudaErrorInvalidValue;
  const int device = Of(config.stream).device;
  if (device != current && device != kHost) return cudaErrorInvalidResourceHandle;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const void* pointer : call.Pointers())
      if (IsElsewhere(pointer)) return cudaErrorIllegalAddress;
    const auto allowed = allowed_shared.find({current, call.function});
    const size_t most = allowed == allowed_shared.end() ? kPlainSharedNbytes : allowed->second;
    if (config.dynamicSmemBytes > most) return cudaErrorInvalidValue;
  }
  CUgraphNode_st node;
  node.type = cudaGraphNodeTypeKernel;
  node.call = std::make_shared<Call>(call);
  node.grid = {nullptr, config.gridDim.x, config.blockDim.x, 1, config.dynamicSmemBytes};
  for (unsigned k = 0; k < config.numAttrs; k++)
    if (config.attrs[k].id == cudaLaunchAttributeClusterDimension)
      node.grid.cluster = config.attrs[k].val.clusterDim.x;
  if (node.grid.blocks % node.grid.cluster) return cudaErrorInvalidValue;
  return Do(config.stream, std::move(node));
}

}  // namespace emulator
}  // namespace dlsys

cudaError_t CUgraphNode_st::Run() const {
  if (type != cudaGraphNodeTypeKernel) {
    act();
    return cudaSuccess;
  }
  Grid full = grid;
  full.call = call.get();
  if (lost == cudaSuccess && !dlsys::emulator::Run(full)) lost = cudaErrorLaunchFailure;
  return lost;
}

// ---- statuses ----

cudaError_t cudaGetLastError() { return lost; }
const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    default:
      return "an error of the emulated GPU";
  }
}
const char* cudaGetErrorString(cudaError_t status) { return cudaGetErrorName(status); }

// ---- the devices ----

// Those that CUDA_VISIBLE_DEVICES names, before the first number that none of them has.
cudaError_t cudaGetDeviceCount(int* count) {
  const char* next = getenv("CUDA_VISIBLE_DEVICES");
  if (!next) next = "0,1";
  *count = 0;
  while (*count < kGpus && *next >= '0' && *next < '0' + kGpus) {
    (*count)++;
    if (*++next == ',') next++;
  }
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kGpus) return cudaErrorInvalidValue;
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = kMajor;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = kMinor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = (int)MostSharedNbytes();
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = (int)MostSharedNbytes() + 1024;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulated GPU", kMajor, kMinor, kMultiprocessors, TotalNbytes()};
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->sharedSizeBytes = 64;  // something; what a kernel declares is not known here
  attributes->numRegs = 0;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || (size_t)value > MostSharedNbytes()) return cudaErrorInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
  allowed_shared[{current, kernel}] = (size_t)value;
  return cudaSuccess;
}
cudaError_t BlocksAtOnce(int* blocks, int threads, size_t shared_nbytes) {
  const size_t by_memory = kSharedOfMultiprocessor / (shared_nbytes + kSharedOfEachBlock);
  *blocks = (int)std::min<size_t>(by_memory, kThreadsOfMultiprocessor / (unsigned)threads);
  return cudaSuccess;
}

// ---- streams and events: what is queued is done ----

struct CUevent_st {
  std::chrono::steady_clock::time_point time;
  int device;
};

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  (*stream)->device = current;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
namespace {

cudaError_t Usable(cudaStream_t stream) {
  return dlsys::emulator::Of(stream).graph ? cudaErrorStreamCaptureUnsupported : lost.load();
}

}  // namespace

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  dlsys::emulator::Of(stream).broken = true;  // if it records
  return Usable(stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  return Usable(stream);  // on one that records, it would be a part of that
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st{{}, current};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const int device = dlsys::emulator::Of(stream).device;
  if (device != event->device && device != kHost) return cudaErrorInvalidResourceHandle;
  event->time = std::chrono::steady_clock::now();
  return Usable(stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return lost; }
cudaError_t cudaEventQuery(cudaEvent_t) { return lost; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return lost;
}

// ---- memory: not initialized is NaN ----

namespace {

// Calls that take time on the whole device are refused while this thread records.
bool Unsafe() { return dlsys::emulator::Capturing(); }

cudaError_t Allocate(void** data, size_t nbytes, int device) {
  constexpr size_t kAlignment = 256;
  if (Unsafe()) return cudaErrorStreamCaptureUnsupported;
  std::lock_guard<std::mutex> lock(mutex);
  const size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  if (device != kHost && rounded > TotalNbytes() - in_use[device]) return cudaErrorMemoryAllocation;
  *data = aligned_alloc(kAlignment, rounded ? rounded : kAlignment);
  if (!*data) return cudaErrorMemoryAllocation;
  memset(*data, 0xff, rounded);
  if (device != kHost) in_use[device] += rounded;
  blocks[*data] = {rounded, device};
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMalloc(void** data, size_t nbytes) { return Allocate(data, nbytes, current); }
cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned) {
  return Allocate(data, nbytes, kHost);
}
cudaError_t cudaFree(void* data) {
  if (Unsafe()) return cudaErrorStreamCaptureUnsupported;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(data);
  if (found == blocks.end()) return data ? cudaErrorInvalidValue : cudaSuccess;
  const Block& block = found->second;
  if (block.device != kHost) in_use[block.device] -= block.nbytes;
  blocks.erase(found);
  free(data);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
cudaError_t cudaMemset(void* data, int byte, size_t nbytes) {
  memset(data, byte, nbytes);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_nbytes, size_t* total_nbytes) {
  std::lock_guard<std::mutex> lock(mutex);
  *free_nbytes = TotalNbytes() - in_use[current];
  *total_nbytes = TotalNbytes();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  CUgraphNode_st node;
  node.type = cudaGraphNodeTypeMemcpy;
  node.act = [=] { memmove(dst, src, nbytes); };
  return dlsys::emulator::Do(stream, std::move(node));
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t nbytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* data, int byte, size_t nbytes, cudaStream_t stream) {
  CUgraphNode_st node;
  node.type = cudaGraphNodeTypeMemset;
  node.act = [=] { memset(data, byte, nbytes); };
  return dlsys::emulator::Do(stream, std::move(node));
}
