// Parameter updates in place; the rate lives in device memory, so that it may change between runs
// of a plan.
//
// All arrays are float32 of one shape; param and velocity are read and written, grad is only read
// and overlaps neither.
#include "cuda/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

__device__ __forceinline__ float4 operator*(float a, float4 b) {
  return make_float4(a * b.x, a * b.y, a * b.z, a * b.w);
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator-(float4 a, float4 b) {
  return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}

// param[n] -= lr[0] * grad[n]; T is float or float4, n counts T.
template <class T>
__global__ void SgdKernel(T* param, const T* grad, const float* lr, int64_t n) {
  const float rate = *lr;
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) param[i] = param[i] - rate * grad[i];
}

// velocity[n] = momentum * velocity[n] + grad[n]; param[n] -= lr[0] * velocity[n].
template <class T>
__global__ void MomentumKernel(T* param, T* velocity, const T* grad, const float* lr,
                               float momentum, int64_t n) {
  const float rate = *lr;
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const T v = momentum * velocity[i] + grad[i];
    velocity[i] = v;
    param[i] = param[i] - rate * v;
  }
}

// Adam at step[0] + 1, as in ops/update.py. The decays are 1 - beta, which keeps digits that beta
// in float32 would lose; one thread of a block takes their powers.
__global__ void AdamKernel(float* param, float* mean, float* square, const float* grad,
                           const float* lr, const int64_t* step, float decay1, float decay2,
                           float eps, int64_t n) {
  __shared__ float shared[2];
  if (threadIdx.x == 0) {
    const double t = (double)(*step + 1);
    shared[0] = (float)(*lr / -expm1(t * log1p(-(double)decay1)));
    shared[1] = (float)(1 / sqrt(-expm1(t * log1p(-(double)decay2))));
  }
  __syncthreads();
  const float rate = shared[0];
  const float scale = shared[1];
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const float g = grad[i];
    const float m = mean[i] + decay1 * (g - mean[i]);
    const float v = square[i] + decay2 * (g * g - square[i]);
    mean[i] = m;
    square[i] = v;
    param[i] -= rate * m / (sqrtf(v) * scale + eps);
  }
}

// ---- launchers ----

const float* Rate(const char* op, const DLArray* lr) {
  if (Numel(lr) != 1)
    Fail("%s: expected a rate of 1 element, got shape %s", op, ShapeText(lr).c_str());
  return In(op, lr);
}

void SgdUpdate(DLArray* param, const DLArray* grad, const DLArray* lr, DLStream stream) {
  const char* op = "sgd_update";
  Enter(op, param, grad, lr);
  CheckSameShape(op, param, grad);
  const float* rate = Rate(op, lr);
  float* p = Out(op, param);
  const float* g = In(op, grad);
  const int64_t n = Numel(param);
  if (n % 4 == 0 && Aligned16(p) && Aligned16(g)) {
    Launch(op, SgdKernel<float4>, Blocks(n / 4), kThreads, 0, stream, (float4*)p, (const float4*)g,
           rate, n / 4);
  } else {
    Launch(op, SgdKernel<float>, Blocks(n), kThreads, 0, stream, p, g, rate, n);
  }
}

void SgdMomentumUpdate(DLArray* param, DLArray* velocity, const DLArray* grad, const DLArray* lr,
                       float momentum, DLStream stream) {
  const char* op = "sgd_momentum_update";
  Enter(op, param, velocity, grad, lr);
  CheckSameShape(op, param, velocity);
  CheckSameShape(op, param, grad);
  const float* rate = Rate(op, lr);
  float* p = Out(op, param);
  float* v = Out(op, velocity);
  const float* g = In(op, grad);
  const int64_t n = Numel(param);
  if (n % 4 == 0 && Aligned16(p) && Aligned16(v) && Aligned16(g)) {
    Launch(op, MomentumKernel<float4>, Blocks(n / 4), kThreads, 0, stream, (float4*)p, (float4*)v,
           (const float4*)g, rate, momentum, n / 4);
  } else {
    Launch(op, MomentumKernel<float>, Blocks(n), kThreads, 0, stream, p, v, g, rate, momentum, n);
  }
}

void AdamUpdate(DLArray* param, DLArray* mean, DLArray* square, const DLArray* grad,
                const DLArray* lr, const DLArray* step, float decay1, float decay2, float eps,
                DLStream stream) {
  const char* op = "adam_update";
  Enter(op, param, mean, square, grad, lr, step);
  CheckSameShape(op, param, mean);
  CheckSameShape(op, param, square);
  CheckSameShape(op, param, grad);
  if (step->dtype != DL_INT64 || Numel(step) != 1)
    Fail("%s: expected a step of one int64, got %s of %s", op, ShapeText(step).c_str(),
         DtypeText(step->dtype));
  const int64_t n = Numel(param);
  Launch(op, AdamKernel, Blocks(n), kThreads, 0, stream, Out(op, param), Out(op, mean),
         Out(op, square), In(op, grad), Rate(op, lr), (const int64_t*)step->data, decay1, decay2,
         eps, n);
}

DLSYS_KERNEL(cuda, sgd_update, SgdUpdate);
DLSYS_KERNEL(cuda, sgd_momentum_update, SgdMomentumUpdate);
DLSYS_KERNEL(cuda, adam_update, AdamUpdate);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
