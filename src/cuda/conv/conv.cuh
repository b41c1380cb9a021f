// The convolution algorithms of the GPU and their common interface. Arrays are float32, NCHW,
// contiguous, and overlap nowhere.
#pragma once
#include <string>
#include <vector>

#include "cuda/gemm/gemm.cuh"
#include "math/conv_geometry.h"

namespace dlsys {
namespace cuda {

// One call: the operator's name for messages, device and stream, precision, and the variant of the
// algorithm (its tile shape). A variant that cannot do a convolution fails with DL_NOT_APPLICABLE;
// with kHeuristic the algorithm picks one that can.
struct ConvCall {
  const char* op;
  DLContext ctx;
  DLStream stream;
  Precision precision;
  int variant = kHeuristic;
};

enum class Pass { kForward, kDataGradient, kFilterGradient };

// Every function writes all of its result; bias may be null.
struct ConvAlgorithm {
  const char* name;
  std::vector<std::string> (*variants)(Pass pass);
  const char* (*source)();  // as in registry.h
  bool (*fits)(const ConvCall& at, const Conv& conv);
  void (*forward)(const ConvCall& at, const Conv& conv, const float* x, const float* f,
                  const float* bias, float* y);
  void (*data_gradient)(const ConvCall& at, const Conv& conv, const float* f, const float* dy,
                        float* dx);
  void (*filter_gradient)(const ConvCall& at, const Conv& conv, const float* x, const float* dy,
                          float* df);
};

extern const ConvAlgorithm kImplicitGemm;
extern const ConvAlgorithm kDepthwise;  // one channel per group
// At tf32; the heuristic uses it only where it is faster.
extern const ConvAlgorithm kTensorCores;
extern const ConvAlgorithm kCudnn;

// The name of a variant.
inline std::string TileName(int rows, int cols) {
  return std::to_string(rows) + "x" + std::to_string(cols);
}

}  // namespace cuda
}  // namespace dlsys
