// The C ABI of devices, streams, memory and copies, over whatever devices registered.
#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/counters.h"
#include "runtime/device.h"
#include "runtime/registry.h"

namespace dlsys {
namespace {

// One lock for every allocator. Taken across fork, so that a child never inherits it locked.
std::mutex& Lock() {
  static std::mutex* const lock = [] {
    pthread_atfork([] { Lock().lock(); }, [] { Lock().unlock(); }, [] { Lock().unlock(); });
    return new std::mutex;
  }();
  return *lock;
}

[[maybe_unused]] const std::mutex& made_at_load = Lock();

// The device of ctx after checking that it exists.
const Device& CheckedDevice(DLContext ctx) {
  const Device& device = FindDevice(ctx.device_type);
  const int count = device.count();
  if (ctx.device_id < 0 || ctx.device_id >= count)
    FailWith(DL_UNAVAILABLE, "%s(%d): no such device, this machine has %d",
             DeviceText(ctx.device_type), ctx.device_id, count);
  return device;
}

// Call it with the lock held. The device is asked once: allocators live until the process ends.
CachingAllocator& AllocatorOf(DLContext ctx) {
  using Key = std::pair<int32_t, int32_t>;
  static auto* const allocators = new std::map<Key, std::unique_ptr<CachingAllocator>>;
  const Key key{ctx.device_type, ctx.device_id};
  auto found = allocators->find(key);
  if (found != allocators->end()) return *found->second;
  const Device& device = CheckedDevice(ctx);
  auto& slot = (*allocators)[key];
  slot = std::make_unique<CachingAllocator>(device, ctx.device_id);
  return *slot;
}

template <class F>
int WithAllocator(DLContext ctx, F&& f) {
  return Guard([&] {
    std::lock_guard<std::mutex> hold(Lock());
    f(AllocatorOf(ctx));
  });
}

void CheckRange(const char* function, const void* data, int64_t nbytes) {
  if (nbytes < 0) Fail("%s: negative size %ld", function, (long)nbytes);
  if (nbytes && !data) Fail("%s: null data argument", function);
}

// Fails with what the kernels that were just waited for have left.
void RaiseFault(DLContext ctx) {
  const Device& device = FindDevice(ctx.device_type);
  if (device.raise_fault) device.raise_fault(ctx.device_id);
}

// The places of callers' programs, from number 1 on; as few as these have lines. Call it with the
// lock held.
std::vector<std::unique_ptr<const std::string>>& Places() {
  static auto* const places = new std::vector<std::unique_ptr<const std::string>>;
  return *places;
}

template <class T>
T* CheckOut(const char* function, T* out) {
  if (!out) Fail("%s: null output argument", function);
  return out;
}

}  // namespace

const char* Place::TextOf(int32_t number) {
  std::lock_guard<std::mutex> hold(Lock());
  const auto& places = Places();
  return number >= 1 && (size_t)number <= places.size() ? places[number - 1]->c_str() : "";
}

}  // namespace dlsys

using namespace dlsys;

DLSYS_API int DLPlaceNumber(const char* text, int32_t* number) {
  return Guard([&] {
    CheckOut("DLPlaceNumber", number);
    if (!text) Fail("DLPlaceNumber: null text argument");
    std::lock_guard<std::mutex> hold(Lock());
    static auto* const numbers = new std::map<std::string, int32_t>;
    const auto [found, added] = numbers->try_emplace(text, (int32_t)Places().size() + 1);
    if (added) Places().push_back(std::make_unique<const std::string>(text));
    *number = found->second;
  });
}

DLSYS_API int DLDeviceCount(int32_t device_type, int32_t* count) {
  return Guard(
      [&] { *CheckOut("DLDeviceCount", count) = (int32_t)FindDevice(device_type).count(); });
}

DLSYS_API int DLDeviceName(DLContext ctx, char* text, int64_t nbytes) {
  return Guard([&] {
    if (nbytes <= 0) Fail("DLDeviceName: no room for the text");
    CheckedDevice(ctx).describe(ctx.device_id, CheckOut("DLDeviceName", text), (size_t)nbytes);
  });
}

DLSYS_API int DLDeviceMemory(DLContext ctx, int64_t* free_nbytes, int64_t* total_nbytes) {
  return Guard([&] {
    size_t free_size = 0, total_size = 0;
    CheckedDevice(ctx).memory(ctx.device_id, &free_size, &total_size);
    *CheckOut("DLDeviceMemory", free_nbytes) = (int64_t)free_size;
    *CheckOut("DLDeviceMemory", total_nbytes) = (int64_t)total_size;
  });
}

DLSYS_API int DLGetCounters(DLCounters* out) {
  return Guard([&] {
    *CheckOut("DLGetCounters", out) = {Counters::program_launches, Counters::kernel_launches,
                                       Counters::synchronizations};
  });
}

