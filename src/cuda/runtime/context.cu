// The state of the GPU in this process: is there one, was this process forked, has a fault
// destroyed its context; and CUDA's statuses in words. Nothing here runs when the library is
// loaded.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "cuda/runtime/context.cuh"
#include "runtime/device.h"

#ifndef DLSYS_CUDA_ARCHS
#define DLSYS_CUDA_ARCHS "unknown"
#endif

namespace dlsys {
namespace cuda {
namespace {

__global__ void ProbeKernel() {}

std::atomic<bool> forked{false};
std::atomic<bool> lost{false};
std::atomic_flag lost_claimed = ATOMIC_FLAG_INIT;
char lost_text[512];

void OnForkInChild() { forked.store(true); }

void RememberLost(const char* text) {
  if (lost_claimed.test_and_set()) return;
  snprintf(lost_text, sizeof lost_text, "%s", text);
  lost.store(true, std::memory_order_release);
}

// The answer of cudaGetDeviceCount, asked once; text is the reason when count is 0.
struct Presence {
  int count = 0;
  char text[512] = "";
};

void DescribeOldDriver(char* text, size_t nbytes) {
  if (!dlopen("libcuda.so.1", RTLD_LAZY)) {
    snprintf(text, nbytes, "%s", kNoDriver);
    return;
  }
  int driver = 0;
  cudaDriverGetVersion(&driver);
  snprintf(
      text, nbytes,
      "the NVIDIA driver supports CUDA up to %d.%d and this library was built with CUDA %d.%d: "
      "install a newer driver, or build with an older toolkit, or use the CPU",
      driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

bool IsWrongArchitecture(cudaError_t status) {
  return status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
         status == cudaErrorUnsupportedPtxVersion;
}

void DescribeWrongArchitecture(char* text, size_t nbytes) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  snprintf(text, nbytes,
           "this library holds no code for GPU %d (compute capability %d.%d; built for %s): run "
           "`make lib` on "
           "this machine",
           device, major, minor, DLSYS_CUDA_ARCHS);
}

void DescribeUnavailable(cudaError_t status, char* text, size_t nbytes) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (status == cudaErrorInsufficientDriver) {
    DescribeOldDriver(text, nbytes);
  } else if (IsWrongArchitecture(status)) {
    DescribeWrongArchitecture(text, nbytes);
  } else if (status == cudaErrorNoDevice) {
    snprintf(text, nbytes,
             "no GPU is visible to this process (CUDA_VISIBLE_DEVICES is %s): check nvidia-smi, or "
             "use the CPU",
             visible ? visible : "not set");
  } else {
    snprintf(text, nbytes, "the GPU cannot be used: %s (%s): check nvidia-smi, or use the CPU",
             cudaGetErrorString(status), cudaGetErrorName(status));
  }
}

// Asking for a kernel's attributes creates the context of GPU 0 and finds out whether this library
// has code for it.
Presence FindPresence() {
  Presence presence;
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) {
    pthread_atfork(nullptr, nullptr, OnForkInChild);
    cudaFuncAttributes attributes;
    status = count == 0 ? cudaErrorNoDevice : cudaFuncGetAttributes(&attributes, ProbeKernel);
  }
  if (status == cudaSuccess) {
    presence.count = count;
  } else {
    DescribeUnavailable(status, presence.text, sizeof presence.text);
    cudaGetLastError();
  }
  return presence;
}

const Presence& FoundPresence() {
  static const Presence presence = FindPresence();
  return presence;
}

// Faults after which CUDA answers every call with the same error until the process ends.
bool DestroysContext(cudaError_t status) {
  switch ((int)status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case 721:  // cudaErrorContained, CUDA 12.8
    case 722:  // cudaErrorTensorMemoryLeak, CUDA 12.8
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

void CheckUsable(const char* op) {
  if (forked.load(std::memory_order_relaxed))
    FailWith(DL_UNAVAILABLE,
             "%s: this process was forked from one that had used the GPU, which CUDA does not "
             "allow: start workers "
             "with the 'spawn' method, or use the GPU only in the child",
             op);
  if (lost.load(std::memory_order_acquire))
    FailWith(DL_DEVICE_LOST,
             "%s: the GPU was lost by an earlier fault (%s): restart the process to use it again",
             op, lost_text);
}

// The GPU that was current as this thread came into the library, where another had to be.
thread_local int found_current = 0;

void MakeCurrent(const char* op, int device) {
  int current = 0;
  Check(op, cudaGetDevice(&current));
  if (current == device) return;
  if (!Visit::on_leaving) {
    found_current = current;
    Visit::on_leaving = [] { cudaSetDevice(found_current); };
  }
  Check(op, cudaSetDevice(device));
}

std::string BuildText() {
  const int major = CUDART_VERSION / 1000, minor = CUDART_VERSION % 1000 / 10;
  return "cuda " + std::to_string(major) + "." + std::to_string(minor) + " " DLSYS_CUDA_ARCHS;
}
const BuildRegistrar built(BuildText().c_str());

}  // namespace

int DeviceCount() {
  const Presence& presence = FoundPresence();
  if (presence.count == 0) FailWith(DL_UNAVAILABLE, "%s", presence.text);
  CheckUsable("device count");
  return presence.count;
}

void Use(const char* op, int device) {
  const Presence& presence = FoundPresence();
  if (presence.count == 0) FailWith(DL_UNAVAILABLE, "%s: %s", op, presence.text);
  CheckUsable(op);
  if (device < 0 || device >= presence.count)
    FailWith(DL_UNAVAILABLE, "%s: no GPU %d: this machine has GPUs 0 to %d", op, device,
             presence.count - 1);
  // With one GPU the current device cannot be another. With several it is asked every time: another
  // library in this process may have changed it.
  if (presence.count > 1) MakeCurrent(op, device);
}

int Multiprocessors(int device) {
  int count = 0;
  Check("device", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

size_t SharedLimit(int device) {
  int nbytes = 0;
  Check("device", cudaDeviceGetAttribute(&nbytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return (size_t)nbytes;
}

int ComputeMajor(int device) {
  int major = 0, minor = 0, found = 0;
  Check("device", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  Check("device", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  for (const int arch : {__CUDA_ARCH_LIST__})  // ascending, 900 for sm_90
    if (arch <= 100 * major + 10 * minor) found = arch / 100;
  return found;
}

void Report(const char* op, cudaError_t status) {
  cudaGetLastError();
  char text[512];
  if (IsWrongArchitecture(status)) {
    DescribeWrongArchitecture(text, sizeof text);
    FailWith(DL_UNAVAILABLE, "%s: %s", op, text);
  }
  snprintf(text, sizeof text, "%s: CUDA error %d, %s (%s)", op, (int)status,
           cudaGetErrorString(status), cudaGetErrorName(status));
  if (DestroysContext(status)) {
    RememberLost(text);
    throw Error(DL_DEVICE_LOST, text);
  }
  throw Error(status == cudaErrorMemoryAllocation ? DL_OUT_OF_MEMORY : DL_ERROR, text);
}

}  // namespace cuda
}  // namespace dlsys
