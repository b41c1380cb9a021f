// The operators of GEMM: C = op(A) op(B), alone and fused with an epilogue (bias, activation or
// activation gradient) or with the sums of an operand over K, which are the bias gradient of a
// dense layer. They check arguments and hand a Gemm to ladder.cu, which picks the kernel.
// float32, row-major, contiguous; the output overlaps no input.
#include "cuda/gemm/gemm.cuh"
#include "math/epilogue.h"

namespace dlsys {
namespace cuda {

Precision CheckedPrecision(const char* op, int64_t precision) {
  if (precision < 0 || precision > (int64_t)Precision::k3xTf32)
    Fail("%s: there is no precision %ld, expected 0 (fp32), 1 (tf32) or 2 (3xtf32)", op,
         (long)precision);
  return (Precision)precision;
}

Gemm CheckedGemm(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                 int64_t trans_b, DLArray* c, U8Operand u8, const DLArray* scale) {
  Enter(op, c, a, b);
  if (a->ndim != 2 || b->ndim != 2 || c->ndim != 2)
    Fail("%s: expected matrices, got %s and %s into %s", op, ShapeText(a).c_str(),
         ShapeText(b).c_str(), ShapeText(c).c_str());
  const int64_t m = a->shape[trans_a ? 1 : 0], k = a->shape[trans_a ? 0 : 1];
  const int64_t n = b->shape[trans_b ? 0 : 1], k_of_b = b->shape[trans_b ? 1 : 0];
  if (k != k_of_b || c->shape[0] != m || c->shape[1] != n)
    Fail("%s: shapes do not fit: %s%s and %s%s into %s", op, ShapeText(a).c_str(),
         trans_a ? " transposed" : "", ShapeText(b).c_str(), trans_b ? " transposed" : "",
         ShapeText(c).c_str());
  const auto operand = [&](const DLArray* x, U8Operand which) {
    if (u8 != which) return In(op, x);
    if (x->dtype != DL_UINT8) Fail("%s: expected uint8, got %s", op, DtypeText(x->dtype));
    return (const float*)x->data;
  };
  const float *a_data = operand(a, U8Operand::kA), *b_data = operand(b, U8Operand::kB);
  Gemm gemm{a_data, b_data, Out(op, c), m, n, k, trans_a != 0, trans_b != 0, c->ctx};
  if (u8 == U8Operand::kNone) return gemm;
  Enter(op, c, scale);
  if (Numel(scale) != 1)
    Fail("%s: expected one scale of the uint8 operand, got shape %s", op, ShapeText(scale).c_str());
  gemm.u8 = u8, gemm.scale = In(op, scale);
  return gemm;
}

void SetBias(const char* op, const DLArray* bias, const DLArray* y, Gemm* gemm) {
  Enter(op, y, bias);
  if (Numel(bias) != gemm->n)
    Fail("%s: expected a bias of %ld elements, got shape %s", op, (long)gemm->n,
         ShapeText(bias).c_str());
  gemm->epilogue.bias = In(op, bias);
}

namespace {

void Matmul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, int64_t algorithm,
            int64_t precision, DLArray* c, DLStream stream) {
  Gemm gemm = CheckedGemm("matmul", a, trans_a, b, trans_b, c);
  gemm.precision = CheckedPrecision("matmul", precision);
  RunGemm("matmul", gemm, stream, algorithm);
}

void MatmulOwn(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, DLArray* c,
               DLStream stream) {
  RunOwnGemm("matmul_own", CheckedGemm("matmul_own", a, trans_a, b, trans_b, c), stream);
}

Gemm Checked(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
             int64_t precision, DLArray* c) {
  Gemm gemm = CheckedGemm(op, a, trans_a, b, trans_b, c);
  gemm.precision = CheckedPrecision(op, precision);
  return gemm;
}

// y = activation(op(A) op(B))
void MatmulMap(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b,
               int64_t algorithm, int64_t precision, int64_t activation, DLArray* y,
               DLStream stream) {
  const char* op = "matmul_map";
  Gemm gemm = Checked(op, a, trans_a, b, trans_b, precision, y);
  gemm.epilogue.activation = CheckedEpilogue(op, activation, 1, kActivations);
  RunGemm(op, gemm, stream, algorithm);
}

// y = activation(op(A) op(B) + bias), bias (n); activation 0 is none.
void MatmulBias(const DLArray* a, const DLArray* b, const DLArray* bias, int64_t trans_a,
                int64_t trans_b, int64_t algorithm, int64_t precision, int64_t activation,
                DLArray* y, DLStream stream) {
  const char* op = "matmul_bias";
  Gemm gemm = Checked(op, a, trans_a, b, trans_b, precision, y);
  SetBias(op, bias, y, &gemm);
  gemm.epilogue.activation = CheckedEpilogue(op, activation, 0, kActivations);
  RunGemm(op, gemm, stream, algorithm);
}

// dx = gradient(side, op(A) op(B)), side of dx's shape.
void MatmulGradient(const DLArray* a, const DLArray* b, const DLArray* side, int64_t trans_a,
                    int64_t trans_b, int64_t algorithm, int64_t precision, int64_t gradient,
                    DLArray* dx, DLStream stream) {
  const char* op = "matmul_gradient";
  Gemm gemm = Checked(op, a, trans_a, b, trans_b, precision, dx);
  Enter(op, dx, side);
  CheckSameShape(op, side, dx);
  gemm.epilogue.side = In(op, side);
  gemm.epilogue.gradient = CheckedEpilogue(op, gradient, 1, kActivationGradients);
  RunGemm(op, gemm, stream, algorithm);
}

// y = op(A) op(B), and the sums over k of op(A) (of_a) or of op(B).
void MatmulSums(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b,
                int64_t algorithm, int64_t precision, int64_t of_a, DLArray* y, DLArray* sums,
                DLStream stream) {
  const char* op = "matmul_sums";
  Gemm gemm = Checked(op, a, trans_a, b, trans_b, precision, y);
  Enter(op, y, sums);
  if (Numel(sums) != (of_a ? gemm.m : gemm.n))
    Fail("%s: expected %ld sums, got shape %s", op, (long)(of_a ? gemm.m : gemm.n),
         ShapeText(sums).c_str());
  gemm.sums = Out(op, sums);
  gemm.sums_of_a = of_a != 0;
  RunGemm(op, gemm, stream, algorithm);
}

DLSYS_KERNEL(cuda, matmul, Matmul);
DLSYS_KERNEL(cuda, matmul_own, MatmulOwn);
DLSYS_ALGORITHMS(cuda, matmul, GemmAlgorithms);
DLSYS_KERNEL(cuda, matmul_map, MatmulMap);
DLSYS_KERNEL(cuda, matmul_bias, MatmulBias);
DLSYS_KERNEL(cuda, matmul_gradient, MatmulGradient);
DLSYS_KERNEL(cuda, matmul_sums, MatmulSums);
DLSYS_ALGORITHMS(cuda, matmul_map, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_bias, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_gradient, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_sums, GemmAlgorithms);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
