// The product of two matrices, for kernels that end in one.
#pragma once
#include <cstdint>

#include "cpu/runtime/common.h"

namespace dlsys {
namespace cpu {

// A matrix as it is used: element (i, j) lies at i * row + j * col.
struct Matrix {
  const float* data;
  int64_t row, col;
};

struct Product {
  int64_t m, n, k;
  Matrix a, b;  // (m, k) and (k, n); one of each matrix's steps is 1
  float* c;     // (m, n), contiguous
};

// The product of arrays, each used as its transpose where told to. Fails when shapes or dtypes do
// not fit.
Product CheckedProduct(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                       int64_t trans_b, DLArray* c);

// C = A B. The same bits for any number of threads, and from within a task, where it stays on its
// thread.
void Multiply(Product p);

}  // namespace cpu
}  // namespace dlsys
