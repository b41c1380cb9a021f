// Convolution of groups of few channels with channels last, by mma: filters of 3 x 3 elements over
// 4, 8 or 16 channels, as many as a group has filters. 16 bits, or float32 rounded to tf32;
// arguments and layouts are those of channels_last/channels_last.cuh.
#pragma once
#include "cuda/conv/channels_last/channels_last.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

// Why it cannot compute a convolution of these arrays, or null.
template <class T>
const char* GroupsRefusal(const Call& at, const Conv& conv, const T* x, const T* f, const T* y);

// bias may be null.
template <class T>
void ForwardOfGroups(const Call& at, const Conv& conv, const T* x, const T* f, const T* bias, T* y);
template <class T>
void DataGradientOfGroups(const Call& at, const Conv& conv, const T* f, const T* dy, T* dx);
template <class T>
void FilterGradientOfGroups(const Call& at, const Conv& conv, const T* x, const T* dy, T* df);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
