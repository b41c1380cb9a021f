// GEMM of floats of 16 bits through kernels of float32, for rungs and GPUs that have no kernel of
// their own type: operands are widened into scratch memory, which is exact, and C is rounded from
// there. Limited by these copies where the product is small. Also an activation of such floats or
// its derivative, for rungs that do not store its input, which memory bandwidth limits.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/gemm.cuh"
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/launch.cuh"
#include "math/storage.h"

namespace dlsys {
namespace cuda {
namespace {

template <class From, class To>
__global__ void ConvertKernel(const From* x, To* y, int64_t n, bool aligned) {
  const int64_t quads = aligned ? n / 4 : 0;
  for (int64_t i = FirstItem(); i < quads; i += ItemStep())
    StoreQuad(y + i * 4, LoadQuad(x + i * 4));
  for (int64_t i = quads * 4 + FirstItem(); i < n; i += ItemStep()) y[i] = To((float)x[i]);
}

template <class From, class To>
void Convert(const char* op, const From* x, To* y, int64_t n, DLStream stream) {
  Launch(op, ConvertKernel<From, To>, Blocks(CeilDiv(n, 4)), kThreads, 0, stream, x, y, n,
         Aligned16(x) && Aligned16(y));
}

// Of an activation, or of the gradient that is its derivative; y may be x.
template <class T>
__global__ void ActivationKernel(int activation, int gradient, const T* x, T* y, int64_t n,
                                 bool aligned) {
  const int64_t quads = aligned ? n / 4 : 0;
  for (int64_t i = FirstItem(); i < quads; i += ItemStep()) {
    const float4 v = LoadQuad(x + i * 4);
    const float side[4] = {v.x, v.y, v.z, v.w};
    float values[4];
#pragma unroll
    for (int e = 0; e < 4; e++) values[e] = gradient ? 1.f : side[e];
    ApplyActivations(activation, gradient, side, values);
    StoreQuad(y + i * 4, make_float4(values[0], values[1], values[2], values[3]));
  }
  for (int64_t i = quads * 4 + FirstItem(); i < n; i += ItemStep()) {
    const float side[1] = {(float)x[i]};
    float value[1] = {gradient ? 1.f : side[0]};
    ApplyActivations(activation, gradient, side, value);
    y[i] = T(value[0]);
  }
}

void RunActivationKernel(const char* op, int dtype, int activation, int gradient, const void* x,
                         void* y, int64_t n, DLStream stream) {
  const bool aligned = Aligned16(x) && Aligned16(y);
  const unsigned blocks = Blocks(CeilDiv(n, 4));
  if (dtype == DL_BFLOAT16)
    return Launch(op, ActivationKernel<bfloat16>, blocks, kThreads, 0, stream, activation, gradient,
                  (const bfloat16*)x, (bfloat16*)y, n, aligned);
  Launch(op, ActivationKernel<float16>, blocks, kThreads, 0, stream, activation, gradient,
         (const float16*)x, (float16*)y, n, aligned);
}

}  // namespace

void RunActivation(const char* op, int dtype, int activation, const void* x, void* y, int64_t n,
                   DLStream stream) {
  RunActivationKernel(op, dtype, activation, 0, x, y, n, stream);
}

void RunSlope(const char* op, int dtype, int activation, void* x, int64_t n, DLStream stream) {
  RunActivationKernel(op, dtype, 0, GradientOf(activation), x, x, n, stream);
}

void Widen(const char* op, int dtype, const void* x, float* y, int64_t n, DLStream stream) {
  if (dtype == DL_BFLOAT16) return Convert(op, (const bfloat16*)x, y, n, stream);
  Convert(op, (const float16*)x, y, n, stream);
}

void Narrow(const char* op, int dtype, const float* x, void* y, int64_t n, DLStream stream) {
  if (dtype == DL_BFLOAT16) return Convert(op, x, (bfloat16*)y, n, stream);
  Convert(op, x, (float16*)y, n, stream);
}

InFloat32::InFloat32(const char* op, const Gemm& narrow, DLStream stream, bool operands)
    : op_(op), narrow_(narrow), wide_(narrow), stream_(stream) {
  const Gemm& p = narrow;
  wide_.c = Floats(p.m * p.n);
  if (p.epilogue.bias) wide_.epilogue.bias = Copied(p.epilogue.bias, p.n);
  if (p.epilogue.side) wide_.epilogue.side = Copied(p.epilogue.side, p.m * p.n);
  if (!operands) return;
  wide_.a = Copied(p.a, p.m * p.k), wide_.b = Copied(p.b, p.k * p.n);
  wide_.dtype = DL_FLOAT32, wide_.precision = Precision::kTf32;
}

float* InFloat32::Floats(int64_t numel) {
  scratch_.push_back(
      std::make_unique<Scratch>(narrow_.ctx, numel * (int64_t)sizeof(float), stream_));
  return scratch_.back()->floats();
}

const float* InFloat32::Copied(const float* narrow, int64_t numel) {
  float* wide = Floats(numel);
  Widen(op_, narrow_.dtype, narrow, wide, numel, stream_);
  return wide;
}

void InFloat32::StoreResult() const {
  Narrow(op_, narrow_.dtype, wide_.c, narrow_.c, narrow_.m * narrow_.n, stream_);
}

}  // namespace cuda
}  // namespace dlsys
