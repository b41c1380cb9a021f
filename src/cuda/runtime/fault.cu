// The host's side of the record of faults.
#include <atomic>
#include <mutex>
#include <new>

#include "cuda/runtime/fault.cuh"

namespace dlsys {
namespace cuda {
namespace {

std::atomic<FaultRecord*> records[kMaxDevices];
std::mutex mutex;  // of those who make a record or tell what is in one

FaultRecord* RecordOf(int device) {
  if (device >= kMaxDevices) Fail("faults: at most %d GPUs are supported", kMaxDevices);
  FaultRecord* record = records[device].load(std::memory_order_acquire);
  if (record) return record;
  std::lock_guard<std::mutex> lock(mutex);
  record = records[device].load(std::memory_order_relaxed);
  if (record) return record;
  const RelaxedCapture relaxed;
  void* data = nullptr;
  Check("faults", cudaHostAlloc(&data, sizeof(FaultRecord), cudaHostAllocMapped));
  record = new (data) FaultRecord();
  records[device].store(record, std::memory_order_release);
  return record;
}

}  // namespace

Faults FaultsOf(const char* op, const char* what, int device) {
  may_leave_faults = true;
  return {RecordOf(device), op, what, Place::Current()};
}

void RaiseFault(int device) {
  FaultRecord* const record = records[device].load(std::memory_order_acquire);
  if (!record) return;
  const auto written = [&] { return __atomic_load_n(&record->written, __ATOMIC_ACQUIRE); };
  const auto told = [&] { return __atomic_load_n(&record->told, __ATOMIC_RELAXED); };
  if (written() == told()) return;
  std::unique_lock<std::mutex> lock(mutex);
  if (written() == told()) return;  // by another thread, just now
  const FaultRecord fault = *record;
  __atomic_store_n(&record->told, fault.written, __ATOMIC_RELEASE);
  lock.unlock();
  FailOutOfRange(fault.op, fault.what, fault.value, fault.position, fault.count,
                 Place::TextOf(fault.place));
}

}  // namespace cuda
}  // namespace dlsys
