// Products by groups of rows, on both devices: their shapes, and the walk over the groups, whose
// sizes are values on the device. A size that is negative or more than the rows that are left
// counts as the nearest one that fits, so that nobody reads or writes outside of an array.
#pragma once
#include "math/int_math.h"
#include "operators/indexing.h"

namespace dlsys {

// grouped_matmul: C (rows, n) = A (rows, k) B[g], B (groups, k, n) or, trans_b, (groups, n, k), by
// the group g of each row. grouped_contraction: C[g] (k, n) = Aᵀ B over the rows of each group, A
// (rows, k) and B (rows, n).
struct GroupedShape {
  int64_t rows, groups, k, n;
  bool contracts, trans_b;
};

inline GroupedShape GroupedMatmulShape(const char* op, const DLArray* a, const DLArray* b,
                                       const DLArray* sizes, bool trans_b, const DLArray* c) {
  const bool fits = a->ndim == 2 && b->ndim == 3 && sizes->ndim == 1 && c->ndim == 2 &&
                    b->shape[0] == sizes->shape[0] && c->shape[0] == a->shape[0] &&
                    b->shape[trans_b ? 2 : 1] == a->shape[1] &&
                    b->shape[trans_b ? 1 : 2] == c->shape[1];
  if (!fits)
    Fail("%s: shapes do not fit: %s and %s%s by %s groups into %s", op, ShapeText(a).c_str(),
         ShapeText(b).c_str(), trans_b ? " transposed" : "", ShapeText(sizes).c_str(),
         ShapeText(c).c_str());
  return {a->shape[0], b->shape[0], a->shape[1], c->shape[1], false, trans_b};
}

inline GroupedShape GroupedContractionShape(const char* op, const DLArray* a, const DLArray* b,
                                            const DLArray* sizes, const DLArray* c) {
  const bool fits = a->ndim == 2 && b->ndim == 2 && sizes->ndim == 1 && c->ndim == 3 &&
                    a->shape[0] == b->shape[0] && c->shape[0] == sizes->shape[0] &&
                    c->shape[1] == a->shape[1] && c->shape[2] == b->shape[1];
  if (!fits)
    Fail("%s: shapes do not fit: %s and %s by %s groups into %s", op, ShapeText(a).c_str(),
         ShapeText(b).c_str(), ShapeText(sizes).c_str(), ShapeText(c).c_str());
  return {a->shape[0], c->shape[0], c->shape[1], c->shape[2], true, false};
}

// Calls report(size, group, most) for each size that is not from 0 to `most`, the rows that are
// left.
template <class F>
DLSYS_HD void CheckGroupSizes(const Indices& sizes, const GroupedShape& shape, F&& report) {
  int64_t left = shape.rows;
  for (int64_t group = 0; group < shape.groups; group++) {
    const int64_t size = sizes[group];
    if (size < 0 || size > left) report(size, group, left);
    left -= size < 0 ? 0 : size < left ? size : left;
  }
}

// The tiles of C, group after group, which whoever computes some of them visits in ascending order.
// Those of a group go down the rows of a band, then to the next column, so that tiles that are
// computed together share operands in the cache. Of grouped_matmul the rows behind all groups are
// one more, of no product.
class GroupTiles {
 public:
  DLSYS_HD GroupTiles(const Indices& sizes, const GroupedShape& shape, int tile_rows, int tile_cols)
      : sizes_(sizes),
        shape_(shape),
        tile_rows_(tile_rows),
        cols_((int)CeilDiv(shape.n, tile_cols)) {
    Enter();
  }

  // The most row tiles that there are, whatever the sizes.
  static DLSYS_HD int64_t MostRowTiles(const GroupedShape& shape, int tile_rows) {
    return shape.contracts ? shape.groups * CeilDiv(shape.k, tile_rows)
                           : shape.rows / tile_rows + shape.groups + 1;
  }

  // Goes to a tile, counted over all groups; false where there is none.
  DLSYS_HD bool GoTo(int64_t tile) {
    while (tile - first_ >= (int64_t)row_tiles_ * cols_) {
      if (IsRest() || (shape_.contracts && group_ + 1 >= shape_.groups)) return false;
      first_ += (int64_t)row_tiles_ * cols_;
      group_++, begin_ = end_;
      Enter();
    }
    const int at = (int)(tile - first_), band = at / (kBand * cols_);
    const int in_band = at - band * kBand * cols_;
    const int height = row_tiles_ - band * kBand < kBand ? row_tiles_ - band * kBand : kBand;
    col_ = in_band / height, row_ = band * kBand + in_band - col_ * height;
    return true;
  }

  DLSYS_HD bool IsRest() const { return group_ == shape_.groups; }
  DLSYS_HD int64_t group() const { return group_; }
  DLSYS_HD int64_t begin() const { return begin_; }  // of the rows of the group
  DLSYS_HD int64_t end() const { return end_; }
  DLSYS_HD int row() const { return row_; }  // of the tile in the group's part of C, in tiles
  DLSYS_HD int col() const { return col_; }

 private:
  static constexpr int kBand = 8;  // row tiles

  DLSYS_HD void Enter() {
    const int64_t left = shape_.rows - begin_;
    int64_t size = left;
    if (!IsRest()) {
      const int64_t asked = sizes_[group_];
      size = asked < 0 ? 0 : asked < left ? asked : left;
    }
    end_ = begin_ + size;
    row_tiles_ = (int)CeilDiv(shape_.contracts ? shape_.k : size, tile_rows_);
  }

  const Indices sizes_;
  const GroupedShape shape_;
  const int tile_rows_, cols_;
  int64_t group_ = 0, begin_ = 0, end_ = 0, first_ = 0;
  int row_tiles_ = 0, row_ = 0, col_ = 0;
};

}  // namespace dlsys
