// The algorithms of convolution on the CPU.
#pragma once
#include "../window.h"
#include "common.h"

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

// Every convolution too, tap by tap: slower where there are several channels a group, but the zeros
// around a plane, which would make NaN with what is not finite, multiply nothing.
void DirectForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
void DirectDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);
void DirectFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

}  // namespace cpu
}  // namespace dlsys
