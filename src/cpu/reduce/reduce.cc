// reduce_sum over any axes on the CPU. Values are added in float32 in short runs and the runs in
// double; the grouping depends on the shape only, for any number of threads. Memory bandwidth
// limits it.
#include "cpu/pointwise/strides.h"
#include "cpu/reduce/rows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kSplit = 65536;        // elements of a task, about
const int64_t kColumns = 512;        // columns of a task
const int64_t kTree = 8;             // rows that are added in float32
const int64_t kNarrow = 32;          // rows of at most so many columns are folded
const int64_t kFoldedColumns = 256;  // columns of a folded row

// The kept and the summed axes of x, each with its strides in x.
struct Axes {
  Loop<1> kept, summed;
};

// Kept sizes other than 1 are the output's sizes other than 1, in order.
bool MatchesOutput(const DLArray* x, int64_t axes, const DLArray* y) {
  int k = 0;
  for (int a = 0; a < x->ndim; a++) {
    if ((axes >> a & 1) || x->shape[a] == 1) continue;
    while (k < y->ndim && y->shape[k] == 1) k++;
    if (k == y->ndim || y->shape[k++] != x->shape[a]) return false;
  }
  while (k < y->ndim && y->shape[k] == 1) k++;
  return k == y->ndim;
}

Axes SplitAxes(const DLArray* x, int64_t axes, const DLArray* y) {
  if (axes < 0 || axes >> x->ndim)
    Fail("reduce_sum: axes %#lx name an axis that shape %s does not have", (long)axes,
         ShapeText(x).c_str());
  if (!MatchesOutput(x, axes, y))
    Fail("reduce_sum: shape %s summed over axes %#lx does not give shape %s", ShapeText(x).c_str(),
         (long)axes, ShapeText(y).c_str());
  Axes result;
  int64_t stride[DL_MAX_NDIM];
  int64_t n = 1;
  for (int a = x->ndim - 1; a >= 0; a--) {
    stride[a] = n;
    n *= x->shape[a];
  }
  for (int a = 0; a < x->ndim; a++)
    (axes >> a & 1 ? result.summed : result.kept).Add(x->shape[a], {stride[a]});
  return result;
}

// y (outer, cols) = scale * the sum over the groups of parts (outer, groups, cols).
void AddParts(const double* parts, float scale, float* y, int64_t outer, int64_t groups,
              int64_t cols) {
  ParallelFor(outer * cols, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) {
      const double* part = parts + k / cols * groups * cols + k % cols;
      double total = 0;
      for (int64_t g = 0; g < groups; g++) total += part[g * cols];
      y[k] = (float)(total * scale);
    }
  });
}

// Row-wise sums, where the innermost axis is summed: an output adds runs of contiguous values.
class RunSums {
 public:
  RunSums(const float* x, int64_t n, const Axes& axes)
      : x_(x), x_end_(x + n), kept_(axes.kept), summed_(axes.summed) {
    int64_t stride[1];
    cols_ = summed_.PopInner(stride);
    piece_ = std::min(cols_, kSplit);
    pieces_ = (cols_ - 1) / piece_ + 1;
    units_ = summed_.Count() * pieces_;
    units_per_group_ = std::max<int64_t>(1, kSplit / piece_);
  }

  void Run(float scale, float* y) const {
    const int64_t outputs = kept_.Count();
    if (cols_ < kLanes && summed_.ndim == 0) return RunShort(scale, y);
    const int64_t groups = (units_ - 1) / units_per_group_ + 1;
    const ScratchArray<double> partial(groups > 1 ? outputs * groups : 0);
    double* parts = groups > 1 ? partial.data() : nullptr;
    const int64_t grain = groups > 1 ? 1 : RowGrain(cols_ * units_ / pieces_);
    ParallelFor(outputs * groups, grain, [&](int64_t begin, int64_t end) {
      Dispatch([&]() __attribute__((always_inline)) {
        for (int64_t k = begin; k < end; k++) {
          const double sum = SumGroup(k / groups, k % groups);
          if (parts)
            parts[k] = sum;
          else
            y[k] = (float)(sum * scale);
        }
      });
    });
    if (parts) AddParts(parts, scale, y, outputs, groups, 1);
  }

 private:
  // Runs shorter than a vector: a lane sums one run. The last block repeats its last run.
  void RunShort(float scale, float* y) const {
    const int64_t outputs = kept_.Count();
    ParallelFor((outputs - 1) / kLanes + 1, RowGrain(kLanes * cols_),
                [&](int64_t from, int64_t to) {
                  Dispatch([&]() __attribute__((always_inline)) {
                    Cursor<1> run(kept_, from * kLanes);
                    for (int64_t first = from * kLanes; first < to * kLanes && first < outputs;) {
                      const int count = (int)std::min<int64_t>(kLanes, outputs - first);
                      const float* start[kLanes];
                      for (int j = 0; j < kLanes; j++) {
                        start[j] = x_ + run.offset[0];
                        if (j + 1 < count) run.Next();
                      }
                      run.Next();
                      double sum[kLanes] = {};
                      for (int64_t c = 0; c < cols_; c++)
                        for (int j = 0; j < kLanes; j++) sum[j] += start[j][c];
                      for (int j = 0; j < count; j++) y[first++] = (float)(sum[j] * scale);
                    }
                  });
                });
  }

