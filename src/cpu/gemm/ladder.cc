// The ladder of the matrix product on the CPU: its rungs by name, what is said where one cannot
// serve, and the kernel `matmul`. Matrices are row-major and contiguous, stored transposed where
// told so; C overlaps neither. Without a name the rung `threads` runs. gemm.h lists the rungs; each
// file names what limits it.
#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/widened.h"

namespace dlsys {
namespace cpu {
namespace {

const GemmRung* const kRungs[] = {&kNaive, &kBlocked, &kSimd, &kThreads, &kBlas};  // slowest first

const GemmRung& RungOf(const char* op, int64_t algorithm) {
  const int64_t count = (int64_t)GemmAlgorithms().size();
  if (algorithm < 0 || algorithm > count)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm, (long)count);
  return algorithm ? *kRungs[algorithm - 1] : kThreads;
}

void CheckServes(const char* op, const GemmRung& rung) {
  const char* why = rung.refusal ? rung.refusal() : nullptr;
  if (!why) return;
  std::string others = "auto";
  for (const GemmRung* other : kRungs)
    if (other != &rung) others += std::string(", ") + other->name;
  FailWith(DL_NOT_APPLICABLE, "%s: algo=%s cannot compute this: %s; use %s", op, rung.name, why,
           others.c_str());
}

Matrix Operand(const float* data, const DLArray* stored, bool transposed) {
  const int64_t cols = stored->shape[1];
  return transposed ? Matrix{data, 1, cols} : Matrix{data, cols, 1};
}

void CheckShapes(const char* op, const DLArray* a, bool trans_a, const DLArray* b, bool trans_b,
                 const DLArray* c) {
  const bool matrices = a->ndim == 2 && b->ndim == 2 && c->ndim == 2;
  if (matrices && a->shape[!trans_a] == b->shape[trans_b] && c->shape[0] == a->shape[trans_a] &&
      c->shape[1] == b->shape[!trans_b])
    return;
  Fail("%s: %s%s @ %s%s does not give %s", op, ShapeText(a).c_str(), trans_a ? ".T" : "",
       ShapeText(b).c_str(), trans_b ? ".T" : "", ShapeText(c).c_str());
}

// float32 at every precision.
void MatMul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b, int64_t algorithm,
            [[maybe_unused]] int64_t precision, DLArray* c) {
  RunGemm("matmul", CheckedGemm("matmul", a, trans_a, b, trans_b, c), algorithm);
}

DLSYS_KERNEL(cpu, matmul, MatMul);
DLSYS_KERNEL_WIDENED(cpu, matmul, MatMul);
DLSYS_ALGORITHMS(cpu, matmul, GemmAlgorithms);

}  // namespace

Gemm CheckedGemm(const char* op, const DLArray* a, int64_t trans_a, const DLArray* b,
                 int64_t trans_b, DLArray* c) {
  const float* left = Input(op, a);
  const float* right = Input(op, b);
  float* out = Output(op, c);
  CheckShapes(op, a, trans_a != 0, b, trans_b != 0, c);
  return Gemm{c->shape[0],
              c->shape[1],
              a->shape[!trans_a],
              Operand(left, a, trans_a != 0),
              Operand(right, b, trans_b != 0),
              out};
}

const std::vector<Algorithm>& GemmAlgorithms() {
  static const auto* const algorithms = [] {
    auto* made = new std::vector<Algorithm>;
    for (const GemmRung* rung : kRungs) made->push_back({rung->name, rung->source});
    return made;
  }();
  return *algorithms;
}

void RunGemm(const char* op, const Gemm& p, int64_t algorithm) {
  const GemmRung& rung = RungOf(op, algorithm);
  CheckServes(op, rung);
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) return Serially([&] { std::fill(p.c, p.c + (p.add ? 0 : p.m * p.n), 0.f); });
  rung.run(p);
}

}  // namespace cpu
}  // namespace dlsys
