// What the kernels of src/cpu/boxes/ share: their outputs. A column is a class of an image. Threads
// write the boxes that their columns select, each at a place of its own; when all are done, the
// rows move together.
#pragma once
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "math/boxes.h"

namespace dlsys {
namespace cpu {

// Calls body(k) for each of n scores that is a candidate, in order. Most are none: scores are
// looked at in blocks.
template <class F>
void ForCandidates(const float* scores, int64_t n, const nms::Options& options, const F& body) {
  constexpr int64_t kBlock = 64;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    int any = 0;
    for (int64_t k = begin; k < end; k++) any |= options.Takes(scores[k]);
    for (int64_t k = begin; any && k < end; k++)
      if (options.Takes(scores[k])) body(k);
  }
}

// Rows (image, class, box) of selected boxes, each column's at first from its row column · most on.
struct Selected {
  nms::Extents of;
  int64_t *rows, *total;
  float* scores;    // of each row, or null
  int64_t* counts;  // of each column: scratch

  // Takes a column's next box.
  void Add(int64_t column, int64_t box, float score = 0.f) const {
    const int64_t at = column * of.most + counts[column]++;
    int64_t* row = rows + 3 * at;
    row[0] = column / of.classes, row[1] = column % of.classes, row[2] = box;
    if (scores) scores[at] = score;
  }

  // Moves the rows together, in the order of the columns; what is left over becomes -1, scores 0.
  void Pack() const {
    int64_t to = 0;
    for (int64_t column = 0; column < of.Columns(); column++) {
      const int64_t from = column * of.most, count = counts[column];
      std::copy_n(rows + 3 * from, 3 * count, rows + 3 * to);
      if (scores) std::copy_n(scores + from, count, scores + to);
      to += count;
    }
    const int64_t left = of.Columns() * of.most - to;
    std::fill_n(rows + 3 * to, 3 * left, int64_t{-1});
    if (scores) std::fill_n(scores + to, left, 0.f);
    *total = to;
  }
};

}  // namespace cpu
}  // namespace dlsys
