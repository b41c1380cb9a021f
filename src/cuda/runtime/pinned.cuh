// Pinned memory of the host for callers of the C API: kernels read and write it where it is.
#pragma once
#include "cuda/runtime/context.cuh"
#include "math/int_math.h"

namespace dlsys {
namespace cuda {

void* AllocPinned(int device, size_t nbytes);
void FreePinned(int device, void* data);

// True for an address in memory of AllocPinned.
bool IsPinned(const void* data);

// The elements that a block reads where `blocks` of them read so many there, each for all: every
// multiprocessor has few reads under way on the bus, of which 16 elements are whole ones.
inline int PartOfEach(int64_t numel, int64_t blocks) {
  return (int)RoundUp(CeilDiv(numel, blocks), 16);
}

}  // namespace cuda
}  // namespace dlsys
