// The C ABI of communicators, over those that one kind of device registered.
#include "runtime/communicator.h"

#include "runtime/device.h"
#include "runtime/registry.h"

namespace dlsys {
namespace {

Communicators registered = {};

const Communicators& Of(DLContext ctx) {
  FindDevice(ctx.device_type).count();  // fails where there is none
  if (!registered.id || registered.device_type != ctx.device_type)
    FailWith(DL_UNAVAILABLE, "%s: this device has no communicators; ranks exchange host arrays",
             DeviceText(ctx.device_type));
  return registered;
}

}  // namespace

void RegisterCommunicators(const Communicators& communicators) noexcept {
  registered = communicators;
}

}  // namespace dlsys

using namespace dlsys;

DLSYS_API int DLCommunicatorId(DLContext ctx, void* id) {
  return Guard([&] { Of(ctx).id(NotNull(id)); });
}

DLSYS_API int DLCommunicatorCreate(DLContext ctx, const void* id, int32_t rank, int32_t size,
                                   int64_t* handle) {
  return Guard([&] {
    NotNull((void*)id);
    NotNull(handle);
    if (rank < 0 || rank >= size)
      Fail("DLCommunicatorCreate: there is no rank %d of %d", rank, size);
    *handle = Of(ctx).create(ctx.device_id, id, rank, size);
  });
}

DLSYS_API int DLCommunicatorCheck(DLContext ctx, int64_t handle) {
  return Guard([&] { Of(ctx).check(handle); });
}

DLSYS_API int DLCommunicatorSumsInKernels(DLContext ctx, int64_t handle, int32_t* found) {
  return Guard([&] { *(int32_t*)NotNull(found) = Of(ctx).sums_in_kernels(handle); });
}

DLSYS_API int DLCommunicatorMemory(DLContext ctx, int64_t handle, int64_t nbytes, void** data) {
  return Guard([&] { *(void**)NotNull(data) = Of(ctx).memory(handle, nbytes); });
}
