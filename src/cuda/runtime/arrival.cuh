// How the host learns that results have arrived in its memory, sooner than the driver tells it: the
// kernel that wrote them counts the replays of its graph there. A fence between results and count
// takes as long as a way through the bus, so that each element of a small result is told alone,
// together with the count.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace dlsys {
namespace cuda {

// What the last kernel of a captured graph has to tell. Its count lies on the device and is told in
// pinned memory of the host.
struct Arrival {
  unsigned* count;  // of the graph's replays; null: nobody waits for this kernel
  volatile uint32_t* seen;
  volatile uint64_t* elements;  // of a result, as TellElement writes them; null: Tell tells of all

  // The number of this replay. All threads that need it call it before a barrier, behind which one
  // of them calls Tell.
  __device__ __forceinline__ unsigned Next() const { return *count + 1; }

  // Tells element k of a result with four bytes an element.
  __device__ __forceinline__ void TellElement(int64_t k, uint32_t bits, unsigned replay) const {
    elements[k] = (uint64_t)replay << 32 | bits;
  }

  // One thread calls it behind a barrier that all threads have met who wrote results.
  __device__ __forceinline__ void Tell(unsigned replay) const {
    if (!elements) {
      __threadfence_system();
      *seen = replay;
    }
    *count = replay;
  }
};

// What a capture offers to this thread's next kernel, whose launcher may take it.
struct ArrivalOffer {
  Arrival arrival;
  bool taken, by_elements;
};
inline thread_local ArrivalOffer* next_arrival = nullptr;

// The members are null where nothing is offered. by_elements: the kernel can tell elements.
inline Arrival TakeArrival(bool by_elements) {
  ArrivalOffer* const offer = std::exchange(next_arrival, nullptr);
  if (!offer) return {};
  if (!by_elements) offer->arrival.elements = nullptr;
  offer->taken = true;
  offer->by_elements = offer->arrival.elements != nullptr;
  return offer->arrival;
}

}  // namespace cuda
}  // namespace dlsys
