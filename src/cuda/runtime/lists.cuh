// What the launchers of kernels over lists of arrays share.
#pragma once
#include <initializer_list>

#include "cuda/runtime/context.cuh"

namespace dlsys {
namespace cuda {

// Every such kernel begins here: all arrays of all lists live on one GPU, which becomes current.
inline void EnterAll(const char* op, std::initializer_list<const DLArrayList*> lists) {
  const DLArray* first = nullptr;
  for (const DLArrayList* list : lists)
    for (int64_t k = 0; k < list->count; k++) {
      if (!first) first = list->arrays[k];
      CheckArray(op, list->arrays[k], first->ctx);
    }
  if (first) Use(op, first->ctx.device_id);
}

}  // namespace cuda
}  // namespace dlsys
