// The innermost part of the matrix product: a tile of C, kept in registers while it walks along k.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {

// rows x cols of C from k steps of A and B: row p of A holds the tile's column p, row p of B a row
// of its columns.
struct TileArgs {
  int64_t k;
  const float*
      a;  // (k, rows of the kernel), packed; the strided kernel reads a[row * a_row + p * a_step]
  int64_t a_row, a_step;
  const float* b;  // (k, columns of the kernel), rows b_stride apart
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  int64_t rows, cols;  // what of the tile lies within C
  bool add;            // adds to C instead of setting it
};
using TileFunction = void (*)(const TileArgs&);

// The tile kernels of one kind of processor, for every size of `row_sizes`: with one and with two
// vectors of columns from a packed A, and with one vector of columns from A as it lies, which pays
// where A is used only once.
struct TileKernels {
  static constexpr int kRowSizes = 5;
  int width;  // floats in a vector
  int row_sizes[kRowSizes];
  TileFunction packed[kRowSizes][2];
  TileFunction strided[kRowSizes];

  int MostRows() const { return row_sizes[kRowSizes - 1]; }
  int MostCols() const { return 2 * width; }
};

// The kernels for this processor.
const TileKernels& CurrentTileKernels();

}  // namespace cpu
}  // namespace dlsys
