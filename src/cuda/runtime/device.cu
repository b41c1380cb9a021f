// The device `cuda` as src/runtime/device.h asks for it: memory, copies, streams, timing.
//
// Streams are non-blocking: nothing here orders work against the legacy default stream. Memory
// comes from cudaMalloc, never from managed memory.
#include <vector>

#include "cuda/runtime/context.cuh"
#include "cuda/runtime/fault.cuh"
#include "cuda/runtime/graph.cuh"
#include "cuda/runtime/pinned.cuh"
#include "cuda/runtime/staging.cuh"
#include "cuda/runtime/stream_order.cuh"
#include "cuda/runtime/zeroed.cuh"
#include "runtime/counters.h"
#include "runtime/device.h"

namespace dlsys {
namespace cuda {
namespace {

void Describe(int id, char* text, size_t nbytes) {
  Use("device name", id);
  cudaDeviceProp properties;
  Check("device name", cudaGetDeviceProperties(&properties, id));
  snprintf(text, nbytes, "%s (compute capability %d.%d, %d multiprocessors, %.1f GiB)",
           properties.name, properties.major, properties.minor, properties.multiProcessorCount,
           (double)properties.totalGlobalMem / (1 << 30));
}

void Memory(int id, size_t* free_nbytes, size_t* total_nbytes) {
  Use("device memory", id);
  Check("device memory", cudaMemGetInfo(free_nbytes, total_nbytes));
}

void* Alloc(int id, size_t nbytes) {
  Use("allocate", id);
  void* data = nullptr;
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaMalloc(&data, nbytes);
  if (status != cudaErrorMemoryAllocation) {
    Check("allocate", status);
    return data;
  }
  cudaGetLastError();
  return nullptr;
}

void Release(int id, void* data) {
  Use("free", id);
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaFree(data);
  if (status != cudaErrorCudartUnloading) Check("free", status);
}

void Fill(int id, void* data, int byte, size_t nbytes, DLStream stream) {
  Use("fill", id);
  Check("fill", cudaMemsetAsync(data, byte, nbytes, Native(stream)));
}

void CopyToHost(int id, void* dst, const void* src, size_t nbytes, cudaStream_t stream) {
  Use("copy from the GPU", id);
  Check("copy from the GPU", cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDeviceToHost, stream));
  Check("copy from the GPU", cudaStreamSynchronize(stream));
  Counters::synchronizations++;
}

void CopyBetween(void* dst, int to, const void* src, int from, size_t nbytes, cudaStream_t stream) {
  Use("copy on the GPU", to);
  Use("copy on the GPU", from);
  Check("copy on the GPU", to == from
                               ? cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDeviceToDevice, stream)
                               : cudaMemcpyPeerAsync(dst, to, src, from, nbytes, stream));
}

void Copy(void* dst, DLContext dst_ctx, const void* src, DLContext src_ctx, size_t nbytes,
          DLStream stream) {
  if (nbytes == 0) return;
  if (dst_ctx.device_type != DL_GPU)
    return CopyToHost(src_ctx.device_id, dst, src, nbytes, Native(stream));
  if (src_ctx.device_type == DL_GPU)
    return CopyBetween(dst, dst_ctx.device_id, src, src_ctx.device_id, nbytes, Native(stream));
  Use("copy to the GPU", dst_ctx.device_id);
  CopyFromHost(dst_ctx.device_id, dst, src, nbytes, Native(stream));
}

DLStream StreamCreate(int id) {
  Use("create a stream", id);
  cudaStream_t stream;
  Check("create a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return (DLStream)stream;
}

void StreamFree(int id, DLStream stream) {
  Use("free a stream", id);
  FreeCountersOf(id, stream);
  const cudaError_t status = cudaStreamDestroy(Native(stream));
  if (status != cudaErrorCudartUnloading) Check("free a stream", status);
}

void Synchronize(int id, DLStream stream) {
  Use("synchronize", id);
  WaitFor("synchronize", id, Native(stream));
  Counters::synchronizations++;
}

class Event {
 public:
  explicit Event(unsigned flags) {
    Check("create an event", cudaEventCreateWithFlags(&event_, flags));
  }
  ~Event() {
    if (event_) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

void Wait(int id, DLStream stream, DLStream other) {
  Use("wait for a stream", id);
  Order(id, Native(stream), Native(other));
}

void Profile(int id, DLStream stream, int64_t n, void (*body)(void* state, int64_t k), void* state,
             double* ms) {
  Use("profile", id);
  std::vector<Event> events;
  for (int64_t k = 0; k <= n; k++) events.emplace_back(cudaEventDefault);
  Check("profile", cudaEventRecord(events[0].get(), Native(stream)));
  for (int64_t k = 0; k < n; k++) {
    body(state, k);
    Check("profile", cudaEventRecord(events[k + 1].get(), Native(stream)));
  }
  Check("profile", cudaStreamSynchronize(Native(stream)));
  for (int64_t k = 0; k < n; k++) {
    float elapsed = 0;
    Check("profile", cudaEventElapsedTime(&elapsed, events[k].get(), events[k + 1].get()));
    ms[k] = elapsed;
  }
}

const DeviceRegistrar registrar(Device{
    DL_GPU, "cuda", DeviceCount, Describe, Memory, Alloc, Release, Fill, Copy, StreamCreate,
    StreamFree, Synchronize, Wait, Profile, Capture, RaiseFault, AllocPinned, FreePinned});

}  // namespace
}  // namespace cuda
}  // namespace dlsys
