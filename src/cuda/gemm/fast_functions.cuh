// Activations and their gradients for epilogues of 16 bits and of tf32 products: the formulas of
// math/functors.h with ex2.approx and rcp.approx, two instructions of the special function unit an
// element. Where those take a logistic function of -u beside that of u, these take 1 less the
// latter. Errors are below 2^-18 of the result, or of dy where a gradient crosses 0: far below a
// rounding to 16 bits or of a tf32 operand. hopper/epilogue.cuh applies them, and says what limits
// it.
#pragma once
#include "cuda/instructions/ptx.cuh"
#include "math/functors.h"

namespace dlsys {
namespace cuda {
namespace fast {

constexpr float kLog2E = 1.44269504f;

__device__ __forceinline__ float Logistic(float x) { return Reciprocal(1.f + ExpTwo(-kLog2E * x)); }
// An activation and its derivative.
struct WithSlope {
  float value, slope;
};

// x logistic(u(x)), u(x) = linear x + cubic x^3, which is SiLU or the tanh form of GELU; and its
// derivative, times y. Twelve instructions at most.
struct Gate {
  float linear, cubic;
  __host__ __device__ static Gate Silu() { return {1.f, 0.f}; }
  __host__ __device__ static Gate GeluTanh() {
    return {fn::GeluArgumentDerivative(0.f),
            fn::GeluArgument(1.f) - fn::GeluArgumentDerivative(0.f)};
  }
  __device__ __forceinline__ float LogisticOf(float x, float square) const {
    return Reciprocal(1.f + ExpTwo(x * (-kLog2E * cubic * square - kLog2E * linear)));
  }
  __device__ __forceinline__ float Of(float x) const { return x * LogisticOf(x, x * x); }
  __device__ __forceinline__ float Gradient(float x, float y) const {
    const float square = x * x, gate = LogisticOf(x, square);
    return y * gate * (1.f + x * (3.f * cubic * square + linear) * (1.f - gate));
  }
  __device__ __forceinline__ WithSlope Both(float x) const {
    const float square = x * x, gate = LogisticOf(x, square);
    return {x * gate, gate * (1.f + x * (3.f * cubic * square + linear) * (1.f - gate))};
  }
};

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

__device__ __forceinline__ float Gelu(float x) { return x * Normal(x).cdf; }
__device__ __forceinline__ WithSlope GeluBoth(float x) {
  const Normal normal(x);
  return {x * normal.cdf, normal.cdf + x * (0.398942280f * normal.exp)};
}
__device__ __forceinline__ float GeluGradient(float x, float y) { return y * GeluBoth(x).slope; }

}  // namespace fast
}  // namespace cuda
}  // namespace dlsys
