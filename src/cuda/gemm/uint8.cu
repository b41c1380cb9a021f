// Products of bytes: their kernels, on tensor cores, and what makes floats of bytes where there are
// none of those.
#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/uint8.cuh"
#include "math/device_batch.h"
#include "math/epilogue.h"

namespace dlsys {
namespace cuda {
namespace {

__global__ void WidenKernel(const uint8_t* x, const float* scale, float* y, int64_t n) {
  for (int64_t i = FirstItem(); i < n; i += ItemStep()) y[i] = batch::Scaled(x[i], *scale, 0.f);
}

// y = activation(scale * op(A) op(B) + bias), A of bytes; there may be no bias, and activation 0 is
// none.
void Multiply(const char* op, const DLArray* a, const DLArray* b, const DLArray* bias,
              const DLArray* scale, int64_t trans_a, int64_t trans_b, int64_t choice,
              int64_t precision, int64_t activation, DLArray* y, DLStream stream) {
  if (trans_a) Fail("%s: bytes are multiplied as they lie, not transposed", op);
  Product product = CheckedProduct(op, a, trans_a, b, trans_b, y, Bytes::kA, scale);
  product.precision = CheckedPrecision(op, precision);
  if (bias) TakeBias(op, bias, y, &product);
  product.epilogue.activation = CheckedMap(op, activation, 0, kActivations);
  const Widened widened(op, &product, stream);
  Multiply(op, product, stream, choice);
}

void MatmulBytes(const DLArray* a, const DLArray* b, const DLArray* scale, int64_t trans_a,
                 int64_t trans_b, int64_t choice, int64_t precision, int64_t activation, DLArray* y,
                 DLStream stream) {
  Multiply("matmul_u8", a, b, nullptr, scale, trans_a, trans_b, choice, precision, activation, y,
           stream);
}

void MatmulBytesBias(const DLArray* a, const DLArray* b, const DLArray* bias, const DLArray* scale,
                     int64_t trans_a, int64_t trans_b, int64_t choice, int64_t precision,
                     int64_t activation, DLArray* y, DLStream stream) {
  Multiply("matmul_u8_bias", a, b, bias, scale, trans_a, trans_b, choice, precision, activation, y,
           stream);
}

DLSYS_KERNEL(cuda, matmul_u8, MatmulBytes);
DLSYS_KERNEL(cuda, matmul_u8_bias, MatmulBytesBias);
DLSYS_ALGORITHMS(cuda, matmul_u8, GemmAlgorithms);
DLSYS_ALGORITHMS(cuda, matmul_u8_bias, GemmAlgorithms);

}  // namespace

Widened::Widened(const char* op, Product* product, DLStream stream) {
  const bool tensor = product->precision == Precision::kTf32;
  if (product->bytes == Bytes::kNone || (tensor && ComputeMajor(product->ctx.device_id) >= 8))
    return;
  const bool of_a = product->bytes == Bytes::kA;
  const float*& factor = of_a ? product->a : product->b;
  const int64_t numel = (of_a ? product->m : product->n) * product->k;
  floats_ = std::make_unique<Scratch>(product->ctx, numel * (int64_t)sizeof(float), stream);
  Launch(op, WidenKernel, Blocks(numel), kThreads, 0, stream, (const uint8_t*)factor,
         product->scale, floats_->floats(), numel);
  factor = floats_->floats();
  product->bytes = Bytes::kNone;
}

void LaunchBytes(const char* op, int tiling, const Problem& problem, DLStream stream) {
  WithTiling<BytesTilings>(tiling, [&](auto of) {
    LaunchTiles<typename decltype(of)::type, BytesIn<Bytes::kA>::Accumulator, true>(op, problem,
                                                                                    stream);
  });
}

}  // namespace cuda
}  // namespace dlsys
