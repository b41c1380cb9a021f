// The algorithms of convolution on the GPU. All arrays are float32, contiguous, and overlap
// nowhere.
#pragma once
#include "cuda/context.cuh"
#include "window.h"

namespace dlsys {
namespace cuda {

// Where and for whom: the operator's name for messages, the device and the stream.
struct Place {
  const char* op;
  DLContext ctx;
  DLStream stream;
};

// Every function writes all of its result; bias may be null.
struct ConvAlgorithm {
  const char* name;
  bool (*fits)(const Conv& conv);
  void (*forward)(const Place& at, const Conv& conv, const float* x, const float* f,
                  const float* bias, float* y);
  void (*data_gradient)(const Place& at, const Conv& conv, const float* f, const float* dy,
                        float* dx);
  void (*filter_gradient)(const Place& at, const Conv& conv, const float* x, const float* dy,
                          float* df);
};

extern const ConvAlgorithm kImplicitGemm;
extern const ConvAlgorithm kDepthwise;  // one channel a group
// At tf32 where that is faster, else the implicit product; for the precision policy alone.
extern const ConvAlgorithm kTensorCores;

}  // namespace cuda
}  // namespace dlsys
