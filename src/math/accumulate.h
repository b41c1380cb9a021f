// A compensated sum, for both devices.
#pragma once
#include "math/functors.h"

namespace dlsys {

// sum + error += x by Knuth's two-sum: `error` gains the exact rounding error of `sum`. There is no
// product that a compiler could contract.
DLSYS_HD void AddTerm(float x, float* sum, float* error) {
  const float total = *sum + x;
  const float added = total - *sum;
  *error += (*sum - (total - added)) + (x - added);
  *sum = total;
}

}  // namespace dlsys
