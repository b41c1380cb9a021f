// What attention's kernels on the CPU share: a block of scores, transposed (keys, queries), so that
// a vector holds the same key's scores of neighboring queries and the softmax needs no sums within
// vectors; and products of blocks by the micro-kernels of gemm/tile.h. Matrices are read where they
// are, or from copies whose rows are padded to full vectors.
#pragma once
#include <algorithm>

#include "cpu/gemm/tile.h"
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "math/float_math.h"
#include "operators/attention.h"

namespace dlsys {
namespace cpu {
namespace attention {

constexpr int64_t kRows = 128, kColumns = 128;  // queries and keys of a block
constexpr int64_t kPad = kMaxTileN / 2;         // the widest vector

// Rows of floats, `pitch` apart. What stands between a row's end and the next multiple of kPad may
// be read.
struct Rows {
  const float* data;
  int64_t pitch;
};

// The rows of a block of a matrix of T, `stride` elements apart: in place where they are floats of
// full vectors, else copied to scratch of kRows rows.
template <class T>
DLSYS_INLINE Rows RowsOf(const T* from, int64_t count, int64_t size, int64_t stride,
                         float* scratch) {
  if constexpr (!kIs16Bit<T>)
    if (size % kPad == 0) return {from, stride};
  const int64_t pitch = RoundUp(size, kPad);
  for (int64_t i = 0; i < count; i++) {
    for (int64_t j = 0; j < size; j++) scratch[i * pitch + j] = (float)from[i * stride + j];
    for (int64_t j = size; j < pitch; j++) scratch[i * pitch + j] = 0.f;
  }
  return {scratch, pitch};
}

// The floats of scratch that RowsOf takes for a block.
inline int64_t BlockNumel(int64_t size) { return std::max(kRows, kColumns) * RoundUp(size, kPad); }

// op(A) (m, k): element (i, p) at i * row + p * step.
struct Left {
  const float* data;
  int64_t row, step;
};

// B (k, n) in panels of the micro-kernel's columns, `panel` apart, whose rows are `row` apart.
struct Right {
  const float* data;
  int64_t row, panel;

  static Right InPlace(const Rows& rows) {
    return {rows.data, rows.pitch, CurrentTileKernels().MaxTileN()};
  }
  // The transpose of `count` rows of `size` floats, packed into scratch of PackedNumel(size).
  static Right Transposed(const Rows& rows, int64_t count, int64_t size, float* scratch) {
    const TileKernels& kernels = CurrentTileKernels();
    const int64_t width = kernels.MaxTileN();
    for (int64_t i = 0; i < count; i += width)
      kernels.pack_b(rows.data + i * rows.pitch, std::min(width, count - i), rows.pitch, 1, size,
                     scratch + i * size);
    return {scratch, width, width * size};
  }
  static int64_t PackedNumel(int64_t size) { return RoundUp(kRows, kMaxTileN) * size + kPackSlack; }
};

// C (m, n) = A B, or C += A B.
inline void Multiply(int64_t m, int64_t n, int64_t k, Left a, Right b, float* c, int64_t c_stride,
                     bool add) {
  const TileKernels& kernels = CurrentTileKernels();
  const int64_t width = kernels.MaxTileN();
  for (int64_t col = 0; col < n; col += width) {
    TileArgs t{};
    t.k = k, t.a_row = a.row, t.a_step = a.step, t.b_stride = b.row, t.c_stride = c_stride;
    t.b = b.data + col / width * b.panel;
    t.cols = std::min(width, n - col), t.add = add;
    const bool wide = t.cols > kernels.width;
    int size = TileKernels::kTileSizes - 1;
    for (int64_t row = 0; row < m; row += t.rows) {
      while (kernels.tile_rows[size] > m - row) size--;
      t.rows = kernels.tile_rows[size];
      t.a = a.data + row * a.row, t.c = c + row * c_stride + col;
      kernels.strided[size][wide](t);
    }
  }
}

// A block of rows [row, row_end) and columns [column, column_end) of a head of a sample.
struct Block {
  int64_t n, h, row, row_end, column, column_end;

  int64_t RowCount() const { return row_end - row; }
  int64_t ColumnCount() const { return column_end - column; }
};

// Scores (columns, kRows) from products: scaled, with the mask added, -inf where a key is hidden.
DLSYS_INLINE void FinishScores(const Attention& p, const Block& b, float* scores) {
  const int64_t count = b.RowCount();
  for (int64_t s = b.column; s < b.column_end; s++) {
    float* score = scores + (s - b.column) * kRows;
    for (int64_t i = 0; i < count; i++) score[i] *= p.scale;
    if (p.mask.data)
      for (int64_t i = 0; i < count; i++) score[i] += p.mask.At(b.n, b.h, b.row + i, s);
    if (p.causal)
      for (int64_t i = 0; i < std::min(count, s - b.row); i++) score[i] = -INFINITY;
  }
}

// Calls apply(i, s, factor) for each row i and column s of the block, where weights are dropped.
template <class Apply>
DLSYS_INLINE void ForFactors(const Attention& p, const Block& b, const Apply& apply) {
  if (!p.step) return;
  const philox::Stream draw = p.Draw();
  for (int64_t i = 0; i < b.RowCount(); i++) {
    const uint64_t first = p.Element(b.n, b.h, b.row + i) + (uint64_t)b.column;
    const int64_t count = b.ColumnCount();
    for (int64_t s = 0; s < count;) {
      const uint64_t element = first + (uint64_t)s;
      const philox::Words words = draw.At(element / 4);
      for (uint64_t w = element % 4; w < 4 && s < count; w++, s++)
        apply(i, s, p.Factor(words.word[w]));
    }
  }
}

// The ladder's rungs that are kernels here; the rung `naive` is a composition of operators.
inline const std::vector<Algorithm>& AttentionAlgorithms() {
  static const auto* const algorithms = new std::vector<Algorithm>{{"tiled"}};
  return *algorithms;
}

inline void CheckAlgorithm(const char* op, int64_t algorithm) {
  const int64_t count = (int64_t)AttentionAlgorithms().size();
  if (algorithm < 0 || algorithm > count)
    Fail("%s: there is no algorithm %ld, expected 0 to %ld", op, (long)algorithm, (long)count);
}

}  // namespace attention
}  // namespace cpu
}  // namespace dlsys
