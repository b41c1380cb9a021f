// Kernels of float32 for storage types of 16 bits, on the CPU: see runtime/widened.h.
#pragma once
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "runtime/widened.h"

namespace dlsys {
namespace cpu {

struct Widening {
  static void Enter(const DLArray* array) { Check("widened", array); }
  template <class From, class To>
  static void Convert(const DLArray* from, DLArray* to, DLStream) {
    const From* x = (const From*)from->data;
    To* y = (To*)to->data;
    ParallelFor(Numel(from), kGrain, [=](int64_t begin, int64_t end) {
      Dispatch(DLSYS_SIMD {
        for (int64_t k = begin; k < end; k++) y[k] = To((float)x[k]);
      });
    });
  }
};

}  // namespace cpu
}  // namespace dlsys
