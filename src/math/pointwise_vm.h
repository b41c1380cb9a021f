// Chains of elementwise operators as small programs, which python/dlsys/fusion/pointwise.py
// writes.
//
// An instruction is a 64-bit word, a byte each, the lowest first: a code (the lists below, counted
// from 1; 0 ends the program), the place where the result goes, four operands. A place is 0 for the
// last result alone, or 1 + slot; an operand may be kFirstNumber + number too. Slots begin with the
// inputs in order. The last instruction's result is the output. All values are float32: truth
// values are 0 and 1, integers are converted where they are read.
#pragma once
#include <cmath>
#include <cstring>
#include <utility>

#include "math/functors.h"
#include "runtime/registry.h"

namespace dlsys {
namespace chain {

constexpr int kInstructions = 24;
constexpr int kInputs = 8;
constexpr int kNumbers = 16;
constexpr int kSlots = kInputs + kInstructions - 1;
constexpr int kFirstNumber = 64;

// ---- instructions, by the number of operands ----

using namespace dlsys::fn;

#define DLSYS_TEST1(Name, condition)                                             \
  struct Name {                                                                  \
    DLSYS_HD float operator()(float x) const { return (condition) ? 1.f : 0.f; } \
  };
#define DLSYS_TEST2(Name, condition)                                                      \
  struct Name {                                                                           \
    DLSYS_HD float operator()(float x, float y) const { return (condition) ? 1.f : 0.f; } \
  };
DLSYS_TEST1(Not, x == 0.f)
DLSYS_TEST1(Truth, x != 0.f)
DLSYS_TEST2(Equal, x == y)
DLSYS_TEST2(NotEqual, x != y)
DLSYS_TEST2(Less, x < y)
DLSYS_TEST2(LessEqual, x <= y)
DLSYS_TEST2(And, x != 0.f && y != 0.f)
DLSYS_TEST2(Or, x != 0.f || y != 0.f)
DLSYS_TEST2(Xor, (x != 0.f) != (y != 0.f))
#undef DLSYS_TEST1
#undef DLSYS_TEST2

struct Whole {  // to int64 and back
  DLSYS_HD float operator()(float x) const {
#ifdef __CUDA_ARCH__
    return (float)(int64_t)x;
#else  // compilers would make it trunc, which differs for -0.5, NaN and what is too large
    return x >= -0x1p63f && x < 0x1p63f ? std::trunc(x) + 0.f : -0x1p63f;
#endif
  }
};
struct Where {
  DLSYS_HD float operator()(float condition, float x, float y) const {
    return condition != 0.f ? x : y;
  }
};

// clang-format off
#define DLSYS_CHAIN_1(X)                                                                      \
  X(Neg) X(Exp) X(Log) X(Sqrt) X(Tanh) X(Cos) X(Sin) X(Sigmoid) X(Relu) X(Log1p) X(Rsqrt)     \
  X(Abs) X(Sign) X(Silu) X(Gelu) X(GeluTanh) X(Softplus) X(HardSigmoid) X(HardSwish) X(Not)   \
  X(Truth) X(Whole)
#define DLSYS_CHAIN_2(X)                                                                      \
  X(Add) X(Sub) X(Mul) X(Div) X(Pow) X(ReluGradient) X(Minimum) X(Maximum) X(SiluGradient)    \
  X(GeluGradient) X(GeluTanhGradient) X(SoftplusGradient) X(HardSwishGradient) X(PowConst)    \
  X(LeakyRelu) X(Elu) X(Huber) X(Equal) X(NotEqual) X(Less) X(LessEqual) X(And) X(Or) X(Xor)
#define DLSYS_CHAIN_3(X) X(ClipTo) X(Where)
#define DLSYS_CHAIN_4(X) X(ClipGradient) X(LeakyReluGradient) X(EluGradient)
// clang-format on

#define DLSYS_CODE(Name) k##Name,
enum Code : uint8_t {
  kEnd,
  DLSYS_CHAIN_1(DLSYS_CODE) DLSYS_CHAIN_2(DLSYS_CODE) DLSYS_CHAIN_3(DLSYS_CODE)
      DLSYS_CHAIN_4(DLSYS_CODE) kCodes
};
#undef DLSYS_CODE
constexpr int kFirstOf2 = kAdd, kFirstOf3 = kClipTo, kFirstOf4 = kClipGradient;

// ---- programs ----

struct Instruction {
  uint8_t code, to, from[4], unused[2];
};
static_assert(sizeof(Instruction) == sizeof(int64_t), "an instruction is a word");

struct Program {
  Instruction code[kInstructions + 1] = {};  // the last one ends it
  float numbers[kNumbers];
  int length = 0;  // instructions
  int count = 0;   // numbers
  int slots = 0;
};

inline Program Read(const DLArrayList* inputs, const int64_t (&words)[kInstructions],
                    const float (&numbers)[kNumbers]) {
  if (inputs->count > kInputs)
    Fail("pointwise: expected at most %d inputs, got %ld", kInputs, (long)inputs->count);
  Program program;
  memcpy(program.code, words, sizeof words);
  memcpy(program.numbers, numbers, sizeof numbers);
  program.slots = (int)inputs->count;
  for (const Instruction& step : program.code) {
    if (step.code == kEnd) break;
    bool known = step.code < kCodes && step.to <= kSlots;
    for (const uint8_t place : step.from) {
      const int number = place - kFirstNumber;
      known &= number < 0 ? place <= program.slots : number < kNumbers;
      program.count = number < program.count ? program.count : number + 1;
    }
    if (!known) Fail("pointwise: instruction %d is none", program.length);
    program.slots = step.to > program.slots ? step.to : program.slots;
    program.length++;
  }
  if (program.length == 0) Fail("pointwise: the program is empty");
  return program;
}

// The kernel that takes a program's words and numbers one by one, for the table of kernels.
template <size_t>
using Word = int64_t;
template <size_t>
using Number = float;
template <auto Run, class Words = std::make_index_sequence<kInstructions>,
          class Numbers = std::make_index_sequence<kNumbers>>
struct Kernel;
template <class... Stream, void (*Run)(const DLArrayList*, const Program&, DLArray*, Stream...),
          size_t... I, size_t... J>
struct Kernel<Run, std::index_sequence<I...>, std::index_sequence<J...>> {
  static void Call(const DLArrayList* inputs, Word<I>... words, Number<J>... numbers, DLArray* out,
                   Stream... stream) {
    Run(inputs, Read(inputs, {words...}, {numbers...}), out, stream...);
  }
};

// ---- operands ----

// Which element of an input meets element i of the output: (i / inner) % count.
struct Band {
  int64_t inner, count;
};

// The axes of `a` that are not repeated must be neighbours in `out`.
inline Band BandOf(const DLArray* a, const DLArray* out) {
  Band band = {1, 1};
  bool began = false, ended = false, fits = a->ndim <= out->ndim;
  for (int k = 1; fits && k <= out->ndim; k++) {
    const int64_t size = out->shape[out->ndim - k];
    const int64_t own = k <= a->ndim ? a->shape[a->ndim - k] : 1;
    if (own == size && size != 1) {
      fits = !ended;
      began = true;
      band.count *= size;
    } else {
      fits = own == 1;
      ended |= began && size != 1;
      if (!began) band.inner *= size;
    }
  }
  if (!fits)
    Fail("pointwise: shape %s does not spread over %s along neighbouring axes",
         ShapeText(a).c_str(), ShapeText(out).c_str());
  return band;
}

inline void CheckOutput(const DLArray* out) {
  if (out->dtype != DL_FLOAT32 && out->dtype != DL_BOOL)
    Fail("pointwise: expected an output of float32 or bool, got %s", DtypeText(out->dtype));
}

inline void CheckInput(const DLArray* a) {
  if (a->dtype == DL_FLOAT64) Fail("pointwise: does not take float64");
  DtypeNbytes(a->dtype);
}

}  // namespace chain
}  // namespace dlsys
