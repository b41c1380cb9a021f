// What every CPU kernel asks of its arrays, and memory that a thread keeps between calls.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>

#include "../device.h"
#include "../registry.h"

namespace dlsys {
namespace cpu {

// Fails when an array could not be walked safely on the CPU.
inline void Check(const char* op, const DLArray* a) {
  if (a->ndim < 0 || a->ndim > DL_MAX_NDIM)
    Fail("%s: an array has %d dimensions, expected 0 to %d", op, a->ndim, DL_MAX_NDIM);
  if (a->ndim && !a->shape) Fail("%s: an array has no shape", op);
  for (int i = 0; i < a->ndim; i++)
    if (a->shape[i] < 0) Fail("%s: negative size in shape %s", op, ShapeText(a).c_str());
  if (a->ctx.device_type != DL_CPU)
    Fail("%s: expected arrays on cpu(0), got one on %s(%d)", op, DeviceText(a->ctx.device_type),
         a->ctx.device_id);
  if (!a->data && Numel(a))
    Fail("%s: an array of shape %s has no memory", op, ShapeText(a).c_str());
}

inline const float* Input(const char* op, const DLArray* a) {
  Check(op, a);
  return In(op, a);
}
inline float* Output(const char* op, DLArray* a) {
  Check(op, a);
  return Out(op, a);
}

// Working memory that grows and is then reused; one instance a thread and a use, hence
// `thread_local`.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { free(data_); }

  // Room for n values, 64-byte aligned, with whatever the last use left there.
  template <class T>
  T* Get(size_t n) {
    const size_t nbytes = (n * sizeof(T) + 63) / 64 * 64;
    if (nbytes > nbytes_) Grow(nbytes);
    return (T*)data_;
  }

 private:
  void Grow(size_t nbytes) {
    free(data_);
    nbytes_ = 0;
    data_ = aligned_alloc(64, nbytes);
    if (!data_) throw std::bad_alloc();
    nbytes_ = nbytes;
  }

  void* data_ = nullptr;
  size_t nbytes_ = 0;
};

}  // namespace cpu
}  // namespace dlsys
