// The number by which a token is drawn: a function of (seed, step, row), by Philox.
#pragma once
#include "math/philox.h"

namespace dlsys {

// 53 bits of the row's first two words as a double in [0, 1).
DLSYS_HD double NumberOfRow(int64_t seed, int64_t step, int64_t row) {
  const philox::Words words = philox::Stream{(uint64_t)seed, (uint64_t)step, 0}.At((uint64_t)row);
  const uint64_t bits = (uint64_t)words.word[0] << 21 | words.word[1] >> 11;
  return (double)bits * 1.1102230246251565404e-16;
}

}  // namespace dlsys
