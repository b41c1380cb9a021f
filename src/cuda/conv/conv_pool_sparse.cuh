// The gradients of conv + bias + relu + max-pool by the elements of dy that are not zero: what
// conv_pool_sparse.cu launches, and says of its algorithm and limits. False for layers that they
// are not for, of which nothing is written then.
#pragma once
#include "cuda/runtime/launch.cuh"
#include "math/conv_pool.h"

namespace dlsys {
namespace cuda {

// dx (n, c, in) from f, dy and code.
bool SparseDataGradient(const char* op, const ConvPool& p, const float* f, const float* dy,
                        const uint8_t* code, float* dx, int device, DLStream stream);
// df (o, c, kernel) and, if wanted, db (o) from x, dy and code.
bool SparseFilterGradient(const char* op, const ConvPool& p, const float* x, const float* dy,
                          const uint8_t* code, float* df, float* db, DLContext ctx,
                          DLStream stream);

}  // namespace cuda
}  // namespace dlsys