  DLSYS_INLINE double SumGroup(int64_t output, int64_t group) const {
    const float* base = x_ + Cursor<1>(kept_, output).offset[0];
    const int64_t begin = group * units_per_group_;
    const int64_t end = std::min(units_, begin + units_per_group_);
    Cursor<1> row(summed_, begin / pieces_);
    double sum = 0;
    for (int64_t u = begin; u < end; u++) {
      const int64_t at = u % pieces_ * piece_;
      const int64_t n = std::min(piece_, cols_ - at);
      const float* run = base + row.offset[0] + at;
      sum += SumOf(Row{run, n, x_end_ - run});
      if (at + piece_ >= cols_) row.Next();
    }
    return sum;
  }

  const float *x_, *x_end_;
  Loop<1> kept_, summed_;
  int64_t cols_, piece_, pieces_, units_, units_per_group_;
};

// Column-wise sums, where the innermost axis is kept: an output row adds `rows_` contiguous rows.
class ColumnSums {
 public:
  ColumnSums(const float* x, const Axes& axes) : x_(x), kept_(axes.kept), summed_(axes.summed) {
    int64_t stride[1];
    cols_ = kept_.PopInner(stride);
    width_ = std::min(cols_, kColumns);
    blocks_ = (cols_ - 1) / width_ + 1;
    rows_ = summed_.Count();
    rows_per_group_ = std::max<int64_t>(64, kSplit / width_);
    groups_ = (rows_ - 1) / rows_per_group_ + 1;
    const bool adjacent = summed_.ndim == 1 && summed_.stride[0][0] == cols_;
    folded_ = adjacent && cols_ <= kNarrow ? std::min(kFoldedColumns / cols_, rows_ / kTree) : 1;
  }

  void Run(float scale, float* y) const {
    const int64_t outer = kept_.Count();
    const ScratchArray<double> partial(groups_ > 1 ? outer * groups_ * cols_ : 0);
    double* parts = groups_ > 1 ? partial.data() : nullptr;
    const int64_t grain = RowGrain(std::min(rows_, rows_per_group_) * width_);
    ParallelFor(outer * groups_ * blocks_, grain, [&](int64_t begin, int64_t end) {
      Dispatch([&]() __attribute__((always_inline)) {
        for (int64_t k = begin; k < end; k++) {
          const int64_t col = k % blocks_ * width_;
          const int64_t width = std::min(width_, cols_ - col);
          const int64_t to = k / blocks_ * cols_ + col;
          double sums[kColumns];
          SumRows(k / blocks_ / groups_, k / blocks_ % groups_, col, width, sums);
          if (parts)
            std::copy(sums, sums + width, parts + to);
          else
            for (int64_t c = 0; c < width; c++) y[to + c] = (float)(sums[c] * scale);
        }
      });
    });
    if (parts) AddParts(parts, scale, y, outer, groups_, cols_);
  }

 private:
  DLSYS_INLINE void SumRows(int64_t output, int64_t group, int64_t col, int64_t width,
                            double* sums) const {
    const float* base = x_ + Cursor<1>(kept_, output).offset[0] + col;
    const int64_t begin = group * rows_per_group_;
    const int64_t rows = std::min(rows_, begin + rows_per_group_) - begin;
    if (folded_ > 1) return SumFolded(base + begin * cols_, rows, sums);
    Cursor<1> at(summed_, begin);
    std::fill(sums, sums + width, 0.0);
    auto next = [&]() __attribute__((always_inline)) {
      const float* row = base + at.offset[0];
      at.Next();
      return row;
    };
    AddRows(rows, width, next, sums);
  }

  // Adds short adjacent rows, `folded_` of which are one wide row.
  DLSYS_INLINE void SumFolded(const float* x, int64_t rows, double* sums) const {
    const int64_t width = folded_ * cols_;
    double wide[kColumns] = {};
    auto next = [&]() __attribute__((always_inline)) {
      x += width;
      return x - width;
    };
    AddRows(rows / folded_, width, next, wide);
    for (int64_t c = 0; c < rows % folded_ * cols_; c++) wide[c] += x[c];
    for (int64_t c = cols_; c < width; c++) wide[c % cols_] += wide[c];
    std::copy(wide, wide + cols_, sums);
  }

  // Adds the rows that next() returns to sums.
  template <class F>
  DLSYS_INLINE static void AddRows(int64_t rows, int64_t width, const F& next, double* sums) {
    int64_t k = 0;
    for (; k + kTree <= rows; k += kTree) {
      const float* r[kTree];
      for (int j = 0; j < kTree; j++) r[j] = next();
      for (int64_t c = 0; c < width; c++)
        sums[c] += ((r[0][c] + r[1][c]) + (r[2][c] + r[3][c])) +
                   ((r[4][c] + r[5][c]) + (r[6][c] + r[7][c]));
    }
    for (; k < rows; k++) {
      const float* row = next();
      for (int64_t c = 0; c < width; c++) sums[c] += row[c];
    }
  }

  const float* x_;
  Loop<1> kept_, summed_;
  int64_t cols_, width_, blocks_, rows_, rows_per_group_, groups_, folded_;
};

void ReduceSum(const DLArray* x, int64_t axes, float scale, DLArray* y) {
  const float* in = Input("reduce_sum", x);
  float* out = Output("reduce_sum", y);
  const Axes split = SplitAxes(x, axes, y);
  if (Numel(y) == 0) return;
  if (Numel(x) == 0) return Serially([&] { std::fill(out, out + Numel(y), 0.f * scale); });
  const Loop<1>& summed = split.summed;
  if (summed.ndim && summed.stride[summed.ndim - 1][0] == 1)
    RunSums(in, Numel(x), split).Run(scale, out);
  else
    ColumnSums(in, split).Run(scale, out);
}

DLSYS_KERNEL(cpu, reduce_sum, ReduceSum);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
