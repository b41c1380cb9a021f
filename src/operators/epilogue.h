// GEMM epilogues: the codes of activations, of what is made with a side, activation gradients and
// sums, and a derivative quantized to 8 bits.
#pragma once
#include "math/functors.h"
#include "runtime/registry.h"

namespace dlsys {

// The derivative of SiLU or of GELU, which lies in [-0.13, 1.13], as a uint8 q that stands for
// (q - zero point) scale: 0 and 1 are exact, others are off by 0.0025 at most. The rounding to an
// integer is the caller's truncation.
constexpr float kSlopeScale = 1 / 200.f, kSlopeZeroPoint = 27.f;
DLSYS_HD float QuantizedSlope(float slope) {
  return slope * (1.f / kSlopeScale) + (kSlopeZeroPoint + 0.5f);
}
namespace fn {
// x is a quantized derivative, y what it is multiplied by.
struct MulQuantized {
  static constexpr const char* name = "mul_quantized";
  DLSYS_HD float operator()(float x, float y) const {
    return y * ((x - kSlopeZeroPoint) * kSlopeScale);
  }
};
// x is a residual, y what is added to it.
struct AddRelu {
  static constexpr const char* name = "add_relu";
  DLSYS_HD float operator()(float x, float y) const { return Relu{}(Add{}(x, y)); }
};
}  // namespace fn

// Forward y = f(x); gradient dx = f(side, dy), where side is the activation's input or output, or
// its derivative, quantized; residual y = f(side, x).
#define DLSYS_ACTIVATIONS(X) \
  X(1, Relu)                 \
  X(2, Sigmoid)              \
  X(3, Tanh)                 \
  X(4, Silu)                 \
  X(5, Gelu)                 \
  X(6, GeluTanh)             \
  X(7, Softplus)             \
  X(8, HardSigmoid)          \
  X(9, HardSwish)
#define DLSYS_ACTIVATION_GRADIENTS(X) \
  X(1, ReluGradient)                  \
  X(2, SiluGradient)                  \
  X(3, GeluGradient)                  \
  X(4, GeluTanhGradient)              \
  X(5, SoftplusGradient)              \
  X(6, HardSwishGradient)             \
  X(7, MulQuantized)                  \
  X(8, Add)                           \
  X(9, AddRelu)

#define DLSYS_CODE(code, Name) k##Name = code,
struct ActivationCode {
  enum : int { DLSYS_ACTIVATIONS(DLSYS_CODE) };  // 0 is none
};
struct GradientCode {
  enum : int { DLSYS_ACTIVATION_GRADIENTS(DLSYS_CODE) };
};
#undef DLSYS_CODE

#define DLSYS_ONE_MORE(code, Name) +1
constexpr int64_t kActivations = DLSYS_ACTIVATIONS(DLSYS_ONE_MORE);
constexpr int64_t kActivationGradients = DLSYS_ACTIVATION_GRADIENTS(DLSYS_ONE_MORE);
#undef DLSYS_ONE_MORE

// True for the codes that add the side.
DLSYS_HD constexpr bool AddsSide(int gradient) {
  return gradient == GradientCode::kAdd || gradient == GradientCode::kAddRelu;
}

// The code of the gradient of an activation that is of its input, or 0.
constexpr int GradientOf(int64_t activation) {
  switch (activation) {
    case ActivationCode::kSilu:
      return GradientCode::kSiluGradient;
    case ActivationCode::kGelu:
      return GradientCode::kGeluGradient;
    case ActivationCode::kGeluTanh:
      return GradientCode::kGeluTanhGradient;
    default:
      return 0;
  }
}

inline int CheckedEpilogue(const char* op, int64_t code, int64_t first, int64_t last) {
  if (code < first || code > last)
    Fail("%s: there is no epilogue %ld, expected %ld to %ld", op, (long)code, (long)first,
         (long)last);
  return (int)code;
}

}  // namespace dlsys
