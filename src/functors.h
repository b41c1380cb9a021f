// Elementwise mathematics, written once for the CPU, CUDA and run-time compilation, hence without
// standard headers on the device side. Adding an elementwise operator adds one functor here and one
// line to cpu/elementwise.cc and cuda/elementwise.cu.
#pragma once
#ifdef __CUDACC__
#define DLSYS_HD __host__ __device__ __forceinline__
#else
#include <cmath>

#include "cpu/float_math.h"
#define DLSYS_HD inline __attribute__((always_inline))
#endif

namespace dlsys {
namespace fn {

#ifndef __CUDACC__
using cpu::exp;
using cpu::log;
using cpu::tanh;
using std::pow;
using std::sqrt;
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

DLSYS_UNARY(Neg, "neg", -x)
DLSYS_UNARY(Exp, "exp", exp(x))
DLSYS_UNARY(Log, "log", log(x))
DLSYS_UNARY(Sqrt, "sqrt", sqrt(x))
DLSYS_UNARY(Tanh, "tanh", tanh(x))
DLSYS_UNARY(Sigmoid, "sigmoid", 1.f / (1.f + exp(-x)))
DLSYS_UNARY(Relu, "relu", x < 0.f ? 0.f : x)  // NaN stays NaN

DLSYS_BINARY(Add, "add", x + y)
DLSYS_BINARY(Sub, "sub", x - y)
DLSYS_BINARY(Mul, "mul", (x * y))
DLSYS_BINARY(Div, "div", x / y)
DLSYS_BINARY(Pow, "pow", pow(x, y))
// x is relu's input or output, y its output's gradient.
DLSYS_BINARY(ReluGradient, "relu_gradient", x > 0.f ? y : 0.f)

// With a constant on one side; y is the constant.
DLSYS_BINARY(AddConst, "add_const", x + y)
DLSYS_BINARY(MulConst, "mul_const", (x * y))
DLSYS_BINARY(RsubConst, "rsub_const", y - x)
DLSYS_BINARY(DivConst, "div_const", x / y)
DLSYS_BINARY(RdivConst, "rdiv_const", y / x)
DLSYS_BINARY(PowConst, "pow_const", y == 2.f ? x * x : pow(x, y))
DLSYS_BINARY(RpowConst, "rpow_const", pow(y, x))

#undef DLSYS_UNARY
#undef DLSYS_BINARY

}  // namespace fn
}  // namespace dlsys
