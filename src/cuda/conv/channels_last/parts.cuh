// Parts of a filter's gradient that lie as it does, added in their order.
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
