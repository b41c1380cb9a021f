// Counts the CUDA calls that a process makes, whoever makes them and however CUDA is linked.
//
// CUPTI calls back at the entry of every function of the runtime and driver APIs. Preloading could
// not see them: the library that is tested carries the runtime inside it. The runtime calls the
// driver, so one cudaMalloc may be seen at both; the two are counted apart and never added up.
#include <cupti.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

enum Counter {
  kRuntimeAllocations,  // cudaMalloc and its kin: device, managed and asynchronous memory
  kDriverAllocations,   // cuMemAlloc and its kin, and cuMemCreate of the virtual memory API
  kHostAllocations,     // pinned host memory, at either API
  kKernelLaunches,      // kernels one by one, at either API; one may be seen at both
  kGraphLaunches,       // whole graphs, at the runtime API
  kSynchronizations,    // waits for a stream, an event or a device, at the runtime API
  kCounters
};

std::atomic<int64_t> counters[kCounters];
CUpti_SubscriberHandle subscriber;

bool Starts(const char* name, const char* prefix) {
  return strncmp(name, prefix, strlen(prefix)) == 0;
}

int RuntimeCounter(const char* name) {
  if (Starts(name, "cudaMallocHost") || Starts(name, "cudaHostAlloc")) return kHostAllocations;
  if (Starts(name, "cudaMalloc")) return kRuntimeAllocations;
  if (Starts(name, "cudaGraphLaunch")) return kGraphLaunches;
  if (Starts(name, "cudaLaunch")) return kKernelLaunches;
  if (strstr(name, "Synchronize")) return kSynchronizations;
  return kCounters;
}

int DriverCounter(const char* name) {
  if (Starts(name, "cuMemAllocHost") || Starts(name, "cuMemHostAlloc")) return kHostAllocations;
  if (Starts(name, "cuLaunch")) return kKernelLaunches;
  if (Starts(name, "cuMemAlloc") || Starts(name, "cuMemCreate")) return kDriverAllocations;
  return kCounters;
}

void CUPTIAPI Count(void*, CUpti_CallbackDomain domain, CUpti_CallbackId, const void* data) {
  const CUpti_CallbackData* call = (const CUpti_CallbackData*)data;
  if (call->callbackSite != CUPTI_API_ENTER) return;
  const int counter = domain == CUPTI_CB_DOMAIN_RUNTIME_API ? RuntimeCounter(call->functionName)
                                                            : DriverCounter(call->functionName);
  if (counter != kCounters) counters[counter].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

// Starts to count; call it before the process touches CUDA. Returns CUPTI's status, 0 when all went
// well.
extern "C" int CounterStart() {
  CUptiResult status = cuptiSubscribe(&subscriber, (CUpti_CallbackFunc)Count, nullptr);
  if (status == CUPTI_SUCCESS)
    status = cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_RUNTIME_API);
  if (status == CUPTI_SUCCESS)
    status = cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API);
  return status;
}

// CUPTI's text for a status.
extern "C" const char* CounterError(int status) {
  const char* text = "unknown status";
  cuptiGetResultString((CUptiResult)status, &text);
  return text;
}

// The counts so far, in the order of the enumeration; room for `capacity` of them. Returns how many
// there are.
extern "C" int CounterRead(int64_t* out, int capacity) {
  for (int k = 0; k < kCounters && k < capacity; ++k)
    out[k] = counters[k].load(std::memory_order_relaxed);
  return kCounters;
}
