// What the kernels of src/cpu/boxes/ share: their outputs.
#pragma once
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "math/boxes.h"

namespace dlsys {
namespace cpu {

// Rows (image, class, box) of selected boxes, each column's at first from its row column · most on.
struct Selected {
  boxes::Extents of;
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
