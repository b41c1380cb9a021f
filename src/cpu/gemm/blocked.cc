// The rung `blocked`: GEMM over blocks that fit the caches, on one thread, in plain C++. A block of
// B (kBlockK x kBlockN) is copied to contiguous memory and stays in the L2 cache while all rows of
// A pass by; kRows rows of a block of A are copied too and stay in the L1 cache with kRows rows of
// C. The inner loop adds a multiple of a row of B to kRows rows of C, which the compiler turns into
// the vectors that every processor of its kind has. Limited by loads and stores of C: one of each
// for every multiply-add.
#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kBlockK = 128, kBlockN = 512;  // 256 KiB of B
const int64_t kRows = 4;

// to (rows, cols) = from, contiguous.
void Copy(const Matrix& from, int64_t rows, int64_t cols, float* to) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) to[i * cols + j] = from.data[i * from.row + j * from.col];
}

Matrix From(const Matrix& x, int64_t i, int64_t j) {
  return {x.data + i * x.row + j * x.col, x.row, x.col};
}

// C (kRows, n), rows c_row apart, += A (kRows, k) B (k, n), both contiguous.
void AddRows(const float* __restrict a, const float* __restrict b, int64_t k, int64_t n,
             float* __restrict c, int64_t c_row) {
  float *c0 = c, *c1 = c + c_row, *c2 = c1 + c_row, *c3 = c2 + c_row;
  for (int64_t p = 0; p < k; p++) {
    const float a0 = a[p], a1 = a[k + p], a2 = a[2 * k + p], a3 = a[3 * k + p];
    const float* row = b + p * n;
    DLSYS_IVDEP
    for (int64_t j = 0; j < n; j++) {
      c0[j] += a0 * row[j];
      c1[j] += a1 * row[j];
      c2[j] += a2 * row[j];
      c3[j] += a3 * row[j];
    }
  }
}

// The product of one row, added to c.
void AddRow(const float* __restrict a, const float* __restrict b, int64_t k, int64_t n,
            float* __restrict c) {
  for (int64_t p = 0; p < k; p++)
    for (int64_t j = 0; j < n; j++) c[j] += a[p] * b[p * n + j];
}

void Run(const Gemm& p) {
  const ScratchArray<float> block_b(kBlockK * kBlockN);
  Serially([&] {
    float block_a[kRows * kBlockK];
    if (!p.add) std::fill(p.c, p.c + p.m * p.n, 0.f);
    for (int64_t k0 = 0; k0 < p.k; k0 += kBlockK)
      for (int64_t n0 = 0; n0 < p.n; n0 += kBlockN) {
        const int64_t k = std::min(kBlockK, p.k - k0), n = std::min(kBlockN, p.n - n0);
        Copy(From(p.b, k0, n0), k, n, block_b.data());
        for (int64_t i = 0; i < p.m; i += kRows) {
          const int64_t rows = std::min(kRows, p.m - i);
          float* c = p.c + i * p.n + n0;
          Copy(From(p.a, i, k0), rows, k, block_a);
          if (rows == kRows)
            AddRows(block_a, block_b.data(), k, n, c, p.n);
          else
            for (int64_t r = 0; r < rows; r++)
              AddRow(block_a + r * k, block_b.data(), k, n, c + r * p.n);
        }
      }
  });
}

}  // namespace

const GemmRung kBlocked = {"blocked", Run};

}  // namespace cpu
}  // namespace dlsys
