// Depthwise convolution with channels last, one channel a group: float32 or 16 bits, of any window
// and any number of filters a channel, in float32 arithmetic at every precision. Memory bandwidth
// limits it. Arguments and layouts are those of channels_last/channels_last.cuh.
#pragma once
#include "cuda/conv/channels_last/channels_last.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

// True where it computes a convolution.
bool IsDepthwise(const Conv& conv);

// bias and statistics may be null.
template <class T>
void DepthwiseForward(const Call& at, const Conv& conv, const T* x, const T* f, const T* bias, T* y,
                      const Statistics* statistics);
template <class T>
void DepthwiseDataGradient(const Call& at, const Conv& conv, const T* f, const T* dy, T* dx);
template <class T>
void DepthwiseFilterGradient(const Call& at, const Conv& conv, const T* x, const T* dy, T* df);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
