// Parts of a filter's gradient, which blocks sum over their positions and leave as it lies, added
// in their order, so that every run gives the same bits. The latency of loads limits it: parts are
// some hundreds, and elements few.
#pragma once
#include "cuda/conv/channels_last/channels_last.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

// df (numel) = the sum of parts (count, numel).
template <class T>
void AddInOrder(const Call& at, const float* parts, int64_t count, int64_t numel, T* df);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
