// Argument checks of the launchers of optimizer updates, on both devices.
#pragma once
#include "operators/indexing.h"
#include "operators/optimizer_rules.h"
#include "runtime/registry.h"

namespace dlsys {

constexpr int kMaxGemms = 8;  // of a fused weight update

// An operand of a GEMM in arguments of kernels.
enum OperandCode : int32_t { kNoOperand, kOperandA, kOperandB };

// What of a fused weight update is the same in every run.
struct WeightUpdateOptions {
  rule::UpdateOptions update;
  int32_t precision;
  // By GEMM: the OperandCode of the operand whose sums are a gradient too, and of the uint8 one.
  int32_t sums[kMaxGemms], u8[kMaxGemms];
  int64_t ranks;  // the communicator over whose ranks gradients are summed, or 0
};

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
                                  const DLArrayList* count, const DLArrayList* scale,
                                  const rule::UpdateOptions& options) {
  return {OptionalFloat(op, "learning rate", lr), OptionalCount(op, "step", step),
          OptionalCount(op, "count", count), OptionalFloat(op, "scale", scale), options};
}

// Each gradient has the states of Rule of its shape: state j of parameter k is at j * count + k.
// Parameters are all of storage type T or of float32, and each gradient is; slots are float32.
template <class T, class Rule>
inline void CheckStates(const char* op, const DLArrayList* updated, const DLArrayList* grads) {
  if (updated->count != Rule::kStates * grads->count)
    Fail("%s: %ld gradients need %ld states, got %ld", op, (long)grads->count,
         (long)(Rule::kStates * grads->count), (long)updated->count);
  for (int64_t k = 0; k < updated->count; k++) {
    DLArray* state = updated->arrays[k];
    CheckSameShape(op, state, grads->arrays[k % grads->count]);
    if (k < grads->count && state->dtype != DL_FLOAT32)
      Out<rule::Stored<T, Rule>>(op, state);
    else
      Out(op, state);
    if (k < grads->count && state->dtype != updated->arrays[0]->dtype)
      Fail("%s: expected parameters of one dtype, got %s and %s", op,
           DtypeText(updated->arrays[0]->dtype), DtypeText(state->dtype));
  }
  for (int64_t k = 0; k < grads->count; k++) {
    const DLArray* grad = grads->arrays[k];
    if (grad->dtype != DL_FLOAT32) In<T>(op, grad);
  }
}

inline void CheckOneDtype(const char* op, const DLArrayList* grads) {
  for (int64_t k = 1; k < grads->count; k++)
    if (grads->arrays[k]->dtype != grads->arrays[0]->dtype)
      Fail("%s: expected gradients of one dtype, got %s and %s", op,
           DtypeText(grads->arrays[0]->dtype), DtypeText(grads->arrays[k]->dtype));
}

// Each float32 array has a copy of its shape in T.
template <class T>
inline void CheckCopies(const char* op, const DLArrayList* arrays, const DLArrayList* copies) {
  if (copies->count != arrays->count)
    Fail("%s: expected %ld copies, got %ld", op, (long)arrays->count, (long)copies->count);
  for (int64_t k = 0; k < arrays->count; k++) {
    In(op, arrays->arrays[k]);
    In<T>(op, copies->arrays[k]);
    CheckSameShape(op, arrays->arrays[k], copies->arrays[k]);
  }
}

}  // namespace dlsys
