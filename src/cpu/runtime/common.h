// What every CPU kernel asks of its arrays.
#pragma once
#include "runtime/device.h"
#include "runtime/registry.h"
#include "runtime/workspace.h"

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
  if (!a->data && Numel(a) && !Workspace::Querying())
    Fail("%s: an array of shape %s has no memory", op, ShapeText(a).c_str());
}

template <class T = float>
inline const T* Input(const char* op, const DLArray* a) {
  Check(op, a);
  return In<T>(op, a);
}
template <class T = float>
inline T* Output(const char* op, DLArray* a) {
  Check(op, a);
  return Out<T>(op, a);
}

}  // namespace cpu
}  // namespace dlsys
