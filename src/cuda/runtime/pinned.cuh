// Pinned memory of the host for callers of the C API: kernels read and write it where it is.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

void* AllocPinned(int device, size_t nbytes);
void FreePinned(int device, void* data);

// True for an address in memory of AllocPinned.
bool IsPinned(const void* data);

}  // namespace cuda
}  // namespace dlsys
