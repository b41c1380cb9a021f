// Staging buffers: slots of pinned memory, a set for each device. A copy is cut into pieces; the
// host copies each into a slot and the GPU from there, and the slot is free again when the event
// behind it has passed. Several threads copy concurrently: a slot is one thread's from Take to
// Send. A slot that is free again is reused before a fresh one, so that only as many are in use as
// copies are in flight, and these stay in the caches.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

#include "cuda/runtime/staging.cuh"

namespace dlsys {
namespace cuda {
namespace {

// The GPU waits while the first piece is copied, and each piece costs calls: about a tenth of the
// time that the host takes to copy one of this size.
constexpr size_t kSlotNbytes = size_t(512) << 10;
constexpr size_t kSlots = 32;
const char* const kCopy = "copy to the GPU";

class Staging {
 public:
  void Copy(char* dst, const char* src, size_t nbytes, cudaStream_t stream) {
    for (size_t done = 0; done < nbytes; done += kSlotNbytes) {
      const size_t piece = nbytes - done < kSlotNbytes ? nbytes - done : kSlotNbytes;
      const Slot slot = Take();
      memcpy(slot.data, src + done, piece);
      const cudaError_t status = Send(slot, dst + done, piece, stream);
      GiveBack(slot);
      Check(kCopy, status);
    }
  }

 private:
  struct Slot {
    char* data;
    cudaEvent_t sent;  // behind the last copy from it
  };

  Slot Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    given_back_.wait(lock, [&] { return made_ < kSlots || !sent_.empty(); });
    const bool passed = !sent_.empty() && Passed(sent_.front());
    if (!passed && made_ < kSlots) return Make();
    const Slot oldest = sent_.front();
    sent_.pop_front();
    lock.unlock();
    const cudaError_t status = passed ? cudaSuccess : cudaEventSynchronize(oldest.sent);
    if (status != cudaSuccess) GiveBack(oldest);
    Check(kCopy, status);
    return oldest;
  }

  static bool Passed(const Slot& slot) {
    const cudaError_t status = cudaEventQuery(slot.sent);
    if (status != cudaErrorNotReady) Check(kCopy, status);
    if (status != cudaSuccess) cudaGetLastError();  // else the next launch would seem to fail
    return status == cudaSuccess;
  }

  Slot Make() {
    if (!data_)
      Check(kCopy, cudaHostAlloc((void**)&data_, kSlots * kSlotNbytes, cudaHostAllocDefault));
    Slot slot = {data_ + made_ * kSlotNbytes, nullptr};
    Check(kCopy, cudaEventCreateWithFlags(&slot.sent, cudaEventDisableTiming));
    made_++;
    return slot;
  }

  static cudaError_t Send(const Slot& slot, char* dst, size_t nbytes, cudaStream_t stream) {
    const cudaError_t copied =
        cudaMemcpyAsync(dst, slot.data, nbytes, cudaMemcpyHostToDevice, stream);
    const cudaError_t marked = copied == cudaSuccess ? cudaEventRecord(slot.sent, stream) : copied;
    // Without its event the slot would be handed out while the GPU may still read it.
    if (marked != cudaSuccess) cudaStreamSynchronize(stream);
    return marked;
  }

  void GiveBack(const Slot& slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    sent_.push_back(slot);
    given_back_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable given_back_;
  char* data_ = nullptr;
  size_t made_ = 0;
  std::deque<Slot> sent_;  // in the order in which they were
};

}  // namespace

void CopyFromHost(int device, void* dst, const void* src, size_t nbytes, cudaStream_t stream) {
  // Never destroyed: at exit the driver may be gone before static destructors run.
  static Staging* const staging = new Staging[kMaxDevices];
  if (device >= kMaxDevices) Fail("%s: at most %d GPUs are supported", kCopy, kMaxDevices);
  staging[device].Copy((char*)dst, (const char*)src, nbytes, stream);
}

}  // namespace cuda
}  // namespace dlsys
