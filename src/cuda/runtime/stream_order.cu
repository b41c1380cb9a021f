// Order between streams, by events. CUDA would pull an event on a capturing stream, and whoever
// waits for it, into the capture: hence the list of streams that capture.
#include <algorithm>
#include <mutex>
#include <vector>

#include "cuda/runtime/stream_order.cuh"

namespace dlsys {
namespace cuda {
namespace {

struct OpenCapture {
  cudaStream_t stream;
  cudaEvent_t before;                // behind the work queued before the capture
  std::vector<cudaEvent_t> awaited;  // for which the stream waits when the capture has ended
};

// The events and open captures of a GPU.
class Orders {
 public:
  static Orders* Of(int device) {
    // Never destroyed: at exit the driver may be gone before static destructors run.
    static Orders* const orders = new Orders[kMaxDevices];
    if (device >= kMaxDevices) Fail("streams: at most %d GPUs are supported", kMaxDevices);
    return &orders[device];
  }

  void Wait(cudaStream_t stream, cudaStream_t other) {
    std::lock_guard<std::mutex> lock(mutex_);
    OpenCapture *waits = Find(stream), *runs = Find(other);
    if (waits && runs) {
      Check("wait for a stream", cudaEventSynchronize(runs->before));
    } else if (runs) {
      Check("wait for a stream", cudaStreamWaitEvent(stream, runs->before, 0));
    } else if (waits) {
      waits->awaited.push_back(Mark(other));
    } else {
      WaitAndKeep(stream, Mark(other));
    }
  }

  void WaitFor(const char* op, cudaStream_t stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (const OpenCapture* runs = Find(stream))
      return Check(op, cudaEventSynchronize(runs->before));
    const cudaEvent_t event = Mark(stream);
    lock.unlock();  // others go on meanwhile
    const cudaError_t status = cudaEventSynchronize(event);
    lock.lock();
    free_.push_back(event);
    Check(op, status);
  }

  void Begin(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const cudaEvent_t before = Mark(stream);
    // Thread-local: other threads, and other libraries in them, go on allocating meanwhile.
    const cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (status == cudaSuccess)
      captures_.push_back({stream, before, {}});
    else
      free_.push_back(before);
    Check("capture", status);
  }

  cudaError_t End(cudaStream_t stream, cudaGraph_t* graph) {
    std::lock_guard<std::mutex> lock(mutex_);
    const cudaError_t status = cudaStreamEndCapture(stream, graph);
    const OpenCapture done = *Find(stream);
    captures_.erase(captures_.begin() + (Find(stream) - captures_.data()));
    free_.push_back(done.before);
    for (cudaEvent_t event : done.awaited) WaitAndKeep(stream, event);
    return status;
  }

 private:
  OpenCapture* Find(cudaStream_t stream) {
    const auto is = [&](const OpenCapture& each) { return each.stream == stream; };
    const auto found = std::find_if(captures_.begin(), captures_.end(), is);
    return found == captures_.end() ? nullptr : &*found;
  }

  // An event behind the work that a stream has been given.
  cudaEvent_t Mark(cudaStream_t stream) {
    cudaEvent_t event;
    if (free_.empty()) {
      Check("create an event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
      event = free_.back();
      free_.pop_back();
    }
    const cudaError_t status = cudaEventRecord(event, stream);
    if (status != cudaSuccess) free_.push_back(event);
    Check("record an event", status);
    return event;
  }

  // The event may be used again as soon as the wait is queued: recording it anew does not move
  // waits that were queued before.
  void WaitAndKeep(cudaStream_t stream, cudaEvent_t event) {
    const cudaError_t status = cudaStreamWaitEvent(stream, event, 0);
    free_.push_back(event);
    Check("wait for a stream", status);
  }

  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
  std::vector<OpenCapture> captures_;
};

}  // namespace

void Order(int device, cudaStream_t stream, cudaStream_t other) {
  if (stream != other) Orders::Of(device)->Wait(stream, other);
}

void WaitFor(const char* op, int device, cudaStream_t stream) {
  Orders::Of(device)->WaitFor(op, stream);
}

void BeginCapture(int device, cudaStream_t stream) { Orders::Of(device)->Begin(stream); }

cudaError_t EndCapture(int device, cudaStream_t stream, cudaGraph_t* graph) {
  return Orders::Of(device)->End(stream, graph);
}

}  // namespace cuda
}  // namespace dlsys
