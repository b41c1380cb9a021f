// What a device must offer. One Device a device type, registered at load like a kernel; runtime.cc
// builds the caching allocator, the counters and the C ABI on top of it. Every member may throw
// (see registry.h: Fail).
#pragma once
#include <cstddef>
#include <memory>

#include "include/dlsys.h"

namespace dlsys {

// A program that the device has captured and replays with one launch. Destroying it waits for the
// last replay.
struct CapturedGraph {
  virtual ~CapturedGraph() = default;
  virtual void Replay(DLStream stream, int64_t times) = 0;
  virtual void Wait() = 0;
  virtual void Describe(DLGraphInfo* out) const = 0;
};

// A request to capture `count` calls of `body`, each of which queues a step, between the copies of
// `inputs` and `outputs`, whose tables are read again at every replay. Null streams are one stream.
struct CaptureRequest {
  int64_t count;
  void (*body)(void* state, int64_t k);
  void* state;
  const DLCopy* inputs;
  int64_t ninputs;
  const DLCopy* outputs;
  int64_t noutputs;
  const DLGraphStreams* streams;
};

struct Device {
  int type;          // of the list below
  const char* name;  // its column of the kernel table
  int (*count)();    // fails with DL_UNAVAILABLE and the reason when there is none
  void (*describe)(int id, char* text, size_t nbytes);
  void (*memory)(int id, size_t* free_nbytes, size_t* total_nbytes);
  void* (*alloc)(int id, size_t nbytes);  // nullptr when the device has no such block left
  void (*release)(int id, void* data);
  void (*fill)(int id, void* data, int byte, size_t nbytes, DLStream stream);
  void (*copy)(void* dst, DLContext dst_ctx, const void* src, DLContext src_ctx, size_t nbytes,
               DLStream stream);
  DLStream (*stream_create)(int id);
  void (*stream_free)(int id, DLStream stream);
  void (*synchronize)(int id, DLStream stream);
  void (*wait)(int id, DLStream stream, DLStream other);
  // Runs n bodies in order on the stream and writes the device time of each, in milliseconds.
  void (*profile)(int id, DLStream stream, int64_t n, void (*body)(void* state, int64_t k),
                  void* state, double* ms);
  // Captures the work that a request queues on the stream; nothing is executed. Null where the
  // device has no graphs.
  std::unique_ptr<CapturedGraph> (*capture)(int id, DLStream stream, const CaptureRequest& request);
  // Fails, once, with what kernels found in values that they could not refuse. Call it when they
  // are waited for. Null where kernels fail at once.
  void (*raise_fault)(int id) = nullptr;
  // Memory of the host that the device reads and writes where it is. Null where that is any.
  void* (*host_alloc)(int id, size_t nbytes) = nullptr;
  void (*host_free)(int id, void* data) = nullptr;
};

// The device types: name, column of the kernel table, and whether kernels take a stream, on which
// the host runs ahead of them.
#define DLSYS_DEVICES(DEVICE)     \
  DEVICE(DL_CPU, "cpu", "cpu", 0) \
  DEVICE(DL_GPU, "gpu", "cuda", 1)

// The name of a device type in messages.
inline const char* DeviceText(int type) {
#define DLSYS_DEVICE(code, name, column, streams) \
  if (type == code) return name;
  DLSYS_DEVICES(DLSYS_DEVICE)
#undef DLSYS_DEVICE
  return "unknown device";
}

// CUDA's own words for this mislead: it says that the driver is too old.
inline constexpr char kNoDriver[] =
    "no NVIDIA driver on this machine (libcuda.so.1 not found): install the driver, or use the CPU";

void RegisterDevice(const Device& device) noexcept;
const Device& FindDevice(int type);  // fails with DL_UNAVAILABLE
struct DeviceRegistrar {
  explicit DeviceRegistrar(const Device& device) noexcept { RegisterDevice(device); }
};

// What a device was built with, such as "cuda 13.0 sm_90a", for DLVersion.
void RegisterBuild(const char* text) noexcept;
struct BuildRegistrar {
  explicit BuildRegistrar(const char* text) noexcept { RegisterBuild(text); }
};

}  // namespace dlsys
