// What every CUDA file stands on: the state of the GPU in this process, errors in words.
#pragma once
#include <cuda_runtime.h>

#include "runtime/registry.h"
#include "runtime/workspace.h"

namespace dlsys {
namespace cuda {

// Makes `device` current for this thread until it leaves the library. Fails with DL_UNAVAILABLE
// when there is no usable GPU or this process is a fork of one that used it, and with
// DL_DEVICE_LOST and the first cause after a fault. No CUDA call comes before it.
void Use(const char* op, int device);

constexpr int kMaxDevices = 64;  // for which tables have room

int DeviceCount();                // fails with DL_UNAVAILABLE and the reason when there is none
int Multiprocessors(int device);  // of a device that was used before
size_t SharedLimit(int device);   // bytes of shared memory that a block can have
// 9 on an H200; less where the newest code that this library has for the GPU is for older ones:
// kernels compiled for those neither wait for earlier ones nor meet in clusters.
int ComputeMajor(int device);

// Turns a CUDA status into a failure and clears it; a fault that has destroyed the context is
// remembered.
[[noreturn]] void Report(const char* op, cudaError_t status);
inline void Check(const char* op, cudaError_t status) {
  if (status != cudaSuccess) Report(op, status);
}

inline cudaStream_t Native(DLStream stream) { return (cudaStream_t)stream; }

inline bool Aligned16(const void* p) { return (uintptr_t)p % 16 == 0; }

inline void CheckArray(const char* op, const DLArray* a, DLContext ctx) {
  if (a->ctx.device_type != DL_GPU) Fail("%s: expected arrays on the GPU, got one on the CPU", op);
  if (a->ctx.device_id != ctx.device_id)
    Fail("%s: arrays on different GPUs: %d and %d", op, ctx.device_id, a->ctx.device_id);
  if (a->ndim < 0 || a->ndim > DL_MAX_NDIM)
    Fail("%s: expected at most %d dimensions, got %d", op, DL_MAX_NDIM, a->ndim);
}

// Every kernel begins here: all arrays live on one GPU, which becomes current.
template <class... Arrays>
inline void Enter(const char* op, const DLArray* first, const Arrays*... rest) {
  CheckArray(op, first, first->ctx);
  (CheckArray(op, rest, first->ctx), ...);
  Use(op, first->ctx.device_id);
}

// The arrival counters of a single-pass reduction: the int32 array of `count` zeros that a plan
// holds for it. A launch leaves them zero again.
inline unsigned* CheckedCounters(const char* op, const DLArray* counters, int64_t count) {
  if (counters->dtype != DL_INT32 || Numel(counters) != count)
    Fail("%s: expected arrival counters, %ld int32 zeros, got %s of %s", op, (long)count,
         ShapeText(counters).c_str(), DtypeText(counters->dtype));
  return (unsigned*)counters->data;
}

// While it lives a thread that captures may allocate and free memory, itself or through a library:
// that is no part of the capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace cuda
}  // namespace dlsys
