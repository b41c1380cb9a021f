// Reductions of float elements by a monoid, written once for the CPU and CUDA: a line of the list
// is all that such a reduction needs in C++ and CUDA. It names the monoid and its kernel, the type
// of its state and the identity, the state `of` one element x, and the state of two, a and b. An
// element that equals the identity changes no state.
#pragma once
#include "math/functors.h"

// NaN propagates. A product is carried in double, since roundings add up and an intermediate
// product may overflow float32.
#define DLSYS_MONOIDS(MONOID)                                 \
  MONOID(Max, reduce_max, float, -kInfinity, x, Larger(a, b)) \
  MONOID(Min, reduce_min, float, kInfinity, x, Smaller(a, b)) \
  MONOID(Prod, reduce_prod, double, 1.0, x, (a * b))

#define DLSYS_MONOID(Name, kernel, Type, identity, of, combine)         \
  struct Name {                                                         \
    static constexpr const char* name = #kernel;                        \
    using State = Type;                                                 \
    static constexpr State kIdentity = identity;                        \
    static constexpr int kTree = 1; /* cpu/reduce/axes.h */             \
    DLSYS_HD static State Of(float x) { return of; }                    \
    DLSYS_HD static State Combine(State a, State b) { return combine; } \
  };

namespace dlsys {
namespace monoid {

constexpr float kInfinity = __builtin_inff();

// NaN where one is NaN: two selections, which compile to vector code.
DLSYS_HD float Larger(float a, float b) {
  const float larger = b > a ? b : a;
  return b != b ? b : larger;
}
DLSYS_HD float Smaller(float a, float b) {
  const float smaller = b < a ? b : a;
  return b != b ? b : smaller;
}

DLSYS_MONOIDS(DLSYS_MONOID)

}  // namespace monoid
}  // namespace dlsys
