// The memory of counters that kernels leave at zero: of each stream, and of each captured graph.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/runtime/zeroed.cuh"
#include "runtime/workspace.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int64_t kOfStream = 4096, kOfChunk = 16384;

unsigned* Allocate(const char* op, int64_t count) {
  const RelaxedCapture relaxed;
  unsigned* data = nullptr;
  Check(op, cudaMalloc((void**)&data, count * sizeof(unsigned)));
  return data;
}

void Clear(const char* op, unsigned* data, int64_t count, cudaStream_t stream) {
  Check(op, cudaMemsetAsync(data, 0, count * sizeof(unsigned), stream));
}

std::mutex counters_mutex;
using OfStreams = std::map<std::pair<int, DLStream>, unsigned*>;
OfStreams& Counters() {
  // It is never destroyed: at exit the driver may be gone before static destructors run.
  static OfStreams* const counters = new OfStreams;
  return *counters;
}

}  // namespace

unsigned* ZeroedCounters(const char* op, int device, int64_t count, DLStream stream) {
  if (Workspace::Querying()) return nullptr;
  if (graph_counters) return graph_counters->Take(op, count);
  if (count > kOfStream)
    Fail("%s: it counts by %ld counters; a stream has %ld", op, (long)count, (long)kOfStream);
  std::lock_guard<std::mutex> lock(counters_mutex);
  unsigned*& data = Counters()[{device, stream}];
  if (!data) {
    data = Allocate(op, kOfStream);
    Clear(op, data, kOfStream, Native(stream));
  }
  return data;
}

void FreeCountersOf(int device, DLStream stream) {
  std::lock_guard<std::mutex> lock(counters_mutex);
  const auto found = Counters().find({device, stream});
  if (found == Counters().end()) return;
  const RelaxedCapture relaxed;
  cudaFree(found->second);
  cudaGetLastError();  // at exit the driver may be gone
  Counters().erase(found);
}

GraphCounters::~GraphCounters() {
  for (const Chunk& chunk : chunks_) cudaFree(chunk.data);
  cudaGetLastError();  // at exit the driver may be gone
}

unsigned* GraphCounters::Take(const char* op, int64_t count) {
  if (count > left_) {
    left_ = std::max(count, kOfChunk);
    chunks_.push_back({Allocate(op, left_), left_});
  }
  left_ -= count;
  return chunks_.back().data + left_;
}

void GraphCounters::Clear(const char* op, cudaStream_t stream) {
  if (cleared_) return;
  for (const Chunk& chunk : chunks_) cuda::Clear(op, chunk.data, chunk.count, stream);
  cleared_ = true;
}

}  // namespace cuda
}  // namespace dlsys
