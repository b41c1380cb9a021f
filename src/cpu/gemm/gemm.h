// GEMM on the CPU, for operators that end in one.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/runtime/common.h"

namespace dlsys {
namespace cpu {

// op(A) or op(B): element (i, j) is at i * row + j * col.
struct Matrix {
  const float* data;
  int64_t row, col;
};

struct Gemm {
  int64_t m, n, k;
  Matrix a, b;  // (m, k) and (k, n); one stride of each is 1
  float* c;     // (m, n), contiguous
};

// Checks arrays and describes their GEMM, each operand transposed where told to. Fails when shapes
// or dtypes do not fit.
Gemm CheckedGemm(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                 int64_t trans_b, DLArray* c);

// C = A B by an algorithm of GemmAlgorithms, counted from 1, or by the heuristic, 0. The result is
// the same bits for any number of threads. Called from within a task it stays on its thread.
void RunGemm(const char* op, const Gemm& p, int64_t algorithm);
inline void RunGemm(const Gemm& p) { RunGemm("matmul", p, 0); }
const std::vector<Algorithm>& GemmAlgorithms();

}  // namespace cpu
}  // namespace dlsys
