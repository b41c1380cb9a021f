// Windows: memory that each rank of a group has, which kernels of all its ranks read where it lies,
// over NVLink, by NCCL's device API (device_api.cuh). What a kernel finds in another rank's window
// is what was written there before a barrier of all ranks, and stays until the next barrier.
#pragma once
#include "cuda/collective/device_api.cuh"

namespace dlsys {
namespace cuda {

// The window of a group as a kernel's argument.
struct Window {
#ifdef DLSYS_NCCL_DEVICE
  ncclWindow_t handle;
#endif
  const char* own;  // where this rank has it
  int rank, size;   // this one, and how many there are

  // Where a rank has what this one has at x.
  __device__ __forceinline__ const char* Of(int other, const void* x) const {
#ifdef DLSYS_NCCL_DEVICE
    if (size > 1)
      return (const char*)ncclGetLsaPointer(handle, (size_t)((const char*)x - own), other);
#endif
    return (const char*)x;
  }
};

#ifdef DLSYS_NCCL_DEVICE
// Makes the barrier of a group, before all else here. Returns true where NCCL makes windows of it,
// too, which its settings may forbid though GPUs reach each other's memory. A call of all ranks.
bool MakeBarrier(int64_t handle);
#endif

// The window that has these bytes. The first call for a window is one of all ranks, which may not
// be captured.
Window WindowOf(const char* op, int64_t handle, const void* memory, int64_t nbytes);

// Queues a wait for all ranks of the group: what they have queued before is done, in the sight of
// what is queued behind. The barriers of a group must be queued in one order.
void Barrier(const char* op, int64_t handle, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
