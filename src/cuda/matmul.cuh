// The two matrix products, own and cuBLAS, behind one description of the problem.
#pragma once
#include "cuda/context.cuh"

namespace dlsys {
namespace cuda {

// C (m, n) = op(A) (m, k) op(B) (k, n), all float32, contiguous and row-major; op transposes where
// told to. C overlaps neither A nor B.
struct Product {
  const float* a;  // (m, k), or (k, m) with trans_a
  const float* b;  // (k, n), or (n, k) with trans_b
  float* c;        // (m, n)
  int64_t m, n, k;
  bool trans_a, trans_b;
  DLContext ctx;
};

// Makes the GPU of the arrays current and checks dtypes and shapes.
Product CheckedProduct(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                       int64_t trans_b, DLArray* c);

void MultiplyOwn(const char* op, const Product& product, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
