// The blocks of pinned memory that callers hold.
#include <map>
#include <mutex>

#include "cuda/runtime/pinned.cuh"

namespace dlsys {
namespace cuda {
namespace {

struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;  // by address
};

// Never destroyed: callers may free a block at exit.
Blocks& Held() {
  static Blocks* const blocks = new Blocks;
  return *blocks;
}

}  // namespace

void* AllocPinned(int device, size_t nbytes) {
  const char* op = "allocate pinned memory";
  Use(op, device);
  const RelaxedCapture relaxed;
  void* data = nullptr;
  Check(op, cudaHostAlloc(&data, nbytes, cudaHostAllocPortable | cudaHostAllocMapped));
  std::lock_guard<std::mutex> lock(Held().mutex);
  Held().sizes[(uintptr_t)data] = nbytes;
  return data;
}

void FreePinned(int device, void* data) {
  const char* op = "free pinned memory";
  {
    std::lock_guard<std::mutex> lock(Held().mutex);
    if (!Held().sizes.erase((uintptr_t)data)) Fail("%s: it is none of this library", op);
  }
  Use(op, device);
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaFreeHost(data);
  if (status != cudaErrorCudartUnloading) Check(op, status);
}

bool IsPinned(const void* data) {
  std::lock_guard<std::mutex> lock(Held().mutex);
  const auto next = Held().sizes.upper_bound((uintptr_t)data);
  if (next == Held().sizes.begin()) return false;
  const auto block = std::prev(next);
  return (uintptr_t)data < block->first + block->second;
}

}  // namespace cuda
}  // namespace dlsys
