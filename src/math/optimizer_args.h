// Argument checks of the launchers of optimizer updates, on both devices.
#pragma once
#include "math/indexing.h"
#include "math/optimizer_rules.h"
#include "runtime/registry.h"

namespace dlsys {

// The array of an optional argument, else null.
inline const DLArray* Optional(const char* op, const DLArrayList* list) {
  if (list->count > 1) Fail("%s: expected one array or none, got %ld", op, (long)list->count);
  return list->count ? list->arrays[0] : nullptr;
}

inline const float* OptionalFloat(const char* op, const char* what, const DLArrayList* list) {
  const DLArray* a = Optional(op, list);
  if (a) CheckScalar(op, what, a, DL_FLOAT32);
  return a ? (const float*)a->data : nullptr;
}
inline const long long* OptionalCount(const char* op, const char* what, const DLArrayList* list) {
  const DLArray* a = Optional(op, list);
  if (a) CheckScalar(op, what, a, DL_INT64);
  return a ? (const long long*)a->data : nullptr;
}

// The source of a step's scalars, from the launcher's arguments in their order.
inline rule::Source CheckedSource(const char* op, const DLArrayList* lr, const DLArrayList* step,
                                  const DLArrayList* count, const DLArrayList* scale, int64_t every,
                                  float clip, float l2, float decay, float a, float b, float c,
                                  float d, float e) {
  return {OptionalFloat(op, "learning rate", lr),
          OptionalCount(op, "step", step),
          OptionalCount(op, "count", count),
          OptionalFloat(op, "scale", scale),
          every,
          clip,
          l2,
          decay,
          {a, b, c, d, e}};
}

// Each gradient has `states` arrays of its shape: state j of parameter k is at j * count + k.
inline void CheckStates(const char* op, int states, const DLArrayList* updated,
                        const DLArrayList* grads) {
  if (updated->count != states * grads->count)
    Fail("%s: %ld gradients need %ld states, got %ld", op, (long)grads->count,
         (long)(states * grads->count), (long)updated->count);
  for (int64_t k = 0; k < updated->count; k++) {
    CheckSameShape(op, updated->arrays[k], grads->arrays[k % grads->count]);
    Out(op, updated->arrays[k]);
  }
  for (int64_t k = 0; k < grads->count; k++) In(op, grads->arrays[k]);
}

}  // namespace dlsys
