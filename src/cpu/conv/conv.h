// The convolution algorithms of the CPU and their common interface. Arrays are float32, NCHW
// (filters O, C / groups, H, W), contiguous, and overlap nowhere. Each algorithm has a forward
// pass, a data gradient and a filter gradient; its file names what limits it. In the order of
// reading: naive.cc, im2col.cc, implicit.cc, depthwise.cc, winograd.cc, fft.cc; conv.cc picks one.
#pragma once
#include "cpu/runtime/common.h"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cpu {

// Arrays are those of Conv; every function writes its whole result. bias may be null.
struct ConvAlgorithm {
  const char *name, *serves;  // what it is for, where that is not everything
  bool (*fits)(const Conv& conv);
  void (*forward)(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
  void (*data_gradient)(const Conv& conv, const float* f, const float* dy, float* dx);
  void (*filter_gradient)(const Conv& conv, const float* x, const float* dy, float* df);
};

// Filters in the layout of a kernel, kept from run to run because they do not change: packed by the
// first run. What follows the sum and the bias: an array of y's shape that is added, and relu.
struct Kept {
  float* filters;
  bool ready;
  const float* residual;  // null for none
  bool relu;
};

// The definition, element by element: any convolution.
void NaiveForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
void NaiveDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);
void NaiveFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

// A product of matrices over a stored im2col matrix: any convolution. The matrix is that of several
// images where these have at most so many output positions.
constexpr int64_t kIm2colColumns = 256;
int64_t Im2colImages(const Conv& conv);
void Im2colForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
void Im2colDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);
void Im2colFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

// Fourier transforms.
bool FftFits(const Conv& conv);
void FftForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
void FftDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);
void FftFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

// Implicit GEMM: any convolution.
void GemmForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
void GemmForwardKept(const Conv& conv, const float* x, const float* f, const float* bias,
                     const Kept& kept, float* y);
int64_t GemmFiltersNumel(const Conv& conv);  // floats of the filters that it keeps
void GemmDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);
void GemmFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

// Data gradient of any convolution, one kernel offset at a time: slower than GEMM where groups have
// several channels, but nothing is multiplied by padding.
void DirectDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);

// Direct: one channel per group.
void DepthwiseForward(const Conv& conv, const float* x, const float* f, const float* bias,
                      float* y);
void DepthwiseFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

// Winograd's F(kOut x kOut, 3 x 3) for kOut of 2 and 4: stride 1, no dilation. The larger tile
// multiplies less and rounds more.
bool WinogradFits(const Conv& conv);
template <int kOut>
void WinogradForward(const Conv& conv, const float* x, const float* f, const float* bias, float* y);
template <int kOut>
void WinogradForwardKept(const Conv& conv, const float* x, const float* f, const float* bias,
                         const Kept& kept, float* y);
template <int kOut>
int64_t WinogradFiltersNumel(const Conv& conv);
template <int kOut>
void WinogradDataGradient(const Conv& conv, const float* f, const float* dy, float* dx);
template <int kOut>
void WinogradFilterGradient(const Conv& conv, const float* x, const float* dy, float* df);

}  // namespace cpu
}  // namespace dlsys
