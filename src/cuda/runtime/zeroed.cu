// The memory of counters that kernels leave at zero: of each stream, and of each captured graph. It
// is the allocator's, whose statistics count it.
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

unsigned* Allocate(int device, int64_t count, DLStream stream) {
  void* data = nullptr;
  const int64_t nbytes = count * (int64_t)sizeof(unsigned);
  const int status = DLMemoryAlloc({device, DL_GPU}, nbytes, stream, &data);
  if (status != DL_OK) throw Error(status, DLGetLastError());
  return (unsigned*)data;
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
  if (graph_counters) return graph_counters->Take(device, count);
  if (count > kOfStream)
    Fail("%s: it counts by %ld counters; a stream has %ld", op, (long)count, (long)kOfStream);
  std::lock_guard<std::mutex> lock(counters_mutex);
  unsigned*& data = Counters()[{device, stream}];
  if (!data) {
    data = Allocate(device, kOfStream, stream);
    Clear(op, data, kOfStream, Native(stream));
  }
  return data;
}

void FreeCountersOf(int device, DLStream stream) {
  std::lock_guard<std::mutex> lock(counters_mutex);
  const auto found = Counters().find({device, stream});
  if (found == Counters().end()) return;
  DLMemoryFree({device, DL_GPU}, found->second);
  Counters().erase(found);
}

GraphCounters::~GraphCounters() {
  for (const Chunk& chunk : chunks_) DLMemoryFree({chunk.device, DL_GPU}, chunk.data);
}

unsigned* GraphCounters::Take(int device, int64_t count) {
  if (count > left_) {
    left_ = std::max(count, kOfChunk);
    chunks_.push_back({Allocate(device, left_, nullptr), left_, device});
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
