// The operators of GEMM: C = op(A) op(B), alone and fused with an epilogue (bias, residual,
// activation or activation gradient) or with the sums of an operand over K, which are the bias
// gradient of a dense layer. They check arguments and hand a Gemm to ladder.cu, which picks the
// kernel. Row-major, contiguous, of float32 or a type of 16 bits; the output overlaps no input, but
// may be the residual.
#include <cmath>

#include "cuda/gemm/gemm.cuh"
#include "operators/epilogue.h"

namespace dlsys {
namespace cuda {

Precision CheckedPrecision(const char* op, int64_t precision) {
  if (precision < 0 || precision > (int64_t)Precision::k3xTf32)
    Fail("%s: there is no precision %ld, expected 0 (fp32), 1 (tf32) or 2 (3xtf32)", op,
         (long)precision);
  return (Precision)precision;
}

namespace {

// The address of an array's elements, which are of this dtype; in a workspace query, where arrays
// may have none, one that is not null, which would say that there is no bias or side.
const float* Address(const char* op, const DLArray* x, int dtype) {
  constexpr uintptr_t kAligned = 256;
  if (x->dtype != dtype) Fail("%s: expected %s, got %s", op, DtypeText(dtype), DtypeText(x->dtype));
  if (!x->data && Workspace::Querying()) return (const float*)kAligned;
  return (const float*)x->data;
}

}  // namespace

Gemm CheckedGemm(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                 int64_t trans_b, DLArray* c, U8Operand u8, const DLArray* scale, int dtype) {
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
    return Address(op, x, u8 == which ? DL_UINT8 : dtype);
  };
  const float *a_data = operand(a, U8Operand::kA), *b_data = operand(b, U8Operand::kB);
  float* c_data = const_cast<float*>(Address(op, c, dtype));
  Gemm gemm{a_data, b_data, c_data, m, n, k, trans_a != 0, trans_b != 0, c->ctx};
  gemm.dtype = dtype;
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
  gemm->epilogue.bias = Address(op, bias, gemm->dtype);
}

namespace {

template <class T>
Gemm Checked(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
             int64_t precision, DLArray* c) {
  Gemm gemm = CheckedGemm(op, a, trans_a, b, trans_b, c, U8Operand::kNone, nullptr, kDtype<T>);
  gemm.precision = CheckedPrecision(op, precision);
  return gemm;
}

template <class T>
void Matmul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, int64_t algorithm,
            int64_t precision, DLArray* c, DLStream stream) {
  const Gemm gemm = Checked<T>("matmul", a, trans_a, b, trans_b, precision, c);
  RunGemm("matmul", gemm, stream, algorithm);
}

void MatmulOwn(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, DLArray* c,
               DLStream stream) {
  RunOwnGemm("matmul_own", CheckedGemm("matmul_own", a, trans_a, b, trans_b, c), stream);
}

// y = activation(op(A) op(B))
template <class T>
void MatmulMap(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b,
               int64_t algorithm, int64_t precision, int64_t activation, DLArray* y,
               DLStream stream) {
  const char* op = "matmul_map";
  Gemm gemm = Checked<T>(op, a, trans_a, b, trans_b, precision, y);
  gemm.epilogue.activation = CheckedEpilogue(op, activation, 1, kActivations);
  RunGemm(op, gemm, stream, algorithm);
}

// y = activation(op(A) op(B) + bias), bias (n); activation 0 is none.
template <class T>
void MatmulBias(const DLArray* a, const DLArray* b, const DLArray* bias, int64_t trans_a,
                int64_t trans_b, int64_t algorithm, int64_t precision, int64_t activation,
                DLArray* y, DLStream stream) {
  const char* op = "matmul_bias";
  Gemm gemm = Checked<T>(op, a, trans_a, b, trans_b, precision, y);
  SetBias(op, bias, y, &gemm);
  gemm.epilogue.activation = CheckedEpilogue(op, activation, 0, kActivations);
  RunGemm(op, gemm, stream, algorithm);
}

// Two results of y = op(A) op(B) + bias, bias (n), of 16 bits: y or, kSlope, the code of the
// derivative of the activation there, and z = activation(y).
template <class T, bool kSlope>
void MatmulBiasTwo(const DLArray* a, const DLArray* b, const DLArray* bias, int64_t trans_a,
                   int64_t trans_b, int64_t algorithm, int64_t precision, int64_t activation,
                   DLArray* y, DLArray* z, DLStream stream) {
  const char* op = kSlope ? "matmul_bias_slope" : "matmul_bias_both";
  Gemm gemm = Checked<T>(op, a, trans_a, b, trans_b, precision, z);
  SetBias(op, bias, z, &gemm);
  Enter(op, z, y);
  CheckSameShape(op, y, z);
  gemm.epilogue.before = const_cast<float*>(Address(op, y, kSlope ? DL_UINT8 : gemm.dtype));
  gemm.epilogue.activation = CheckedEpilogue(op, activation, 1, kActivations);
  gemm.epilogue.slope = kSlope;
  if (kSlope && !GradientOf(activation))
    Fail("%s: activation %ld has no derivative of its input", op, (long)activation);
  RunGemm(op, gemm, stream, algorithm);
}

// dx = gradient(side, op(A) op(B)), side of dx's shape, where it is a quantized derivative in
// uint8.
template <class T>
void MatmulGradient(const DLArray* a, const DLArray* b, const DLArray* side, int64_t trans_a,
                    int64_t trans_b, int64_t algorithm, int64_t precision, int64_t gradient,
                    DLArray* dx, DLStream stream) {
  const char* op = "matmul_gradient";
  Gemm gemm = Checked<T>(op, a, trans_a, b, trans_b, precision, dx);
  Enter(op, dx, side);
  CheckSameShape(op, side, dx);
  gemm.epilogue.gradient = CheckedEpilogue(op, gradient, 1, kActivationGradients);
  gemm.epilogue.quantized = gradient == GradientCode::kMulQuantized;
  gemm.epilogue.side = Address(op, side, gemm.epilogue.quantized ? DL_UINT8 : gemm.dtype);
  RunGemm(op, gemm, stream, algorithm);
}

// y = op(A) op(B) [+ bias] + r, r of y's shape, whose memory may be y's; or relu of that
// (activation 1).
template <class T>
Gemm CheckedSum(const char* op, const DLArray* a, const DLArray* b, const DLArray* r,
                int64_t trans_a, int64_t trans_b, int64_t precision, int64_t activation,
                DLArray* y) {
  Gemm gemm = Checked<T>(op, a, trans_a, b, trans_b, precision, y);
  Enter(op, y, r);
  CheckSameShape(op, r, y);
  const bool relu = CheckedEpilogue(op, activation, 0, ActivationCode::kRelu);
  gemm.epilogue.gradient = relu ? GradientCode::kAddRelu : GradientCode::kAdd;
  gemm.epilogue.side = Address(op, r, gemm.dtype);
  return gemm;
}
template <class T>
void MatmulAdd(const DLArray* a, const DLArray* b, const DLArray* r, int64_t trans_a,
               int64_t trans_b, int64_t algorithm, int64_t precision, int64_t activation,
               DLArray* y, DLStream stream) {
  const char* op = "matmul_add";
  RunGemm(op, CheckedSum<T>(op, a, b, r, trans_a, trans_b, precision, activation, y), stream,
          algorithm);
}
template <class T>
void MatmulBiasAdd(const DLArray* a, const DLArray* b, const DLArray* bias, const DLArray* r,
                   int64_t trans_a, int64_t trans_b, int64_t algorithm, int64_t precision,
                   int64_t activation, DLArray* y, DLStream stream) {
  const char* op = "matmul_bias_add";
  Gemm gemm = CheckedSum<T>(op, a, b, r, trans_a, trans_b, precision, activation, y);
  SetBias(op, bias, y, &gemm);
  RunGemm(op, gemm, stream, algorithm);
}

// True where the rung `hopper` multiplies: its warps have a residual copied ahead, those of FFMA
// wait for it, for longer than a kernel takes that adds it. Nor does it pay where C of 16 bits has
// fewer rows than a tile: an LSTM of 64 rows took 1 % longer.
bool SumPays(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
             int64_t precision, DLArray* y) {
  constexpr int64_t kTileRows = 128;
  const char* op = "matmul_add";
  Gemm gemm = CheckedGemm(op, a, trans_a, b, trans_b, y, U8Operand::kNone, nullptr, a->dtype);
  gemm.precision = CheckedPrecision(op, precision);
  gemm.epilogue.gradient = GradientCode::kAdd;
  return std::isfinite(HopperUs(gemm)) && (!gemm.IsNarrow() || gemm.m >= kTileRows);
}
bool MatmulAddFits(const DLArray* a, const DLArray* b, const DLArray*, int64_t trans_a,
                   int64_t trans_b, int64_t, int64_t precision, int64_t, DLArray* y) {
  return SumPays(a, trans_a, b, trans_b, precision, y);
}
bool MatmulBiasAddFits(const DLArray* a, const DLArray* b, const DLArray*, const DLArray*,
                       int64_t trans_a, int64_t trans_b, int64_t, int64_t precision, int64_t,
                       DLArray* y) {
  return SumPays(a, trans_a, b, trans_b, precision, y);
}

// y = op(A) op(B), and the sums over k of op(A) (of_a) or of op(B), in float32.
template <class T>
void MatmulSums(const DLArray* a, const DLArray* b, int64_t trans_a, int64_t trans_b,
                int64_t algorithm, int64_t precision, int64_t of_a, DLArray* y, DLArray* sums,
                DLStream stream) {
  const char* op = "matmul_sums";
  Gemm gemm = Checked<T>(op, a, trans_a, b, trans_b, precision, y);
  Enter(op, y, sums);
  if (Numel(sums) != (of_a ? gemm.m : gemm.n))
    Fail("%s: expected %ld sums, got shape %s", op, (long)(of_a ? gemm.m : gemm.n),
         ShapeText(sums).c_str());
  static float nowhere;  // stands for the sums in a question that gives no memory for them
  float* const made = Out(op, sums);
  gemm.sums = made ? made : &nowhere;
  gemm.sums_of_a = of_a != 0;
  RunGemm(op, gemm, stream, algorithm);
}

DLSYS_KERNEL_TYPED(cuda, matmul, Matmul);
DLSYS_KERNEL(cuda, matmul_own, MatmulOwn);
DLSYS_ALGORITHMS(cuda, matmul, GemmAlgorithms);
DLSYS_KERNEL_TYPED(cuda, matmul_map, MatmulMap);
DLSYS_KERNEL_TYPED(cuda, matmul_bias, MatmulBias);
DLSYS_KERNEL_TYPED(cuda, matmul_gradient, MatmulGradient);
DLSYS_KERNEL_TYPED(cuda, matmul_add, MatmulAdd);
DLSYS_FITS(cuda, matmul_add, MatmulAddFits);
DLSYS_KERNEL_TYPED(cuda, matmul_bias_add, MatmulBiasAdd);
DLSYS_FITS(cuda, matmul_bias_add, MatmulBiasAddFits);
#define DLSYS_TWO(name, slope)                                                     \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_BFLOAT16, MatmulBiasTwo<bfloat16, slope>); \
  DLSYS_KERNEL_OF(cuda, name, #name, DL_FLOAT16, MatmulBiasTwo<float16, slope>);   \
  DLSYS_ALGORITHMS(cuda, name, GemmAlgorithms)
DLSYS_TWO(matmul_bias_both, false);
DLSYS_TWO(matmul_bias_slope, true);
#undef DLSYS_TWO
DLSYS_KERNEL_TYPED(cuda, matmul_sums, MatmulSums);
DLSYS_ALGORITHMS(cuda, matmul_map, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_bias, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_gradient, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_add, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_bias_add, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_sums, GemmAlgorithms);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
