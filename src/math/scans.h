// What running sums and products are made of, for both devices.
#pragma once
#include <type_traits>

#include "math/functors.h"

namespace dlsys {
namespace scan {

// What is carried along an axis: of floats a double, since roundings add up, and integers modulo
// 2^64.
template <class T>
using Carried = std::conditional_t<std::is_integral_v<T>, uint64_t, double>;

struct Sum {
  static constexpr const char* name = "cumsum";
  static constexpr int kIdentity = 0;
  template <class C>
  DLSYS_HD static C Combine(C a, C b) {
    return a + b;
  }
};
struct Product {
  static constexpr const char* name = "cumprod";
  static constexpr int kIdentity = 1;
  template <class C>
  DLSYS_HD static C Combine(C a, C b) {
    return a * b;
  }
};

}  // namespace scan
}  // namespace dlsys
