// Parts of a filter's gradient, which blocks sum over their positions, added in their order, so
// that every run gives the same bits. The latency of loads limits it: parts are some hundreds, and
// elements few.
#pragma once
#include "cuda/conv/channels_last/channels_last.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {

// df (filters, kernel) = the sum of parts (count, kernel, filters).
template <class T>
void AddInOrder(const Call& at, const float* parts, int64_t count, int64_t kernel, int64_t filters,
                T* df);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
