// Matrix products with what follows them: a bias and an activation, the gradient of an activation,
// and the sums of one operand over the depth. Contracts as in matmul.cuh.
#include "cuda/gemm/gemm.cuh"
#include "math/epilogue.h"

namespace dlsys {
namespace cuda {
namespace {

Product Checked(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                int64_t trans_b, int64_t precision, DLArray* c) {
  Product product = CheckedProduct(op, a, trans_a, b, trans_b, c);
  product.precision = CheckedPrecision(op, precision);
  return product;
}

// y = activation(op(A) op(B))
void MatmulMap(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b, int64_t choice,
               int64_t precision, int64_t activation, DLArray* y, DLStream stream) {
  const char* op = "matmul_map";
  Product product = Checked(op, a, trans_a, b, trans_b, precision, y);
  product.epilogue.activation = CheckedMap(op, activation, 1, kActivations);
  Multiply(op, product, stream, choice);
}

// y = activation(op(A) op(B) + bias), bias (n); activation 0 is none.
void MatmulBias(const DLArray* a, const DLArray* b, const DLArray* bias, int64_t trans_a,
                int64_t trans_b, int64_t choice, int64_t precision, int64_t activation, DLArray* y,
                DLStream stream) {
  const char* op = "matmul_bias";
  Product product = Checked(op, a, trans_a, b, trans_b, precision, y);
  TakeBias(op, bias, y, &product);
  product.epilogue.activation = CheckedMap(op, activation, 0, kActivations);
  Multiply(op, product, stream, choice);
}

// dx = gradient(side, op(A) op(B)), side of dx's shape.
void MatmulGradient(const DLArray* a, const DLArray* b, const DLArray* side, int64_t trans_a,
                    int64_t trans_b, int64_t choice, int64_t precision, int64_t gradient,
                    DLArray* dx, DLStream stream) {
  const char* op = "matmul_gradient";
  Product product = Checked(op, a, trans_a, b, trans_b, precision, dx);
  Enter(op, dx, side);
  CheckSameShape(op, side, dx);
  product.epilogue.side = In(op, side);
  product.epilogue.gradient = CheckedMap(op, gradient, 1, kActivationGradients);
  Multiply(op, product, stream, choice);
}

// y = op(A) op(B), and the sums over the depth of op(A) (of_a) or of op(B).
void MatmulSums(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b,
                int64_t choice, int64_t precision, int64_t of_a, DLArray* y, DLArray* sums,
                DLStream stream) {
  const char* op = "matmul_sums";
  Product product = Checked(op, a, trans_a, b, trans_b, precision, y);
  Enter(op, y, sums);
  if (Numel(sums) != (of_a ? product.m : product.n))
    Fail("%s: expected %ld sums, got shape %s", op, (long)(of_a ? product.m : product.n),
         ShapeText(sums).c_str());
  product.sums = Out(op, sums);
  product.sums_of_a = of_a != 0;
  Multiply(op, product, stream, choice);
}

DLSYS_KERNEL(cuda, matmul_map, MatmulMap);
DLSYS_KERNEL(cuda, matmul_bias, MatmulBias);
DLSYS_KERNEL(cuda, matmul_gradient, MatmulGradient);
DLSYS_KERNEL(cuda, matmul_sums, MatmulSums);
DLSYS_ALGORITHMS(cuda, matmul_map, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_bias, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_gradient, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_sums, GemmAlgorithms);

}  // namespace

void TakeBias(const char* op, const DLArray* bias, const DLArray* y, Product* product) {
  Enter(op, y, bias);
  if (Numel(bias) != product->n)
    Fail("%s: expected a bias of %ld elements, got shape %s", op, (long)product->n,
         ShapeText(bias).c_str());
  product->epilogue.bias = In(op, bias);
}

}  // namespace cuda
}  // namespace dlsys
