// A ring of stages in shared memory, each with a barrier that a producer and its consumers wait for
// by turns.
#pragma once
#include <cstdint>

#include "cuda/instructions/ptx.cuh"

namespace dlsys {
namespace cuda {

// A stage of the ring, and the parity of its barriers' phase there.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void Advance(int count) {
    const int to = stage + count;
    stage = to % kStages;
    parity ^= to / kStages & 1;
  }
};

}  // namespace cuda
}  // namespace dlsys
