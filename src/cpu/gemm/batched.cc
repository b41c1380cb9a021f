// Batched GEMM; leading axes broadcast against each other. Small GEMMs are split over threads one
// each, large ones run one after another on all threads. C overlaps neither A nor B. Arithmetic
// limits large GEMMs, memory bandwidth small ones.
#include "cpu/gemm/gemm.h"
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/widened.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kTaskMacs = 131072;              // multiply-adds worth a task
const int64_t kSharedMacs = int64_t{1} << 21;  // of one GEMM: worth all threads

// Extent of op(A) along the last two axes.
int64_t Extent(const DLArray* a, bool transposed, int axis) {
  return a->shape[a->ndim - 2 + (transposed ? 1 - axis : axis)];
}

bool BatchBroadcasts(const DLArray* a, const DLArray* c) {
  const int lead = c->ndim - a->ndim;
  if (lead < 0) return false;
  for (int k = 0; k < a->ndim - 2; k++)
    if (a->shape[k] != 1 && a->shape[k] != c->shape[lead + k]) return false;
  return true;
}

void CheckShapes(const DLArray* a, bool trans_a, const DLArray* b, bool trans_b, const DLArray* c) {
  const bool matrices = a->ndim >= 2 && b->ndim >= 2 && c->ndim >= 2;
  if (matrices && BatchBroadcasts(a, c) && BatchBroadcasts(b, c) &&
      Extent(a, trans_a, 1) == Extent(b, trans_b, 0) &&
      Extent(c, false, 0) == Extent(a, trans_a, 0) && Extent(c, false, 1) == Extent(b, trans_b, 1))
    return;
  Fail("batched_matmul: %s%s @ %s%s does not give %s", ShapeText(a).c_str(), trans_a ? ".T" : "",
       ShapeText(b).c_str(), trans_b ? ".T" : "", ShapeText(c).c_str());
}

Matrix Operand(const float* data, const DLArray* stored, bool transposed) {
  const int64_t cols = stored->shape[stored->ndim - 1];
  return transposed ? Matrix{data, 1, cols} : Matrix{data, cols, 1};
}

void BatchedMatMul(const DLArray* a, int64_t trans_a, const DLArray* b, int64_t trans_b,
                   int64_t algorithm, [[maybe_unused]] int64_t precision, DLArray* c) {
  const float* left = Input("batched_matmul", a);
  const float* right = Input("batched_matmul", b);
  float* out = Output("batched_matmul", c);
  CheckShapes(a, trans_a != 0, b, trans_b != 0, c);
  if (Numel(c) == 0) return;
  Loop<2> batch;
  for (int axis = 0; axis < c->ndim - 2; axis++)
    batch.Add(c->shape[axis],
              {BroadcastStride(a, c->ndim, axis), BroadcastStride(b, c->ndim, axis)});
  Gemm first{Extent(c, false, 0),
             Extent(c, false, 1),
             Extent(a, trans_a != 0, 1),
             Operand(left, a, trans_a != 0),
             Operand(right, b, trans_b != 0),
             out};
  const int64_t macs = first.m * first.n * std::max<int64_t>(first.k, 1);
  auto run = [&](int64_t begin, int64_t end) {
    Cursor<2> at(batch, begin);
    for (int64_t k = begin; k < end; k++, at.Next()) {
      Gemm p = first;
      p.a.data += at.offset[0];
      p.b.data += at.offset[1];
      p.c += k * p.m * p.n;
      RunGemm("batched_matmul", p, algorithm);
    }
  };
  if (macs >= kSharedMacs) return run(0, batch.Count());
  const int64_t grain = std::max<int64_t>(1, kTaskMacs / macs);
  const int64_t nbytes = ScratchNbytes([&] { RunGemm("batched_matmul", first, algorithm); });
  const auto make = [=] { return ScratchArray<char>(nbytes); };
  auto task = [&](int64_t begin, int64_t end, const ScratchArray<char>& scratch) {
    const Workspace::Planned of_gemm(scratch.data(), nbytes);
    run(begin, end);
  };
  ParallelForWithScratch(batch.Count(), grain, make, task);
}

DLSYS_KERNEL(cpu, batched_matmul, BatchedMatMul);
DLSYS_KERNEL_WIDENED(cpu, batched_matmul, BatchedMatMul);
DLSYS_ALGORITHMS(cpu, batched_matmul, GemmAlgorithms);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
