// Convolution with channels last, of floats of 16 bits or of float32 at tf32: x (n, in, c), y (n,
// out, o), a gradient of the shape of its array; filters stay (o, c / groups, kernel). All
// contiguous, and they overlap nowhere but where it is said. channels_last/channels_last.cu has the
// algorithm.
#pragma once
#include "cuda/gemm/gemm.cuh"
#include "cuda/norm/norm.cuh"
#include "operators/conv_geometry.h"

namespace dlsys {
namespace cuda {
namespace channels_last {

// kMma is implicit GEMM by mma, from sm_80 on. For sm_90a, kWgmma is the same by wgmma and TMA,
// kHalo reads images once for all kernel offsets, and kGemm is the GEMM that a 1 x 1 filter at
// stride 1 is.
enum class Kernel { kHeuristic, kMma, kWgmma, kHalo, kGemm };

// The operator's name for messages, where it runs, and by which kernel and which of its tilings.
// `planes`, of float32: the images that are not gathered, which are y or, of a data gradient, dx,
// have their channels first.
struct Call {
  const char* op;
  DLContext ctx;
  DLStream stream;
  Kernel kernel = Kernel::kHeuristic;
  int tiling = kHeuristic;
  bool planes = false;
};

// True where it computes a convolution of 16 bits: from sm_80 on, sizes within int, groups of
// enough channels. Of float32 there is what channels_last/hopper.cuh has.
bool Serves(DLContext ctx, const Conv& conv);

// Of each filter's results as they are stored, (o): mean and variance.
struct Statistics {
  float *mean, *variance;
};

// relu's gradient of the data gradient plus an addend, and its sums for the batch normalization
// that relu's argument came from, or from a sum with it.
struct GradientSums {
  // What was normalized, and the addend, of the data's shape; dz may lie over the addend, which may
  // be null.
  const void *x, *addend;
  const uint8_t* bits;  // of relu's positive results
  BatchMoments moments;
  float *dscale, *dbias;  // (c)
};

// bias may be null; T is bfloat16, float16 or float.
template <class T>
void Forward(const Call& at, const Conv& conv, const T* x, const T* f, const T* bias, T* y);
template <class T>
void ForwardWithStatistics(const Call& at, const Conv& conv, const T* x, const T* f, T* y,
                           const Statistics& statistics);
template <class T>
void DataGradient(const Call& at, const Conv& conv, const T* f, const T* dy, T* dx);
template <class T>
void FilterGradient(const Call& at, const Conv& conv, const T* x, const T* dy, T* df);

// y (n, cols, rows) = x (n, rows, cols), each transposed.
template <class T>
void SwapAxes(const Call& at, const T* x, int64_t n, int64_t rows, int64_t cols, T* y);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
