// A ring of pinned memory a device. A copy is cut into pieces; each is copied into the ring by the
// host and from there by the GPU, and its bytes are free again when the event behind it has passed.
// Pieces leave in the order in which they came, whatever their stream, so the ring is a queue.
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "cuda/staging.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr size_t kRingNbytes = size_t(16) << 20;
constexpr size_t kPieceNbytes = size_t(2) << 20;
constexpr size_t kAlignment = 256;
constexpr size_t kMaxPieces = 64;

class Ring {
 public:
  void Copy(char* dst, const char* src, size_t nbytes, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!data_)
      Check("copy to the GPU", cudaHostAlloc((void**)&data_, kRingNbytes, cudaHostAllocDefault));
    for (size_t done = 0; done < nbytes; done += kPieceNbytes) {
      const size_t piece = nbytes - done < kPieceNbytes ? nbytes - done : kPieceNbytes;
      CopyPiece(dst + done, src + done, piece, stream);
    }
  }

 private:
  struct Piece {
    size_t end;  // a position, see head_
    cudaEvent_t event;
  };

  void CopyPiece(char* dst, const char* src, size_t nbytes, cudaStream_t stream) {
    cudaEvent_t event = TakeEvent();
    char* place = data_ + Reserve(nbytes);
    memcpy(place, src, nbytes);
    const cudaError_t copied = cudaMemcpyAsync(dst, place, nbytes, cudaMemcpyHostToDevice, stream);
    const cudaError_t recorded = copied == cudaSuccess ? cudaEventRecord(event, stream) : copied;
    // Without its event the piece would be handed out while the GPU may still read it.
    if (recorded != cudaSuccess) cudaStreamSynchronize(stream);
    pieces_.push_back({head_, event});
    Check("copy to the GPU", recorded);
  }

  // The offset of nbytes contiguous free bytes; waits for the oldest pieces while there are none.
  size_t Reserve(size_t nbytes) {
    const size_t size = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    const size_t to_end = kRingNbytes - head_ % kRingNbytes;
    const size_t begin = size <= to_end ? head_ : head_ + to_end;
    while (!pieces_.empty() && (begin + size - tail_ > kRingNbytes || pieces_.size() >= kMaxPieces))
      Retire();
    if (pieces_.empty()) tail_ = begin;
    head_ = begin + size;
    return begin % kRingNbytes;
  }

  void Retire() {
    const Piece oldest = pieces_.front();
    Check("copy to the GPU", cudaEventSynchronize(oldest.event));
    tail_ = oldest.end;
    free_events_.push_back(oldest.event);
    pieces_.pop_front();
  }

  cudaEvent_t TakeEvent() {
    cudaEvent_t event;
    if (free_events_.empty()) {
      Check("copy to the GPU", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      return event;
    }
    event = free_events_.back();
    free_events_.pop_back();
    return event;
  }

  std::mutex mutex_;
  char* data_ = nullptr;
  // Positions count all bytes that ever passed; position % kRingNbytes is the place in the ring.
  // The bytes in [tail_, head_) are in use.
  size_t head_ = 0, tail_ = 0;
  std::deque<Piece> pieces_;
  std::vector<cudaEvent_t> free_events_;
};

}  // namespace

void CopyFromHost(int device, void* dst, const void* src, size_t nbytes, cudaStream_t stream) {
  // Never destroyed: at exit the driver may be gone before static destructors run.
  static Ring* const rings = new Ring[kMaxDevices];
  if (device >= kMaxDevices) Fail("copy to the GPU: at most %d GPUs are supported", kMaxDevices);
  rings[device].Copy((char*)dst, (const char*)src, nbytes, stream);
}

}  // namespace cuda
}  // namespace dlsys
