// Kernels of float32 for storage types of 16 bits, on the GPU: see runtime/widened.h.
#pragma once
#include "cuda/gemm/gemm.cuh"
#include "runtime/widened.h"

namespace dlsys {
namespace cuda {

struct Widening {
  static void Enter(const DLArray* array) { ::dlsys::cuda::Enter("widened", array); }
  template <class From, class To>
  static void Convert(const DLArray* from, DLArray* to, DLStream stream) {
    if constexpr (kIs16Bit<From>)
      Widen("widened", kDtype<From>, from->data, (float*)to->data, Numel(from), stream);
    else
      Narrow("widened", kDtype<To>, (const float*)from->data, to->data, Numel(from), stream);
  }
};

}  // namespace cuda
}  // namespace dlsys
