// The pointwise virtual machine: programs of elementwise instructions over float that stand for a
// fused expression. python/dlsys/fusion/pointwise.py assembles them; kernels interpret them.
//
// An instruction has an opcode (the lists below, counted from 1; 0 ends the program), a destination
// and four operands. A destination is 0 for the accumulator alone, or 1 + slot; an operand is one
// of these or kFirstImmediate + the index of an immediate. The first slots are the inputs. The
// result of the last instruction is the output. Truth values are 0 and 1, integers and floats of 16
// bits are converted when they are loaded; an output of 16 bits is rounded when it is stored.
#pragma once
#include <cmath>

#include "math/functors.h"
#include "runtime/registry.h"

namespace dlsys {
namespace pointwise {

constexpr int kInstructions = 24;
constexpr int kInputs = 8;
constexpr int kImmediates = 16;
constexpr int kSlots = kInputs + kInstructions - 1;
constexpr int kFirstImmediate = 64;

// ---- opcodes, by their count of operands ----

using namespace dlsys::fn;

#define DLSYS_TEST1(Name, op, condition)                                         \
  struct Name {                                                                  \
    static constexpr const char* name = op;                                      \
    DLSYS_HD float operator()(float x) const { return (condition) ? 1.f : 0.f; } \
  };
#define DLSYS_TEST2(Name, op, condition)                                                  \
  struct Name {                                                                           \
    static constexpr const char* name = op;                                               \
    DLSYS_HD float operator()(float x, float y) const { return (condition) ? 1.f : 0.f; } \
  };
DLSYS_TEST1(Not, "logical_not", x == 0.f)
DLSYS_TEST1(Truth, "truth", x != 0.f)
DLSYS_TEST2(Equal, "equal", x == y)
DLSYS_TEST2(NotEqual, "not_equal", x != y)
DLSYS_TEST2(Less, "less", x < y)
DLSYS_TEST2(LessEqual, "less_equal", x <= y)
DLSYS_TEST2(And, "logical_and", x != 0.f && y != 0.f)
DLSYS_TEST2(Or, "logical_or", x != 0.f || y != 0.f)
DLSYS_TEST2(Xor, "logical_xor", (x != 0.f) != (y != 0.f))
#undef DLSYS_TEST1
#undef DLSYS_TEST2

struct TruncToInt64 {  // a cast to int64 and back
  static constexpr const char* name = "trunc_to_int64";
  DLSYS_HD float operator()(float x) const {
#ifdef __CUDA_ARCH__
    return (float)(int64_t)x;
#else  // compilers would emit trunc, which differs for -0.5, NaN and out of range
    return x >= -0x1p63f && x < 0x1p63f ? std::trunc(x) + 0.f : -0x1p63f;
#endif
  }
};
template <class T>
struct RoundTo {  // a cast to floats of 16 bits
  DLSYS_HD float operator()(float x) const { return T(x); }
};
struct RoundToBfloat16 : RoundTo<bfloat16> {
  static constexpr const char* name = "round_to_bfloat16";
};
struct RoundToFloat16 : RoundTo<float16> {
  static constexpr const char* name = "round_to_float16";
};
struct Where {
  static constexpr const char* name = "where";
  DLSYS_HD float operator()(float condition, float x, float y) const {
    return condition != 0.f ? x : y;
  }
};

// clang-format off
#define DLSYS_OPCODES_1(X)                                                                      \
  X(Neg) X(Exp) X(Log) X(Sqrt) X(Tanh) X(Cos) X(Sin) X(Sigmoid) X(Relu) X(Log1p) X(Rsqrt)     \
  X(Abs) X(Sign) X(Silu) X(Gelu) X(GeluTanh) X(Softplus) X(HardSigmoid) X(HardSwish) X(Not)   \
  X(Floor) X(Round) X(Expm1) X(Truth) X(TruncToInt64) X(RoundToBfloat16) X(RoundToFloat16)
#define DLSYS_OPCODES_2(X)                                                                      \
  X(Add) X(Sub) X(Mul) X(Div) X(Pow) X(ReluGradient) X(Minimum) X(Maximum) X(SiluGradient)    \
  X(GeluGradient) X(GeluTanhGradient) X(SoftplusGradient) X(HardSwishGradient) X(PowConst)    \
  X(LeakyRelu) X(Elu) X(Huber) X(Equal) X(NotEqual) X(Less) X(LessEqual) X(And) X(Or) X(Xor)
#define DLSYS_OPCODES_3(X) X(ClipTo) X(Where)
#define DLSYS_OPCODES_4(X) X(ClipGradient) X(LeakyReluGradient) X(EluGradient)
// clang-format on

#define DLSYS_OPCODE(Name) k##Name,
enum Opcode : uint8_t {
  kEnd,
  DLSYS_OPCODES_1(DLSYS_OPCODE) DLSYS_OPCODES_2(DLSYS_OPCODE) DLSYS_OPCODES_3(DLSYS_OPCODE)
      DLSYS_OPCODES_4(DLSYS_OPCODE) kOpcodes
};
#undef DLSYS_OPCODE
constexpr int kFirstOf2 = kAdd, kFirstOf3 = kClipTo, kFirstOf4 = kClipGradient;

// ---- programs ----

struct Instruction {
  uint8_t opcode, destination, operands[4], unused[2];
};
static_assert(sizeof(Instruction) == sizeof(int64_t), "the GPU loads an instruction as one word");

// A program as its kernel's argument.
struct Bytecode {
  Instruction code[kInstructions + 1];  // kEnd follows the last one
  float immediates[kImmediates];
};

struct Program : Bytecode {
  int length = 0;  // instructions
  int count = 0;   // of immediates
  int slots = 0;
};

inline Program Checked(const Bytecode& bytecode, const DLArrayList* inputs) {
  if (inputs->count > kInputs)
    Fail("pointwise: expected at most %d inputs, got %ld", kInputs, (long)inputs->count);
  Program program{bytecode};
  program.slots = (int)inputs->count;
  for (const Instruction& step : program.code) {
    if (step.opcode == kEnd) break;
    bool known = step.opcode < kOpcodes && step.destination <= kSlots;
    known &= program.length < kInstructions;
    for (const uint8_t operand : step.operands) {
      const int immediate = operand - kFirstImmediate;
      known &= immediate < 0 ? operand <= program.slots : immediate < kImmediates;
      program.count = immediate < program.count ? program.count : immediate + 1;
    }
    if (!known) Fail("pointwise: instruction %d is not valid", program.length);
    program.slots = step.destination > program.slots ? step.destination : program.slots;
    program.length++;
  }
  if (program.length == 0) Fail("pointwise: the program is empty");
  return program;
}

// ---- operands ----

// How an input broadcasts to the output: element i reads its element (i / inner) % count.
struct Broadcast {
  int64_t inner, count;
};

// Fails unless the axes of `a` that are not broadcast are neighbors in `out`.
inline Broadcast BroadcastOf(const DLArray* a, const DLArray* out) {
  Broadcast broadcast = {1, 1};
  bool began = false, ended = false, fits = a->ndim <= out->ndim;
  for (int k = 1; fits && k <= out->ndim; k++) {
    const int64_t size = out->shape[out->ndim - k];
    const int64_t own = k <= a->ndim ? a->shape[a->ndim - k] : 1;
    if (own == size && size != 1) {
      fits = !ended;
      began = true;
      broadcast.count *= size;
    } else {
      fits = own == 1;
      ended |= began && size != 1;
      if (!began) broadcast.inner *= size;
    }
  }
  if (!fits)
    Fail("pointwise: shape %s does not spread over %s along neighboring axes", ShapeText(a).c_str(),
         ShapeText(out).c_str());
  return broadcast;
}

inline void CheckOutput(const DLArray* out) {
  for (const int dtype : {DL_FLOAT32, DL_BFLOAT16, DL_FLOAT16, DL_BOOL})
    if (out->dtype == dtype) return;
  Fail("pointwise: expected an output of float32, bfloat16, float16 or bool, got %s",
       DtypeText(out->dtype));
}

inline void CheckInput(const DLArray* a) {
  if (a->dtype == DL_FLOAT64) Fail("pointwise: does not take float64");
  DtypeNbytes(a->dtype);
}

}  // namespace pointwise
}  // namespace dlsys
