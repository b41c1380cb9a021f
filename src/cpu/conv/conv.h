// The algorithms of convolution on the CPU.
#pragma once
#include "cpu/runtime/common.h"
#include "math/conv_geometry.h"

namespace dlsys {
namespace cpu {

// Arrays are those of Conv; every function writes all of its result. bias may be null.
struct ConvAlgorithm {
  const char* name;
  bool (*fits)(const Conv& conv);
  void (*forward)(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
  void (*data_gradient)(const Conv& conv, const float* f, const float* dy, float* dx);
  void (*filter_gradient)(const Conv& conv, const float* x, const float* dy, float* df);
};

// Every convolution.
void GemmForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
void GemmDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);
void GemmFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

// Every convolution's gradient for the data, tap by tap: slower than by products where there are
// several channels a group, but nothing is multiplied by the zeros around dy.
void DirectDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);

// Convolutions of one channel a group.
void DepthwiseForward(const Conv& conv, const float* x, const float* f, const float* bias,
                      float* y);
void DepthwiseFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

}  // namespace cpu
}  // namespace dlsys
