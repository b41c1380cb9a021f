// Optimizer steps in place. The rate is an array, so that it may change between runs of a captured
// program.
#include "parallel.h"
#include "simd.h"
#include "strides.h"

namespace dlsys {
namespace cpu {
namespace {

float Rate(const char* op, const DLArray* lr) {
  const float* rate = Input(op, lr);
  if (Numel(lr) != 1)
    Fail("%s: expected a learning rate of one element, got shape %s", op, ShapeText(lr).c_str());
  return *rate;
}

// param -= lr * grad
void SgdUpdate(DLArray* param, const DLArray* grad, const DLArray* lr) {
  float* p = Output("sgd_update", param);
  const float* g = Input("sgd_update", grad);
  const float rate = Rate("sgd_update", lr);
  CheckSameShape("sgd_update", param, grad);
  ParallelFor(Numel(param), kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      DLSYS_IVDEP
      for (int64_t k = begin; k < end; k++) p[k] -= rate * g[k];
    });
  });
}

// velocity = momentum * velocity + grad; param -= lr * velocity
void SgdMomentumUpdate(DLArray* param, DLArray* velocity, const DLArray* grad, const DLArray* lr,
                       float momentum) {
  float* p = Output("sgd_momentum_update", param);
  float* v = Output("sgd_momentum_update", velocity);
  const float* g = Input("sgd_momentum_update", grad);
  const float rate = Rate("sgd_momentum_update", lr);
  CheckSameShape("sgd_momentum_update", param, velocity);
  CheckSameShape("sgd_momentum_update", param, grad);
  ParallelFor(Numel(param), kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      DLSYS_IVDEP
      for (int64_t k = begin; k < end; k++) {
        v[k] = momentum * v[k] + g[k];
        p[k] -= rate * v[k];
      }
    });
  });
}

DLSYS_KERNEL(cpu, sgd_update, SgdUpdate);
DLSYS_KERNEL(cpu, sgd_momentum_update, SgdMomentumUpdate);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
