// GEMM on the CPU, for operators that end in one, and the contract of its rungs. In the order of
// reading: naive.cc, blocked.cc, tile.h and tile.cc, pack.h, packed.cc (simd and threads), blas.cc,
// ladder.cc.
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
  Matrix a, b;       // (m, k) and (k, n); one stride of each is 1
  float* c;          // (m, n), contiguous
  bool add = false;  // adds to C instead of setting it
};

// Checks arrays and describes their GEMM, each operand transposed where told to. Fails when shapes
// or dtypes do not fit.
Gemm CheckedGemm(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                 int64_t trans_b, DLArray* c);

// C = A B, or C += A B, by an algorithm of GemmAlgorithms, counted from 1, or by the heuristic, 0.
// The result is the same bits for any number of threads. Called from within a task it stays on its
// thread.
void RunGemm(const char* op, const Gemm& p, int64_t algorithm);
inline void RunGemm(const Gemm& p) { RunGemm("matmul", p, 0); }
const std::vector<Algorithm>& GemmAlgorithms();

// A rung of the ladder. `run` gets no empty GEMM; `refusal` says why the rung cannot serve on this
// machine, null where it can, and is null itself where it always can; `source` as in Algorithm.
struct GemmRung {
  const char* name;
  void (*run)(const Gemm& p);
  const char* (*refusal)() = nullptr;
  const char* (*source)() = nullptr;
};
extern const GemmRung kNaive, kBlocked, kSimd, kThreads, kBlas;

}  // namespace cpu
}  // namespace dlsys
