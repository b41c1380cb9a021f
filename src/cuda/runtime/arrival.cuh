// How the host learns that results have arrived in its memory, sooner than the driver tells it: the
// kernel that wrote them counts the replays of its graph there.
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

  // One thread calls it behind a barrier that all threads have met who wrote results.
  __device__ __forceinline__ void Tell() const {
    if (!count) return;
    __threadfence_system();
    *seen = ++*count;
  }
};

// What this thread's next kernel may tell, where its launcher takes that over; null members
// elsewhere. Only a capture sets it.
inline thread_local Arrival next_arrival = {};

inline Arrival TakeArrival() { return std::exchange(next_arrival, Arrival{}); }

}  // namespace cuda
}  // namespace dlsys
