// The host's part of a launch besides the launch itself is the same for every kernel, so it is
// compiled once. None of it waits for the GPU.
#include <mutex>
#include <set>
#include <utility>

#include "cuda/runtime/launch.cuh"
#include "runtime/counters.h"

namespace dlsys {
namespace cuda {

bool BeginLaunch(unsigned grid) { return grid != 0 && !Workspace::Querying(); }

void EndLaunch(const char* op, cudaError_t status) {
  Check(op, status);
  allow_pdl = true;  // within a step each kernel depends on the one before alone
  next_dependencies = nullptr;
  ready_inputs = 0;
  Counters::kernel_launches.fetch_add(1, std::memory_order_relaxed);
}

void AllowShared(const char* op, const void* kernel, size_t nbytes) {
  if (nbytes <= kPlainShared) return;
  int device = 0;
  cudaFuncAttributes attributes;
  Check(op, cudaGetDevice(&device));
  Check(op, cudaFuncGetAttributes(&attributes, kernel));
  Check(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)(SharedLimit(device) - attributes.sharedSizeBytes)));
}

void PreferShared(const char* op, const void* kernel) {
#ifdef DLSYS_EMULATED  // has no cache
  (void)op, (void)kernel;
#else
  static std::mutex mutex;
  static auto* const known = new std::set<std::pair<int, const void*> >;
  int device = 0;
  Check(op, cudaGetDevice(&device));
  std::lock_guard<std::mutex> lock(mutex);
  if (!known->insert({device, kernel}).second) return;
  Check(op, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared));
#endif
}

bool RegistersHold(const char* op, const void* kernel, unsigned threads, int64_t blocks) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes;
  Check(op, cudaGetDevice(&device));
  Check(op, cudaDeviceGetAttribute(&most, cudaDevAttrMaxRegistersPerMultiprocessor, device));
  Check(op, cudaFuncGetAttributes(&attributes, kernel));
  const int64_t of_block = CeilDiv(attributes.numRegs, 8) * 8 * threads;
  return (blocks + 1) * of_block > most;
}

size_t SpreadOut(const char* op, unsigned blocks, size_t nbytes) {
  int device = 0, most = 0;
  Check(op, cudaGetDevice(&device));
  Check(op, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  const size_t crowded = (size_t)most / (CeilDiv(blocks, Multiprocessors(device)) + 1);
  const size_t room = SharedLimit(device) - 4096;  // what a kernel declares comes besides
  return nbytes < crowded && crowded <= room ? crowded : nbytes;
}

}  // namespace cuda
}  // namespace dlsys
