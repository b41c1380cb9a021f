// A chain of elementwise operators as a small program: at most 16 instructions over 8 inputs, each
// one functor of functors.h or a test of truth values, which are 0 and 1 among the floats.
//
// python/dlsys/ops/fused_chain.py writes programs and counts codes in the same order. An instruction
// is a 64-bit word, a byte each, the lowest first: code, where the result goes, four operands. A
// place is 0 for the last result, or 1 + slot; an operand may be kFirstNumber + number too. Slots
// begin with the inputs, in order. The last instruction's result is the output.
#pragma once
#include <cstring>

#include "functors.h"
#include "registry.h"

namespace dlsys {
namespace chain {

constexpr int kInstructions = 16;
constexpr int kInputs = 8;
constexpr int kNumbers = 16;
constexpr int kSlots = kInputs + kInstructions - 1;
constexpr int kFirstNumber = 64;

namespace fn {

using namespace dlsys::fn;

DLSYS_UNARY_TEST(Truth, x != 0.f)
}
}  // namespace chain
}  // namespace dlsys
