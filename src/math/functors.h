// Elementwise functors in float32, written once for the CPU and CUDA. Every line of the list below
// is a functor of dlsys::fn; pointwise/elementwise.cc and .cu include this file once more with
// DLSYS_REGISTER_FUNCTORS and macros of their own, which make a kernel of every line. So a line
// here is all that an elementwise operator needs in C++ and CUDA.
#if !defined(DLSYS_MATH_FUNCTORS_H_) || defined(DLSYS_REGISTER_FUNCTORS)
#ifndef DLSYS_MATH_FUNCTORS_H_
#define DLSYS_MATH_FUNCTORS_H_
#ifdef __CUDACC__
#define DLSYS_HD __host__ __device__ __forceinline__
#else
#include <cmath>

#include "math/float_math.h"
#define DLSYS_HD inline __attribute__((always_inline))
#endif

namespace dlsys {
namespace fn {

#ifndef __CUDACC__
using cpu::cos;
using cpu::exp;
using cpu::exp2;
using cpu::expm1;
using cpu::fmod;
using cpu::log;
using cpu::log10;
using cpu::log1p;
using cpu::log2;
using cpu::pow;
using cpu::sin;
using cpu::tan;
using cpu::tanh;
using std::ceil;
using std::copysign;
using std::fabs;
using std::floor;
using std::rint;
using std::sqrt;
using std::trunc;
// The C library's, an element at a time.
using std::acos;
using std::acosh;
using std::asin;
using std::asinh;
using std::atan;
using std::atan2;
using std::atanh;
using std::cosh;
using std::sinh;
#endif

#define DLSYS_UNARY(Name, op, expression)                           \
  struct Name {                                                     \
    static constexpr const char* name = op;                         \
    DLSYS_HD float operator()(float x) const { return expression; } \
  };
#define DLSYS_BINARY(Name, op, expression)                                   \
  struct Name {                                                              \
    static constexpr const char* name = op;                                  \
    DLSYS_HD float operator()(float x, float y) const { return expression; } \
  };
#define DLSYS_UNARY_CONST DLSYS_BINARY  // y is a constant
#define DLSYS_UNARY_CONSTS(Name, op, expression)                                      \
  struct Name {                                                                       \
    static constexpr const char* name = op;                                           \
    DLSYS_HD float operator()(float x, float c, float d) const { return expression; } \
  };
#define DLSYS_BINARY_CONSTS(Name, op, expression)                         \
  struct Name {                                                           \
    static constexpr const char* name = op;                               \
    DLSYS_HD float operator()(float x, float y, float c, float d) const { \
      (void)d;                                                            \
      return expression;                                                  \
    }                                                                     \
  };
#define DLSYS_BINARY_CONST DLSYS_BINARY_CONSTS  // d is not used

DLSYS_HD float Clip(float x, float low, float high) {
  return x < low ? low : (x > high ? high : x);  // NaN stays NaN
}
// d² / 2 of a small difference d, linear from |d| = delta on.
DLSYS_HD float HuberOf(float d, float delta) {
  const float inner = Clip(d, -delta, delta);
  return inner * (d - 0.5f * inner);
}
DLSYS_HD float Logistic(float x) { return 1.f / (1.f + exp(-x)); }

// (1 + 2z) exp(z^2) erfc(z), a smooth function of z >= 0, as a polynomial in t = (z - 2) / (z + 2):
// the truncated Chebyshev series, relative error 7e-8.
DLSYS_HD float NormalTailFactor(float t) {
  float p = 1.60803582e-4f;
  p = p * t - 1.83654437e-4f;
  p = p * t - 1.39570695e-3f;
  p = p * t + 1.04314458e-3f;
  p = p * t + 8.68915966e-3f;
  p = p * t - 7.94272170e-3f;
  p = p * t - 5.42119584e-2f;
  p = p * t + 1.64035840e-1f;
  p = p * t - 1.66031096e-1f;
  p = p * t - 9.27630821e-2f;
  return p * t + 1.27697839f;
}

// The standard normal distribution function.
DLSYS_HD float NormalCdf(float x) {
  float z = fabs(x);
  z = (z > 60.f ? 60.f : z) * 0.707106781f;
  const float p = NormalTailFactor((z - 2.f) / (z + 2.f));
  const float tail = 0.5f * exp(-z * z) * p / (1.f + 2.f * z);
  return x > 0.f ? 1.f - tail : tail;
}

#ifndef __CUDACC__
// Near 0 by its series, elsewhere by the tail of the normal distribution; within 3 ulp.
DLSYS_HD float erf(float x) {
  const float z = x * x;
  float p = 1.20553304e-4f;
  p = p * z - 8.54832699e-4f;
  p = p * z + 5.22397760e-3f;
  p = p * z - 2.68661706e-2f;
  p = p * z + 1.12837917e-1f;
  p = p * z - 3.76126389e-1f;
  p = p * z + 1.12837917f;
  const float far = 1.f - 2.f * NormalCdf(-1.41421356f * fabs(x));
  return z < 0.25f ? p * x : copysign(far, x);
}
#endif

// 2 sqrt(2 / pi) (x + 0.044715 x^3), whose logistic function times x is gelu's tanh form, and its
// derivative.
DLSYS_HD float GeluArgument(float x) { return x * (1.59576912f * (1.f + 0.044715f * (x * x))); }
DLSYS_HD float GeluArgumentDerivative(float x) { return 1.59576912f * (1.f + 0.134145f * (x * x)); }
DLSYS_HD float GeluTanhDerivative(float x) {
  const float u = GeluArgument(x);  // Logistic(-u) is 1 - Logistic(u) without the cancellation
  return Logistic(u) * (1.f + x * GeluArgumentDerivative(x) * Logistic(-u));
}
DLSYS_HD float SiluDerivative(float x) { return Logistic(x) * (1.f + x * Logistic(-x)); }
DLSYS_HD float HardSwishDerivative(float x, float y) {
  return x <= -3.f ? 0.f : (x >= 3.f ? y : y * ((2.f * x + 3.f) / 6.f));
}

// x - floor(x / y) y as fmod, which is exact, and y where the signs differ; a zero has the sign of
// y.
DLSYS_HD float Modulo(float x, float y) {
  const float rest = fmod(x, y), moved = (rest < 0.f) != (y < 0.f) ? rest + y : rest;
  return rest == 0.f ? copysign(rest, y) : moved;
}
// floor(x / y), consistent with Modulo: (x - rest) / y is an integer but for rounding.
DLSYS_HD float FloorQuotient(float x, float y) {
  if (y == 0.f) return x / y;
  const float rest = fmod(x, y), quotient = (x - rest) / y;
  const float below = rest != 0.f && (rest < 0.f) != (y < 0.f) ? quotient - 1.f : quotient;
  const float down = floor(below);
  const float nearest = below - down > 0.5f ? down + 1.f : down;
  return below == 0.f ? copysign(below, x / y) : nearest;
}

}  // namespace fn
}  // namespace dlsys
#endif  // DLSYS_MATH_FUNCTORS_H_

