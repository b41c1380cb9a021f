// The GEMM micro-kernel: a tile of C in SIMD registers, accumulated over k by outer products of a
// column of A and a row of B (the scheme of Goto and van de Geijn). A comes packed in panels or
// strided, B packed; rows of C are contiguous, and C overlaps neither. tile.cc has the code for
// each instruction set and what limits it, packed.cc the blocks around it.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/runtime/simd.h"
#include "math/int_math.h"

namespace dlsys {
namespace cpu {

// A tile of C over k steps: row p of A holds column p of the tile, row p of B a row of its columns.
struct TileArgs {
  int64_t k;
  // (k, tile rows) packed; strided: a[row * a_row + p * a_step].
  const float* a;
  int64_t a_row, a_step;
  const float* b;  // (k, columns of the kernel), rows b_stride apart
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  int64_t rows, cols;  // of the tile, within C
  bool add;            // adds to C instead of setting it
};
using TileFunction = void (*)(const TileArgs&);

// Packs `to` (k, width) from `lines` rows of k values, `line` apart, elements `step` apart, one of
// which is 1; the rest of a row is arbitrary. `to` has room for kPackSlack more floats, which it
// may write.
using PackFunction = void (*)(const float* from, int64_t lines, int64_t line, int64_t step,
                              int64_t k, float* to);
inline constexpr int64_t kPackSlack = 16;

// The micro-kernels of one instruction set, for every height of `tile_rows`: one or two vectors
// wide, from a packed A and from A where it is, which pays where a panel of A is used few times.
struct TileKernels {
  static constexpr int kTileSizes = 5;
  int width;  // floats in a vector
  int tile_rows[kTileSizes];
  TileFunction packed[kTileSizes][2];
  TileFunction strided[kTileSizes][2];
  PackFunction pack_a[kTileSizes];  // panels of as many rows
  PackFunction pack_b;              // panels of MaxTileN() columns
  TileFunction row;                 // one row by kRowVectors vectors, from A and B where they are
  static constexpr int kRowVectors = 8;

  int MaxTileM() const { return tile_rows[kTileSizes - 1]; }
  int MaxTileN() const { return 2 * width; }
};

// The largest tile of any processor.
inline constexpr int64_t kMaxTileM = 12, kMaxTileN = 32;

// The size of the fewest equal blocks, none above `max_size`, rounded up to `unit`.
inline int64_t EvenBlock(int64_t n, int64_t max_size, int64_t unit) {
  return RoundUp(CeilDiv(n, CeilDiv(n, max_size)), unit);
}

// The kernels for this processor.
const TileKernels& CurrentTileKernels();

}  // namespace cpu
}  // namespace dlsys
