// Copies and fills of bits, for movement and indexing. A copy goes along a strided loop, in units
// of up to 16 bytes where both sides keep neighboring elements together. Outputs overlap no input.
// Memory bandwidth limits it; with units of an element, the arithmetic of indices does.
#pragma once
#include <cstring>

#include "cuda/pointwise/loop.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

struct alignas(16) Bits128 {
  uint64_t words[2];
};

// Calls f with a null pointer to bits of this many bytes, a power of 2 up to 16.
template <class F>
void WithBits(int64_t nbytes, F&& f) {
  if (nbytes == 1) return f((uint8_t*)nullptr);
  if (nbytes == 2) return f((uint16_t*)nullptr);
  if (nbytes == 4) return f((uint32_t*)nullptr);
  if (nbytes == 8) return f((uint64_t*)nullptr);
  f((Bits128*)nullptr);
}

template <class T, class Index>
__global__ void CopyKernel(const T* x, T* y, int64_t n, Loop loop) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const Offsets at = Locate<Index>(loop, (Index)i);
    y[at.y] = x[at.x];
  }
}

template <class T>
__global__ void FillBitsKernel(T value, T* y, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = value;
}

// Makes units of neighboring elements along the inner axis of a loop, and gives their bytes.
inline int64_t Widen(Loop* loop, int64_t nbytes, const void* x, const void* y) {
  const int inner = loop->ndim - 1;
  const auto fits = [&](int64_t unit) {
    const int64_t count = unit / nbytes;
    bool found = (uintptr_t)x % unit == 0 && (uintptr_t)y % unit == 0 && loop->x[inner] == 1 &&
                 loop->y[inner] == 1 && loop->shape[inner] % count == 0;
    for (int k = 0; k < inner; k++)
      found = found && loop->x[k] % count == 0 && loop->y[k] % count == 0;
    return found;
  };
  int64_t unit = 16;
  while (unit > nbytes && !fits(unit)) unit /= 2;
  const int64_t count = unit / nbytes;
  loop->shape[inner] /= count;
  for (int k = 0; k < inner; k++) loop->x[k] /= count, loop->y[k] /= count;
  return unit;
}

// y at the loop's strides y = x at its strides x, elements of `nbytes`.
inline void CopyAlong(const char* op, const void* x, void* y, int64_t nbytes, const Loop& along,
                      DLStream stream) {
  Loop loop = Fold(along);
  const int64_t unit = Widen(&loop, nbytes, x, y);
  int64_t n = 1;
  for (int k = 0; k < loop.ndim; k++) n *= loop.shape[k];
  WithBits(unit, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto kernel = n <= UINT32_MAX ? CopyKernel<T, uint32_t> : CopyKernel<T, int64_t>;
    Launch(op, kernel, Blocks(n), kThreads, 0, stream, (const T*)x, (T*)y, n, loop);
  });
}

// y = the lower bytes of `bits`, elements of `nbytes`.
inline void FillBits(const char* op, uint64_t bits, void* y, int64_t n, int64_t nbytes,
                     DLStream stream) {
  Bits128 pattern;
  for (int64_t k = 0; k < 16; k += nbytes) memcpy((char*)&pattern + k, &bits, (size_t)nbytes);
  const bool wide = (uintptr_t)y % 16 == 0 && n * nbytes % 16 == 0;
  WithBits(wide ? 16 : nbytes, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T value;
    memcpy(&value, &pattern, sizeof value);
    const int64_t count = n * nbytes / (int64_t)sizeof(T);
    Launch(op, FillBitsKernel<T>, Blocks(count), kThreads, 0, stream, value, (T*)y, count);
  });
}

}  // namespace cuda
}  // namespace dlsys
