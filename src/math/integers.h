// Elementwise functions of int64, the type in which integers are computed with, written once for
// the CPU and CUDA: a line of a list is a functor of dlsys::integers and a kernel of both devices.
// They wrap around modulo 2^64; a quotient or remainder by 0 is 0, as in numpy.
#pragma once
#include "math/functors.h"

// u and v are x and y without a sign, of which sums and products that wrap around are defined.
#define DLSYS_INTEGER_UNARY(UNARY)     \
  UNARY(Neg, "neg", 0 - u)             \
  UNARY(Abs, "abs", x < 0 ? 0 - u : u) \
  UNARY(Sign, "sign", (x > 0) - (x < 0))
#define DLSYS_INTEGER_BINARY(BINARY)                                 \
  BINARY(Add, "add", u + v)                                          \
  BINARY(Sub, "sub", u - v)                                          \
  BINARY(Mul, "mul", (u * v))                                        \
  BINARY(FloorDivide, "floor_divide", Quotient(x, y) - Lower(x, y))  \
  BINARY(Remainder, "remainder", Rest(x, y) + (Lower(x, y) ? y : 0)) \
  BINARY(Fmod, "fmod", Rest(x, y))                                   \
  BINARY(Power, "integer_power", PowerOf(u, v))                      \
  BINARY(Minimum, "minimum", x < y ? x : y)                          \
  BINARY(Maximum, "maximum", x > y ? x : y)
// Reductions, by the identity and what two elements are combined to.
#define DLSYS_INTEGER_MONOIDS(MONOID)                 \
  MONOID(Max, reduce_max, INT64_MIN, (b > a ? b : a)) \
  MONOID(Min, reduce_min, INT64_MAX, (b < a ? b : a)) \
  MONOID(Prod, reduce_prod, 1, (int64_t)((uint64_t)a * (uint64_t)b))

namespace dlsys {
namespace integers {

// Truncated division, with a remainder of the sign of x. Of -1 the processor's would trap where the
// quotient is no int64.
DLSYS_HD int64_t Quotient(int64_t x, int64_t y) {
  return y == 0 ? 0 : y == -1 ? (int64_t)(0 - (uint64_t)x) : x / y;
}
DLSYS_HD int64_t Rest(int64_t x, int64_t y) { return y == 0 || y == -1 ? 0 : x % y; }
// Whether the quotient rounded down is less than that.
DLSYS_HD bool Lower(int64_t x, int64_t y) { return Rest(x, y) != 0 && (x < 0) != (y < 0); }

// By squaring; v is not negative.
DLSYS_HD uint64_t PowerOf(uint64_t u, uint64_t v) {
  uint64_t power = 1;
  for (; v; v >>= 1, u *= u) power *= v & 1 ? u : 1;
  return power;
}

#define DLSYS_FUNCTOR(Name, op, expression)        \
  struct Name {                                    \
    static constexpr const char* name = op;        \
    DLSYS_HD int64_t operator()(int64_t x) const { \
      const uint64_t u = (uint64_t)x;              \
      (void)u;                                     \
      return (int64_t)(expression);                \
    }                                              \
  };
DLSYS_INTEGER_UNARY(DLSYS_FUNCTOR)
#undef DLSYS_FUNCTOR
#define DLSYS_FUNCTOR(Name, op, expression)                   \
  struct Name {                                               \
    static constexpr const char* name = op;                   \
    DLSYS_HD int64_t operator()(int64_t x, int64_t y) const { \
      const uint64_t u = (uint64_t)x, v = (uint64_t)y;        \
      (void)u, (void)v;                                       \
      return (int64_t)(expression);                           \
    }                                                         \
  };
DLSYS_INTEGER_BINARY(DLSYS_FUNCTOR)
#undef DLSYS_FUNCTOR

#define DLSYS_INTEGER_MONOID(Name, kernel, identity, combine)           \
  struct Name {                                                         \
    static constexpr const char* name = #kernel;                        \
    using State = int64_t;                                              \
    static constexpr State kIdentity = identity;                        \
    static constexpr int kTree = 1; /* cpu/reduce/axes.h */             \
    DLSYS_HD static State Of(int64_t x) { return x; }                   \
    DLSYS_HD static State Combine(State a, State b) { return combine; } \
  };
#define DLSYS_INTEGER_SUM(MONOID) MONOID(Sum, reduce_sum, 0, (int64_t)((uint64_t)a + (uint64_t)b))
DLSYS_INTEGER_MONOIDS(DLSYS_INTEGER_MONOID)
DLSYS_INTEGER_SUM(DLSYS_INTEGER_MONOID)
#undef DLSYS_INTEGER_MONOID
#undef DLSYS_INTEGER_SUM

}  // namespace integers
}  // namespace dlsys
