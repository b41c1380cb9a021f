// The gradients of conv + bias + relu + max-pool by the elements of dy that are not zero: what
// conv_pool/sparse.cu launches, and says of its algorithm and limits. False for layers that they
// are not for, of which nothing is written then.
#pragma once
#include <functional>

#include "cuda/runtime/launch.cuh"
#include "operators/conv_pool.h"

namespace dlsys {
namespace cuda {

// What becomes of a filter gradient that lies in parts, partial (workers, numel + biases), of the
// filter and the bias: queues a kernel that adds them.
using AddWorkers = std::function<void(const float* partial, int workers, int numel, int biases)>;

// dx (n, c, in) from f, dy and code.
bool SparseDataGradient(const char* op, const ConvPool& p, const float* f, const float* dy,
                        const uint8_t* code, float* dx, int device, DLStream stream);
// The gradients of filter (o, c, kernel) and bias (o) from x, dy and code, to be added.
bool SparseFilterGradient(const char* op, const ConvPool& p, const float* x, const float* dy,
                          const uint8_t* code, const AddWorkers& add, DLContext ctx,
                          DLStream stream);

}  // namespace cuda
}  // namespace dlsys
