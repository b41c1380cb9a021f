// ForPieces: the loop of elementwise kernels over several arrays that broadcast, by numpy's rule.
// Axes that all operands cross alike are merged (strides.h), and threads take pieces of the
// innermost one, each at most kGrain elements, so that a functor runs over them with fixed strides.
// Operands and output are contiguous; `run` decides whether they may be one buffer. Memory
// bandwidth limits such kernels.
#pragma once
#include "cpu/pointwise/strides.h"
#include "cpu/runtime/parallel.h"

namespace dlsys {
namespace cpu {

// Calls run(offsets, strides, at, n) for pieces of `out`, n elements from `at` on. Operand k starts
// at offsets[k] and has stride strides[k].
template <int K, class F>
void ForPieces(const char* op, const DLArray* const (&operands)[K], const DLArray* out,
               const F& run) {
  Loop<K> rows;
  for (const DLArray* a : operands)
    if (!BroadcastsTo(a, out))
      Fail("%s: shape %s does not broadcast to %s", op, ShapeText(a).c_str(),
           ShapeText(out).c_str());
  if (Numel(out) == 0) return;
  for (int axis = 0; axis < out->ndim; axis++) {
    int64_t strides[K];
    for (int k = 0; k < K; k++) strides[k] = BroadcastStride(operands[k], out->ndim, axis);
    rows.Add(out->shape[axis], strides);
  }
  int64_t strides[K];
  const int64_t cols = rows.PopInner(strides);
  const int64_t piece = std::min(cols, kGrain);  // long rows are cut into pieces
  const int64_t pieces = (cols - 1) / piece + 1;
  ParallelFor(rows.Count() * pieces, RowGrain(piece), [&](int64_t begin, int64_t end) {
    Cursor<K> row(rows, begin / pieces);
    for (int64_t p = begin; p < end; p++) {
      const int64_t at = p % pieces * piece;
      int64_t offsets[K];
      for (int k = 0; k < K; k++) offsets[k] = row.offset[k] + at * strides[k];
      run(offsets, strides, p / pieces * cols + at, std::min(piece, cols - at));
      if (at + piece >= cols) row.Next();
    }
  });
}

}  // namespace cpu
}  // namespace dlsys
