// Convolution with channels last by wgmma and TMA, for sm_90a; arguments as in
// channels_last/channels_last.cuh. Dense, channels and filters by eight, or of float32 by four:
// implicit GEMM (channels_last/sources.cuh), or, of a 1 x 1 filter at stride 1, a GEMM of the
// images as they lie. Images of few channels, as photographs are, are copied for a forward pass and
// for the gradient of the filter.
#pragma once
#include "cuda/conv/channels_last/channels_last.cuh"
#include "cuda/conv/cost.h"

namespace dlsys {
namespace cuda {
namespace channels_last {

// Why it cannot compute a pass of a convolution of these arrays, or null.
template <class T>
const char* HopperRefusal(const Call& at, const Conv& conv, Pass pass, const T* x, const T* f,
                          const T* y);

// Microseconds of a pass in float32 whose images have their channels first: what is gathered is
// moved last. kNever where it cannot be computed so.
double PlanesUs(const ConvWork& work);

// True where float32 is faster this way than with channels first, all passes together.
bool PaysInFloat32(DLContext ctx, const Conv& conv);

// The tilings of its implicit GEMM, and of the gradient of a filter by mma in float32.
std::vector<std::string> WgmmaTilings();
std::vector<std::string> WgradTilings();

// With statistics there is no bias.
template <class T>
void ForwardOnHopper(const Call& at, const Conv& conv, const T* x, const T* f, const T* bias, T* y,
                     const Statistics* statistics);
// `sums` may be null, and else HopperMakesSums.
template <class T>
void DataGradientOnHopper(const Call& at, const Conv& conv, const T* f, const T* dy, T* dx,
                          const GradientSums* sums);
// True where it makes them beside a data gradient that it can compute.
bool HopperMakesSums(const Conv& conv, const GradientSums& sums);
template <class T>
void FilterGradientOnHopper(const Call& at, const Conv& conv, const T* x, const T* dy, T* df);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
