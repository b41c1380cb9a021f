// Reductions of float elements by a monoid, written once for the CPU and CUDA: a line of the list
// is all that such a reduction needs in C++ and CUDA. It names the monoid and its kernel, the type
// of its state and the identity, the state `of` one element x, and the state of two, a and b.
#pragma once
#include "math/functors.h"

// NaN propagates. A product is carried in double, since roundings add up and an intermediate
// product may overflow float32.
#define DLSYS_MONOIDS(MONOID)                                                 \
  MONOID(Max, reduce_max, float, -kInfinity, x, b != b ? b : (b > a ? b : a)) \
  MONOID(Min, reduce_min, float, kInfinity, x, b != b ? b : (b < a ? b : a))  \
  MONOID(Prod, reduce_prod, double, 1.0, x, (a * b))

#define DLSYS_MONOID(Name, kernel, Type, identity, of, combine)         \
  struct Name {                                                         \
    static constexpr const char* name = #kernel;                        \
    using State = Type;                                                 \
    static constexpr State kIdentity = identity;                        \
    DLSYS_HD static State Of(float x) { return of; }                    \
    DLSYS_HD static State Combine(State a, State b) { return combine; } \
  };

namespace dlsys {
namespace monoid {

constexpr float kInfinity = __builtin_inff();

DLSYS_MONOIDS(DLSYS_MONOID)

}  // namespace monoid
}  // namespace dlsys