#ifndef DLSYS_REGISTER_FUNCTORS
namespace dlsys {
namespace fn {
#endif

DLSYS_UNARY(Neg, "neg", -x)
DLSYS_UNARY(Exp, "exp", exp(x))
DLSYS_UNARY(Log, "log", log(x))
DLSYS_UNARY(Sqrt, "sqrt", sqrt(x))
DLSYS_UNARY(Tanh, "tanh", tanh(x))
DLSYS_UNARY(Cos, "cos", cos(x))
DLSYS_UNARY(Sin, "sin", sin(x))
DLSYS_UNARY(Sigmoid, "sigmoid", 1.f / (1.f + exp(-x)))
DLSYS_UNARY(Relu, "relu", x < 0.f ? 0.f : x)  // NaN stays NaN and -0 stays -0
DLSYS_UNARY(Log1p, "log1p", log1p(x))
DLSYS_UNARY(Rsqrt, "rsqrt", 1.f / sqrt(x))
DLSYS_UNARY(Abs, "abs", fabs(x))
DLSYS_UNARY(Sign, "sign", x > 0.f ? 1.f : (x < 0.f ? -1.f : (x == 0.f ? 0.f : x)))
DLSYS_UNARY(Floor, "floor", floor(x))
DLSYS_UNARY(Ceil, "ceil", ceil(x))
DLSYS_UNARY(Round, "round", rint(x))
DLSYS_UNARY(Trunc, "trunc", trunc(x))
DLSYS_UNARY(Expm1, "expm1", x == 0.f ? x : expm1(x))  // -0 of -0
DLSYS_UNARY(Exp2, "exp2", exp2(x))
DLSYS_UNARY(Log2, "log2", log2(x))
DLSYS_UNARY(Log10, "log10", log10(x))
DLSYS_UNARY(Erf, "erf", erf(x))
DLSYS_UNARY(Tan, "tan", tan(x))
DLSYS_UNARY(Asin, "asin", asin(x))
DLSYS_UNARY(Acos, "acos", acos(x))
DLSYS_UNARY(Atan, "atan", atan(x))
DLSYS_UNARY(Sinh, "sinh", sinh(x))
DLSYS_UNARY(Cosh, "cosh", cosh(x))
DLSYS_UNARY(Asinh, "asinh", asinh(x))
DLSYS_UNARY(Acosh, "acosh", acosh(x))
DLSYS_UNARY(Atanh, "atanh", atanh(x))
DLSYS_UNARY(Silu, "silu", x* Logistic(x))
DLSYS_UNARY(Gelu, "gelu", x* NormalCdf(x))
DLSYS_UNARY(GeluTanh, "gelu_tanh", x* Logistic(GeluArgument(x)))
DLSYS_UNARY(Softplus, "softplus", (x > 0.f ? x : 0.f) + log1p(exp(-fabs(x))))
DLSYS_UNARY(HardSigmoid, "hard_sigmoid", Clip(x + 3.f, 0.f, 6.f) / 6.f)
DLSYS_UNARY(HardSwish, "hard_swish", x*(Clip(x + 3.f, 0.f, 6.f) / 6.f))

DLSYS_BINARY(Add, "add", x + y)
DLSYS_BINARY(Sub, "sub", x - y)
DLSYS_BINARY(Mul, "mul", (x * y))
DLSYS_BINARY(Div, "div", x / y)
DLSYS_BINARY(Pow, "pow", pow(x, y))
DLSYS_BINARY(FloorDivide, "floor_divide", FloorQuotient(x, y))
DLSYS_BINARY(Remainder, "remainder", Modulo(x, y))
DLSYS_BINARY(Fmod, "fmod", fmod(x, y))
DLSYS_BINARY(Atan2, "atan2", atan2(x, y))
// x is relu's input or output, y its output's gradient.
DLSYS_BINARY(ReluGradient, "relu_gradient", x > 0.f ? y : 0.f)
// NaN if either is NaN; of equals the second, which tells -0 from 0, as in numpy.
DLSYS_BINARY(Minimum, "minimum", x != x ? x : (x < y ? x : y))
DLSYS_BINARY(Maximum, "maximum", x != x ? x : (x > y ? x : y))

// Activation gradients: y is the gradient of the output; x is the input, or the output where noted.
DLSYS_BINARY(SiluGradient, "silu_gradient", y* SiluDerivative(x))
DLSYS_BINARY(GeluGradient, "gelu_gradient",
             y*(NormalCdf(x) + x * (0.398942280f * exp(-0.5f * (x * x)))))
DLSYS_BINARY(GeluTanhGradient, "gelu_tanh_gradient", y* GeluTanhDerivative(x))
DLSYS_BINARY(SoftplusGradient, "softplus_gradient", (0.f - expm1(-x)) * y)  // x is the output
DLSYS_BINARY(HardSwishGradient, "hard_swish_gradient", HardSwishDerivative(x, y))

// With a constant on one side; y is the constant.
DLSYS_UNARY_CONST(AddConst, "add_const", x + y)
DLSYS_UNARY_CONST(MulConst, "mul_const", (x * y))
DLSYS_UNARY_CONST(RsubConst, "rsub_const", y - x)
DLSYS_UNARY_CONST(DivConst, "div_const", x / y)
DLSYS_UNARY_CONST(RdivConst, "rdiv_const", y / x)
// The square root, as in numpy, is -0 of -0 and NaN of -infinity, unlike pow.
DLSYS_UNARY_CONST(PowConst, "pow_const",
                  y == 2.f ? x * x : (y == 0.5f ? sqrt(x) : (y == 3.f ? x * x * x : pow(x, y))))
DLSYS_UNARY_CONST(RpowConst, "rpow_const", pow(y, x))

DLSYS_UNARY_CONST(LeakyRelu, "leaky_relu", x > 0.f ? x : (y * x))
DLSYS_UNARY_CONST(Elu, "elu", x < 0.f ? (y * expm1(x)) : x + 0.f)  // 0 of -0
DLSYS_UNARY_CONST(Huber, "huber", HuberOf(x, y))

DLSYS_UNARY_CONSTS(ClipTo, "clip", Clip(x, c, d))
DLSYS_BINARY_CONSTS(ClipGradient, "clip_gradient", x > c && x < d ? y : 0.f)
DLSYS_BINARY_CONST(LeakyReluGradient, "leaky_relu_gradient", x > 0.f ? y : (c * y))
DLSYS_BINARY_CONST(EluGradient, "elu_gradient", x > 0.f ? y : (y * (x + c)))  // x is the output

#undef DLSYS_UNARY
#undef DLSYS_BINARY
#undef DLSYS_UNARY_CONST
#undef DLSYS_UNARY_CONSTS
#undef DLSYS_BINARY_CONST
#undef DLSYS_BINARY_CONSTS
#ifdef DLSYS_REGISTER_FUNCTORS
#undef DLSYS_REGISTER_FUNCTORS
#else
}  // namespace fn
}  // namespace dlsys
#endif
#endif
