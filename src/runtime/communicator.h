// Communicators, by which the devices of several processes exchange arrays: the C ABI, and what a
// device registers for it.
//
// One process makes an id of kCommunicatorIdNbytes bytes and gives it to the others; then each, as
// one rank of `size`, makes its communicator of it, which returns when all have. Kernels take the
// handle as a number. DL_UNAVAILABLE where the device, or the library that it needs, has none. The
// check fails with what has gone wrong among the ranks since. `sums_in_kernels` finds 0, or a
// number that decides the shapes of launches: where all ranks find the same one, other kernels than
// those of collectives may sum over them. `memory` allocates what their kernels read of each other;
// the same bytes for the same number of them. A communicator lives as long as the process.
#pragma once
#include "include/dlsys.h"

namespace dlsys {

constexpr int kCommunicatorIdNbytes = 128;

struct Communicators {
  int device_type;
  void (*id)(void* id);
  int64_t (*create)(int device, const void* id, int rank, int size);
  void (*check)(int64_t handle);
  int (*sums_in_kernels)(int64_t handle);
  void* (*memory)(int64_t handle, int64_t nbytes);
};

void RegisterCommunicators(const Communicators& communicators) noexcept;
struct CommunicatorsRegistrar {
  explicit CommunicatorsRegistrar(const Communicators& communicators) noexcept {
    RegisterCommunicators(communicators);
  }
};

}  // namespace dlsys

DLSYS_API int DLCommunicatorId(DLContext ctx, void* id);
DLSYS_API int DLCommunicatorCreate(DLContext ctx, const void* id, int32_t rank, int32_t size,
                                   int64_t* handle);
DLSYS_API int DLCommunicatorCheck(DLContext ctx, int64_t handle);
DLSYS_API int DLCommunicatorSumsInKernels(DLContext ctx, int64_t handle, int32_t* found);
DLSYS_API int DLCommunicatorMemory(DLContext ctx, int64_t handle, int64_t nbytes, void** data);
