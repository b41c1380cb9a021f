// Activations and their gradients for epilogues whose results are of 16 bits: the formulas of
// math/functors.h with ex2.approx and rcp.approx, two instructions of the special function unit an
// element. Where those take a logistic function of -u beside that of u, these take 1 less the
// latter. Errors are below 2^-18 of the result, or of dy where a gradient crosses 0: far below a
// rounding to 16 bits. hopper_kernel.cuh applies them, and says what limits it.
#pragma once
#include "cuda/runtime/ptx.cuh"
#include "math/functors.h"

namespace dlsys {
namespace cuda {
namespace fast {

constexpr float kLog2E = 1.44269504f;

__device__ __forceinline__ float Logistic(float x) { return Reciprocal(1.f + ExpTwo(-kLog2E * x)); }
// The derivative of v(x) logistic(u(x)) for v = x: x_du is x u'(x).
__device__ __forceinline__ float GateDerivative(float u, float x_du) {
  const float gate = Logistic(u);
  return gate * (1.f + x_du * (1.f - gate));
}

// The standard normal distribution function as in functors.h, and exp(-x^2 / 2), which it takes.
struct Normal {
  float cdf, exp;
  __device__ __forceinline__ explicit Normal(float x) {
    const float z = fminf(fabsf(x), 60.f) * 0.707106781f, linear = 1.f + 2.f * z;
    const float share = Reciprocal((z + 2.f) * linear);
    exp = ExpTwo(-kLog2E * z * z);
    const float factor = fn::NormalTailFactor((z - 2.f) * linear * share) * (z + 2.f) * share;
    cdf = x > 0.f ? 1.f - 0.5f * exp * factor : 0.5f * exp * factor;
  }
};

#define DLSYS_FAST(Name, expression)                                                              \
  struct Name {                                                                                   \
    __device__ __forceinline__ float operator()(float side, float x) const { return expression; } \
  };
DLSYS_FAST(Sigmoid, Logistic(x))
DLSYS_FAST(Silu, x* Logistic(x))
DLSYS_FAST(Gelu, x* Normal(x).cdf)
DLSYS_FAST(GeluTanh, x* Logistic(fn::GeluArgument(x)))
DLSYS_FAST(SiluGradient, x* GateDerivative(side, side))
DLSYS_FAST(GeluTanhGradient,
           x* GateDerivative(fn::GeluArgument(side), side* fn::GeluArgumentDerivative(side)))
#undef DLSYS_FAST
struct GeluGradient {
  __device__ __forceinline__ float operator()(float side, float x) const {
    const Normal normal(side);
    return x * (normal.cdf + side * (0.398942280f * normal.exp));
  }
};

// By their codes in math/epilogue.h.
#define DLSYS_FAST_ACTIVATIONS(X) X(2, Sigmoid) X(4, Silu) X(5, Gelu) X(6, GeluTanh)
#define DLSYS_FAST_GRADIENTS(X) X(2, SiluGradient) X(3, GeluGradient) X(4, GeluTanhGradient)

}  // namespace fast
}  // namespace cuda
}  // namespace dlsys
