// src/cuda/instructions/fp8.cuh for a CPU; see there.
#pragma once
#include <cstring>

#include "cuda/instructions/hopper.cuh"
#include "math/fp8.h"

namespace dlsys {
namespace cuda {
namespace hopper {

template <class T>
uint32_t Packed8Bit(float low, float high) {
  return (uint32_t)T::Of(high).bits << 8 | T::Of(low).bits;
}

template <class A, class B, int kBlocks>
void MultiplyAdd8Bit(float (&d)[kBlocks][4], uint64_t a, uint64_t b, bool accumulate) {
  emulator::Begin(emulator::Unit::kProducts, [=, sums = d] {
    const OfA<A> rows = ReadRows<A>(a, false);
    OfA<B> of_a;  // the same floats
    memcpy(&of_a, &rows, sizeof of_a);
    AddProducts(sums, kBlocks, of_a, b, false, accumulate);
  });
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
