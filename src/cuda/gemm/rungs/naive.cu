// The rung `naive`: GEMM in true float32, one thread for each element of C, which reads a row of
// op(A) and a column of op(B) from global memory and sums in the order of k. Every element of A is
// read n times and every element of B m times: limited by the loads that the L1 cache serves, two
// for each multiply-add.
#include "cuda/gemm/epilogue.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

__global__ void NaiveGemmKernel(const Gemm gemm) {
  const Operand a = OperandA(gemm), b = OperandB(gemm);
  for (int64_t at = FirstItem(); at < gemm.m * gemm.n; at += ItemStep()) {
    const int64_t row = at / gemm.n, col = at - row * gemm.n;
    const float* x = a.data + row * a.of_mn;
    const float* y = b.data + col * b.of_mn;
    float sum = 0.f;
    for (int64_t k = 0; k < gemm.k; k++) sum = fmaf(x[k * a.of_k], y[k * b.of_k], sum);
    WriteElement(gemm, row, col, sum);
  }
}

void Run(const char* op, const Gemm& p, int, DLStream stream) {
  Launch(op, NaiveGemmKernel, Blocks(p.m * p.n), kThreads, 0, stream, p);
  if (p.sums) RunOperandSums(op, p, stream);
}

}  // namespace

const GemmRung kNaive = {"naive", nullptr, nullptr, RefusalOfU8, nullptr, Run};

}  // namespace cuda
}  // namespace dlsys
