// What the kernels of src/cuda/boxes/ share: the grid over columns, which are the classes of the
// images, and what the columns select, each at places of its own. When all are done, pack.cu moves
// it together.
#pragma once
#include "cuda/runtime/launch.cuh"
#include "math/boxes.h"

namespace dlsys {
namespace cuda {

constexpr int kBoxThreads = 512;  // of a block, which computes a column at a time

// As many blocks as the GPU can run at once: each has scratch of its own.
inline unsigned ColumnBlocks(int64_t columns, int device) {
  const int64_t at_once = (int64_t)Multiprocessors(device) * (2048 / kBoxThreads);
  return (unsigned)(columns < at_once ? columns : at_once);
}

// The boxes that each column selected, at first `most` places for each.
struct Selected {
  int* picks;     // (columns, most)
  float* scores;  // (columns, most), or null
  int* counts;    // (columns,)
};

// Rows (image, class, box) of all columns in their order, then -1, and scores, then 0; queued by
// pack.cu.
void PackSelected(const char* op, const nms::Extents& of, const Selected& selected,
                  DLArray* indices, DLArray* scores, DLArray* count, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
