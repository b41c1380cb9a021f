// The rung `naive`: GEMM as its definition reads, an element of C after the other, on one thread.
// Each multiply-add waits for the one before it, and B is read along a column: where a row of B is
// longer than a cache line, every read brings in a line of which one element is used. Limited by
// the latency of an addition while B is in the cache, then by the latency of memory.
#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {
namespace {

float Element(const Gemm& p, int64_t i, int64_t j) {
  float sum = 0.f;
  for (int64_t k = 0; k < p.k; k++)
    sum += p.a.data[i * p.a.row + k * p.a.col] * p.b.data[k * p.b.row + j * p.b.col];
  return sum;
}

void Run(const Gemm& p) {
  Serially([&] {
    for (int64_t i = 0; i < p.m; i++)
      for (int64_t j = 0; j < p.n; j++) {
        float& c = p.c[i * p.n + j];
        c = p.add ? c + Element(p, i, j) : Element(p, i, j);
      }
  });
}

}  // namespace

const GemmRung kNaive = {"naive", Run};

}  // namespace cpu
}  // namespace dlsys
