// Optimizer steps in place. The rate is an array, so that it may change between runs of a captured
// program.
#include <cmath>

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

// Adam at step + 1, as in ops/update.py. The decays come as 1 - beta, which keeps digits that beta
// in float32 would lose.
void AdamUpdate(DLArray* param, DLArray* mean, DLArray* square, const DLArray* grad,
                const DLArray* lr, const DLArray* step, float decay1, float decay2, float eps) {
  const char* op = "adam_update";
  float* p = Output(op, param);
  float* m = Output(op, mean);
  float* v = Output(op, square);
  const float* g = Input(op, grad);
  CheckSameShape(op, param, mean);
  CheckSameShape(op, param, square);
  CheckSameShape(op, param, grad);
  Check(op, step);
  if (step->dtype != DL_INT64 || Numel(step) != 1)
    Fail("%s: expected a step of one int64, got %s of %s", op, ShapeText(step).c_str(),
         DtypeText(step->dtype));
  const double t = (double)(*(const int64_t*)step->data + 1);
  const float rate = (float)(Rate(op, lr) / -std::expm1(t * std::log1p(-(double)decay1)));
  const float scale = (float)(1 / std::sqrt(-std::expm1(t * std::log1p(-(double)decay2))));
  ParallelFor(Numel(param), kGrain, [&](int64_t begin, int64_t end) {
    Dispatch(DLSYS_SIMD {
      DLSYS_IVDEP
      for (int64_t k = begin; k < end; k++) {
        m[k] += decay1 * (g[k] - m[k]);
        v[k] += decay2 * (g[k] * g[k] - v[k]);
        p[k] -= rate * m[k] / (std::sqrt(v[k]) * scale + eps);
      }
    });
  });
}

DLSYS_KERNEL(cpu, sgd_update, SgdUpdate);
DLSYS_KERNEL(cpu, sgd_momentum_update, SgdMomentumUpdate);
DLSYS_KERNEL(cpu, adam_update, AdamUpdate);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
