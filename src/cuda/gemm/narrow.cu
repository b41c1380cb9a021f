// GEMM of floats of 16 bits through kernels of float32, for rungs and GPUs that have no kernel of
// their own type: operands are widened into scratch memory, which is exact, and C is rounded from
// there. Limited by these copies where the product is small. Also an activation of such floats and
// its derivative, for rungs that do not make both, which memory bandwidth limits.
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

template <class T>
__global__ void ActivationKernel(int activation, const T* x, T* y, int64_t n, bool aligned) {
  const int64_t quads = aligned ? n / 4 : 0;
  for (int64_t i = FirstItem(); i < quads; i += ItemStep()) {
    const float4 v = LoadQuad(x + i * 4);
    float values[4] = {v.x, v.y, v.z, v.w};
    ApplyActivations(activation, 0, values, values);
    StoreQuad(y + i * 4, make_float4(values[0], values[1], values[2], values[3]));
  }
  for (int64_t i = quads * 4 + FirstItem(); i < n; i += ItemStep()) {
    float value[1] = {(float)x[i]};
    ApplyActivations(activation, 0, value, value);
    y[i] = T(value[0]);
  }
}

// A derivative, quantized, by the gradient that multiplies by it.
template <class T>
__global__ void SlopeKernel(int gradient, const T* x, uint8_t* slopes, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) {
    const float side[1] = {(float)x[i]};
    float slope[1] = {1.f};
    ApplyActivations(0, gradient, side, slope);
    slopes[i] = (uint8_t)QuantizedSlope(slope[0]);
  }
}

template <class T>
__global__ void WidenSlopesKernel(const uint8_t* slopes, T* y, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = T((float)slopes[i]);
}

// Calls run with a value of the dtype, of 16 bits.
template <class Run>
void ByDtype(int dtype, const Run& run) {
  dtype == DL_BFLOAT16 ? run(bfloat16()) : run(float16());
}

}  // namespace

void RunActivation(const char* op, int dtype, int activation, const void* x, void* y, int64_t n,
                   DLStream stream) {
  ByDtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Launch(op, ActivationKernel<T>, Blocks(CeilDiv(n, 4)), kThreads, 0, stream, activation,
           (const T*)x, (T*)y, n, Aligned16(x) && Aligned16(y));
  });
}

void RunSlope(const char* op, int dtype, int activation, const void* x, uint8_t* slopes, int64_t n,
              DLStream stream) {
  ByDtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Launch(op, SlopeKernel<T>, Blocks(n), kThreads, 0, stream, GradientOf(activation), (const T*)x,
           slopes, n);
  });
}

void WidenSlopes(const char* op, int dtype, const uint8_t* slopes, void* y, int64_t n,
                 DLStream stream) {
  const auto widen = [&](auto zero) {
    using T = decltype(zero);
    Launch(op, WidenSlopesKernel<T>, Blocks(n), kThreads, 0, stream, slopes, (T*)y, n);
  };
  dtype == DL_FLOAT32 ? widen(0.f) : ByDtype(dtype, widen);
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
