// A GPU on the CPU: as much of CUDA as this library's kernels and launchers ask for, so that
// src/cuda/ compiles with a C++ compiler and runs where there is no GPU. For tests and for reading
// kernels in a debugger; slow.
//
// A launch is done when it returns. The threads of a block are fibers (fibers.h) of one thread of
// the CPU, each running until it has to wait for others; blocks run one after the other, those of a
// cluster concurrently. Memory that is uninitialized on a GPU is NaN here, and every order that
// CUDA leaves open is drawn anew each time (order.h), so that a result that depends on it shows.
#pragma once
#include <math.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "emulator/fibers.h"
#include "emulator/vectors.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local
#define __CUDA_ARCH_LIST__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#define CUDART_VERSION 13000

// ---- what kernels call ----

inline void __syncthreads() { dlsys::emulator::MeetBlock(); }
inline void __syncwarp() { dlsys::emulator::MeetWarp(); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { dlsys::emulator::Sleep(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance, int width = 32) {
  const int lane = dlsys::emulator::Lane();
  const int other = lane ^ distance;
  return dlsys::emulator::FromLane(value, other / width > lane / width ? lane : other);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance, int width = 32) {
  const int lane = dlsys::emulator::Lane();
  return dlsys::emulator::FromLane(value, lane % width < distance ? lane : lane - distance);
}
template <class T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
  const int lane = dlsys::emulator::Lane();
  return dlsys::emulator::FromLane(value, lane / width * width + source % width);
}

inline unsigned atomicAdd(unsigned* to, unsigned value) {
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
inline unsigned atomicCAS(unsigned* to, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
// Byte k of the result is that byte of (y, x) which the k-th hexadecimal digit of `selector` names.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = (uint64_t)y << 32 | x;
  unsigned result = 0;
  for (int k = 0; k < 4; k++)
    result |= (unsigned)(both >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k;
  return result;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

// ---- statuses ----

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorCudartUnloading = 4,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorECCUncorrectable = 214,
  cudaErrorNvlinkUncorrectable = 220,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorContextIsDestroyed = 709,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorUnknown = 999,
};
cudaError_t cudaGetLastError();
const char* cudaGetErrorName(cudaError_t status);
const char* cudaGetErrorString(cudaError_t status);

// ---- the devices ----

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxRegistersPerMultiprocessor,
};
struct cudaDeviceProp {
  char name[256];
  int major, minor, multiProcessorCount;
  size_t totalGlobalMem;
};
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDriverGetVersion(int* version);

// ---- streams and events ----

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;

inline const cudaStream_t cudaStreamLegacy = (cudaStream_t)1;  // 2 is that of the thread
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2;
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end);

// ---- memory ----

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
cudaError_t cudaMalloc(void** data, size_t nbytes);
cudaError_t cudaFree(void* data);
cudaError_t cudaFreeHost(void* data);
cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned flags);
cudaError_t cudaMemGetInfo(size_t* free_nbytes, size_t* total_nbytes);
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemset(void* data, int byte, size_t nbytes);
cudaError_t cudaMemcpyPeerAsync(void* dst, int to, const void* src, int from, size_t nbytes,
                                cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* data, int byte, size_t nbytes, cudaStream_t stream);

// ---- the driver's functions ----

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result);

// ---- launches ----

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeCooperative,  // as all grids are here
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace dlsys {
namespace emulator {

// A kernel with its arguments, copied. Nothing but Types knows their types, as every instance of a
// kernel has its own.
class Call {
 public:
  struct Kind {
    size_t nbytes;
    bool is_pointer;
  };
  struct Types {
    void (*run)(const void* function, void* const* arguments);
    const Kind* kinds;
    size_t count;
  };
  Call(const void* function, const Types& types, const void* const* arguments);
  Call(const Call& other) : Call(other.function, other.types_, other.addresses_.data()) {}
  void Run() const { types_.run(function, addresses_.data()); }  // as the thread that is `here`
  void** Arguments() { return addresses_.data(); }               // the address of each
  void Set(const void* const* arguments);                        // copies new ones
  std::vector<const void*> Pointers() const;                     // those among them
  const void* const function;

 private:
  struct alignas(64) Slot {
    char bytes[64];
  };
  const Types types_;
  std::vector<Slot> slots_;
  std::vector<void*> addresses_;
};

template <class... Params>
struct CallOf {
  static_assert((std::is_trivially_copyable_v<Params> && ...));
  using Kernel = void (*)(Params...);
  static constexpr Call::Kind kinds[] = {{sizeof(Params), std::is_pointer_v<Params>}...,
                                         {0, false}};

  template <size_t... I>
  static void Spread(Kernel kernel, void* const* arguments, std::index_sequence<I...>) {
    kernel(*(Params*)arguments[I]...);
  }
  static void Run(const void* function, void* const* arguments) {
    Spread((Kernel)function, arguments, std::index_sequence_for<Params...>());
  }
  static Call Make(Kernel kernel, const Params&... arguments) {
    const void* const addresses[] = {(const void*)&arguments..., nullptr};
    return Call((const void*)kernel, {Run, kinds, sizeof...(Params)}, addresses);
  }
};

cudaError_t Launch(const cudaLaunchConfig_t& config, const Call& call);

}  // namespace emulator
}  // namespace dlsys

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Args&... args) {
  return dlsys::emulator::Launch(*config,
                                 dlsys::emulator::CallOf<Params...>::Make(kernel, args...));
}

struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int numRegs;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
template <class... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Params...)) {
  return cudaFuncGetAttributes(attributes, (const void*)kernel);
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t BlocksAtOnce(int* blocks, int threads, size_t shared_nbytes);
template <class... Params>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(Params...),
                                                          int threads, size_t shared_nbytes) {
  return BlocksAtOnce(blocks, threads, shared_nbytes);
}

// ---- capture ----

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed,
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamUpdateCaptureDependenciesFlags { cudaStreamSetCaptureDependencies };
struct cudaGraphEdgeData {
  unsigned char from_port, to_port, type;
};
enum { cudaGraphKernelNodePortProgrammatic = 1, cudaGraphDependencyTypeProgrammatic = 1 };
enum cudaGraphNodeType {
  cudaGraphNodeTypeKernel,
  cudaGraphNodeTypeMemcpy,
  cudaGraphNodeTypeMemset,
};
struct cudaKernelNodeParams {
  void* func;
  dim3 gridDim, blockDim;
  unsigned sharedMemBytes;
  void** kernelParams;
};
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, void* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, void* edges,
                                     size_t* count);
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* nodes,
                                                void* edges, size_t count, unsigned flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count);
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type);
cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, cudaKernelNodeParams* params);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned flags);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphNodeSetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned enabled);
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params);
