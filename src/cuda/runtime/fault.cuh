// What kernels find among the values that they are given and cannot refuse: an index or a label
// that is none of those that there are. A kernel cannot fail. It makes NaN of what depends on the
// value and says so in the record of its GPU; the host looks at that where it waits for the GPU.
//
// The record lies in pinned memory of the host, so that looking costs the host one load and a
// kernel nothing before it has something to say. It lives as long as the process: recorded programs
// keep its address.
#pragma once
#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// One fault, the first since the host last looked. Each counter is written by one side alone, since
// atomics on memory of the host are none for the host: the GPU counts the faults that it began and
// has written, the host those that it has told. All are equal where there is nothing to tell.
struct FaultRecord {
  unsigned begun, written, told;
  int32_t place;            // in the caller's program, of DLPlaceNumber
  const char *op, *what;    // the operator, and "index" or "label"
  int64_t value, position;  // in the array of indices or labels
  int64_t count;            // of those that there are
};

// What a kernel has to say of a fault beside the value: a parameter of kernels.
struct Faults {
  FaultRecord* record;
  const char *op, *what;  // texts of the host, which no kernel reads
  int32_t place;

  // Says that `value` at `position` is none of `count`. One thread a value calls it.
  __device__ __forceinline__ void OutOfRange(int64_t value, int64_t position, int64_t count) const {
    const unsigned told = *(volatile unsigned*)&record->told;
    if (atomicCAS(&record->begun, told, told + 1) != told) return;  // another's is to be told yet
    record->place = place;
    record->op = op, record->what = what;
    record->value = value, record->position = position, record->count = count;
    __threadfence_system();
    *(volatile unsigned*)&record->written = told + 1;
  }
};

// True where a kernel that this thread has launched may leave a fault; whoever asks clears it.
inline thread_local bool may_leave_faults = false;

// For a launch by the calling thread on a GPU in use. `op` and `what` are literals.
Faults FaultsOf(const char* op, const char* what, int device);

// Fails with DL_OUT_OF_RANGE where a kernel of the GPU, whose work the caller has waited for, left
// a fault, once.
void RaiseFault(int device);

}  // namespace cuda
}  // namespace dlsys
