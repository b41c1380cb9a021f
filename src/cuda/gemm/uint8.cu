// matmul_u8: GEMM of a uint8 A, as a batch of images in device memory is, and a float B, with
// dequantization scale, bias and activation fused. It runs on tensor cores (uint8.cuh), at fp32
// too; where those are missing, A is dequantized to scratch first and the float kernels run.
#include "cuda/gemm/hopper/uint8.cuh"
#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/uint8.cuh"
#include "operators/device_batch.h"
#include "operators/epilogue.h"

namespace dlsys {
namespace cuda {
namespace {

__global__ void DequantizeKernel(const uint8_t* x, const float* scale, float* y, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = batch::Scaled(x[i], *scale, 0.f);
}

// y = activation(scale * op(A) op(B) + bias), A uint8; bias may be null, activation 0 is none.
void RunU8Gemm(const char* op, const DLArray* a, const DLArray* b, const DLArray* bias,
               const DLArray* scale, int64_t trans_a, int64_t trans_b, int64_t algorithm,
               int64_t precision, int64_t activation, DLArray* y, DLStream stream) {
  if (trans_a) Fail("%s: a uint8 A cannot be transposed", op);
  Gemm product = CheckedGemm(op, a, trans_a, b, trans_b, y, U8Operand::kA, scale);
  product.precision = CheckedPrecision(op, precision);
  if (bias) SetBias(op, bias, y, &product);
  product.epilogue.activation = CheckedEpilogue(op, activation, 0, kActivations);
  const Dequantized dequantized(op, &product, stream);
  RunGemm(op, product, stream, algorithm);
}

void MatmulU8(const DLArray* a, const DLArray* b, const DLArray* scale, int64_t trans_a,
              int64_t trans_b, int64_t algorithm, int64_t precision, int64_t activation, DLArray* y,
              DLStream stream) {
  RunU8Gemm("matmul_u8", a, b, nullptr, scale, trans_a, trans_b, algorithm, precision, activation,
            y, stream);
}

void MatmulU8Bias(const DLArray* a, const DLArray* b, const DLArray* bias, const DLArray* scale,
                  int64_t trans_a, int64_t trans_b, int64_t algorithm, int64_t precision,
                  int64_t activation, DLArray* y, DLStream stream) {
  RunU8Gemm("matmul_u8_bias", a, b, bias, scale, trans_a, trans_b, algorithm, precision, activation,
            y, stream);
}

DLSYS_KERNEL(cuda, matmul_u8, MatmulU8);
DLSYS_KERNEL(cuda, matmul_u8_bias, MatmulU8Bias);
DLSYS_ALGORITHMS(cuda, matmul_u8, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_u8_bias, GemmAlgorithms);

}  // namespace

Dequantized::Dequantized(const char* op, Gemm* product, DLStream stream) {
  if (product->u8 == U8Operand::kNone || ComputeMajor(product->ctx.device_id) >= 8) return;
  const bool of_a = product->u8 == U8Operand::kA;
  const float*& operand = of_a ? product->a : product->b;
  const int64_t numel = (of_a ? product->m : product->n) * product->k;
  floats_ = std::make_unique<Scratch>(product->ctx, numel * (int64_t)sizeof(float), stream);
  Launch(op, DequantizeKernel, Blocks(numel), kThreads, 0, stream, (const uint8_t*)operand,
         product->scale, floats_->floats(), numel);
  operand = floats_->floats();
  product->u8 = U8Operand::kNone;
}

void LaunchU8(const char* op, int tiling, const GemmParams& params, DLStream stream) {
  constexpr int k64x32 = 2;  // tiles as wgmma's, where that serves
  if (tiling == k64x32 && params.splits == 1 && hopper::U8Fits(params.gemm))
    return hopper::RunU8(op, params.gemm, stream);
  WithTiling<U8Tilings>(tiling, [&](auto of) {
    using T = typename decltype(of)::type;
    if (params.gemm.precision == Precision::kTf32)
      LaunchTiles<T, WithU8<U8Operand::kA, false>::Accumulator, true>(op, params, stream);
    else
      LaunchTiles<T, WithU8<U8Operand::kA, true>::Accumulator, true>(op, params, stream);
  });
}

}  // namespace cuda
}  // namespace dlsys