DLSYS_API int DLStreamCreate(DLContext ctx, DLStream* out) {
  return Guard([&] {
    CheckOut("DLStreamCreate", out);
    *out = CheckedDevice(ctx).stream_create(ctx.device_id);
  });
}

DLSYS_API int DLStreamFree(DLContext ctx, DLStream stream) {
  return Guard([&] {
    const Device& device = FindDevice(ctx.device_type);
    device.synchronize(ctx.device_id, stream);
    {
      std::lock_guard<std::mutex> hold(Lock());
      AllocatorOf(ctx).Adopt(stream);
    }
    device.stream_free(ctx.device_id, stream);
  });
}

DLSYS_API int DLStreamSynchronize(DLContext ctx, DLStream stream) {
  return Guard([&] {
    FindDevice(ctx.device_type).synchronize(ctx.device_id, stream);
    RaiseFault(ctx);
  });
}

DLSYS_API int DLStreamDrain(DLContext ctx, DLStream stream) {
  return Guard([&] { FindDevice(ctx.device_type).synchronize(ctx.device_id, stream); });
}

DLSYS_API int DLStreamWait(DLContext ctx, DLStream stream, DLStream other) {
  return Guard([&] { FindDevice(ctx.device_type).wait(ctx.device_id, stream, other); });
}

DLSYS_API int DLMemoryAlloc(DLContext ctx, int64_t nbytes, DLStream stream, void** out) {
  return WithAllocator(ctx, [&](CachingAllocator& allocator) {
    if (nbytes < 0) Fail("DLMemoryAlloc: negative size %ld", (long)nbytes);
    CheckOut("DLMemoryAlloc", out);
    *out = allocator.Alloc((size_t)nbytes, stream);
  });
}

DLSYS_API int DLMemoryFree(DLContext ctx, void* data) {
  if (!data) return DL_OK;
  return WithAllocator(ctx, [&](CachingAllocator& allocator) { allocator.Free(data); });
}

DLSYS_API int DLMemoryTrim(DLContext ctx) {
  return WithAllocator(ctx, [](CachingAllocator& allocator) { allocator.Trim(); });
}

DLSYS_API int DLMemoryGetStats(DLContext ctx, DLMemoryStats* out) {
  return WithAllocator(ctx, [&](CachingAllocator& allocator) {
    *CheckOut("DLMemoryGetStats", out) = allocator.stats();
  });
}

DLSYS_API int DLMemoryResetPeak(DLContext ctx) {
  return WithAllocator(ctx, [](CachingAllocator& allocator) { allocator.ResetPeak(); });
}

DLSYS_API int DLMemoryFill(DLContext ctx, void* data, int32_t byte, int64_t nbytes,
                           DLStream stream) {
  return Guard([&] {
    CheckRange("DLMemoryFill", data, nbytes);
    const Device& device = FindDevice(ctx.device_type);
    if (nbytes) device.fill(ctx.device_id, data, byte, (size_t)nbytes, stream);
  });
}

DLSYS_API int DLHostAlloc(DLContext ctx, int64_t nbytes, void** out) {
  return Guard([&] {
    const Device& device = FindDevice(ctx.device_type);
    if (nbytes < 1) Fail("DLHostAlloc: expected at least one byte, got %ld", (long)nbytes);
    if (!device.host_alloc)
      FailWith(DL_UNAVAILABLE, "DLHostAlloc: the memory of %s is that of the host", device.name);
    *CheckOut("DLHostAlloc", out) = device.host_alloc(ctx.device_id, (size_t)nbytes);
  });
}

DLSYS_API int DLHostFree(DLContext ctx, void* data) {
  return Guard([&] {
    const Device& device = FindDevice(ctx.device_type);
    if (!device.host_free)
      FailWith(DL_UNAVAILABLE, "DLHostFree: the memory of %s is that of the host", device.name);
    if (data) device.host_free(ctx.device_id, data);
  });
}

DLSYS_API int DLMemoryCopy(void* dst, DLContext dst_ctx, const void* src, DLContext src_ctx,
                           int64_t nbytes, DLStream stream) {
  return Guard([&] {
    CheckRange("DLMemoryCopy", dst, nbytes);
    CheckRange("DLMemoryCopy", src, nbytes);
    const Device& to = FindDevice(dst_ctx.device_type);
    const Device& from = FindDevice(src_ctx.device_type);
    const Device& device = to.type == DL_CPU ? from : to;  // the CPU cannot reach another device
    if (nbytes) device.copy(dst, dst_ctx, src, src_ctx, (size_t)nbytes, stream);
    if (nbytes && to.type == DL_CPU) RaiseFault(src_ctx);
  });
}
