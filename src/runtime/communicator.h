// Communicators, by which the devices of several processes exchange arrays: the C ABI, and what a
// device registers for it.
//
// One process makes an id of kCommunicatorIdNbytes bytes and gives it to the others; then each, as
// one rank of `size`, makes its communicator of it, which returns when all have. Kernels take the
// handle as a number. DL_UNAVAILABLE where the device, or the library that it needs, has none. The
// check fails with what has gone wrong among the ranks since. A communicator lives as long as the
// process.
//
// A window is memory of the same size on all ranks that the others map: collectives between arrays
// at the same offsets of windows read and write the other ranks' memory directly. All ranks open,
// register and close theirs in the same order.
#pragma once
#include "include/dlsys.h"

namespace dlsys {

constexpr int kCommunicatorIdNbytes = 128;

struct Communicators {
  int device_type;
  void (*id)(void* id);
  int64_t (*create)(int device, const void* id, int rank, int size);
  void (*check)(int64_t handle);
  void* (*window_alloc)(int64_t handle, int64_t nbytes);  // null where there is no memory for it
  void (*window_register)(int64_t handle, void* data, int64_t nbytes);
  void (*window_free)(int64_t handle, void* data);
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
// Memory for a window, aligned to 4096 bytes; DL_UNAVAILABLE where the library knows none. It is the
// rank's own until all have registered theirs, which returns when they have.
DLSYS_API int DLWindowAlloc(DLContext ctx, int64_t handle, int64_t nbytes, void** out);
DLSYS_API int DLWindowRegister(DLContext ctx, int64_t handle, void* data, int64_t nbytes);
// Gives back what DLWindowAlloc gave, registered or not, when the GPU has done all work on it.
DLSYS_API int DLWindowFree(DLContext ctx, int64_t handle, void* data);
