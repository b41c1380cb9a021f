// GEMM of C with at most 16 rows or columns (slim.cu), for the rung `warp`.
#pragma once
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

constexpr KernelFamily kSlimFamily = (KernelFamily)((int)KernelFamily::kFfma + 1);

// Of C's rows from `first_row` on, which are at most 16 where that is not 0; operand sums are made
// with all rows alone. True where the operand along the larger extent of C lies along it in whole
// quads.
bool SlimFits(const Gemm& gemm, int64_t first_row = 0);
double SlimUs(const Gemm& gemm, int64_t first_row = 0);  // estimated; infinite where it does not fit
void RunSlim(const char* op, const Gemm& gemm, DLStream stream, int64_t first_row = 0);

}  // namespace cuda
}  // namespace dlsys
