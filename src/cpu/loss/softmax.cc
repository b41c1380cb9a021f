// Row-wise softmax, log-softmax, softmax cross-entropy (also fused, forward and backward) and
// negative log-likelihood on the CPU. The maximum of a row is subtracted first, so that logits of
// any size neither overflow nor lose the digits of the result. Threads take rows of contiguous
// arrays. Limited by the arithmetic of exp where a row fits a cache, else by memory bandwidth.
#include <cmath>

#include "cpu/pointwise/strides.h"
#include "cpu/reduce/rows.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/float_math.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kElementCost = 4;  // of an element, in elements of simple arithmetic

struct Rows {
  int64_t count, cols;
};

Rows RowsOf(const char* op, const DLArray* x) {
  if (x->ndim < 1) Fail("%s: expected at least one axis, got shape ()", op);
  Rows rows{1, x->shape[x->ndim - 1]};
  for (int a = 0; a < x->ndim - 1; a++) rows.count *= x->shape[a];
  return rows;
}

// A row of a task: row r, whose values start at `at`; `readable` values follow in the rows of the
// task.
struct Position {
  int64_t r, at, n, readable;
  template <class T>
  DLSYS_INLINE RowOf<T> Of(const T* data) const {
    return {data + at, n, readable};
  }
};

// Calls body(position) for every row, on some thread, in the code for this processor's vectors.
template <class F>
void ForRows(Rows rows, const F& body) {
  const int64_t grain = RowGrain((rows.cols + kLanes) * kElementCost);
  ParallelFor(rows.count, grain, [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t r = begin; r < end; r++)
        body(Position{r, r * rows.cols, rows.cols, (end - r) * rows.cols});
    });
  });
}
#define DLSYS_ROW [=](const Position& p) __attribute__((always_inline))

// Calls body(position, to) for every row, where `to` is the row of y. Of 16-bit floats it is
// scratch in float32 instead, which is rounded to the row of y behind the body: y is rounded once.
template <class T, class F>
void MapRows(Rows rows, T* y, const F& body) {
  if constexpr (!kIs16Bit<T>) {
    ForRows(rows, DLSYS_ROW { body(p, y + p.at); });
  } else {
    auto task = [&](int64_t begin, int64_t end, const ScratchArray<float>& row) {
      float* const to = row.data();
      Dispatch([&]() __attribute__((always_inline)) {
        for (int64_t r = begin; r < end; r++) {
          const Position p{r, r * rows.cols, rows.cols, (end - r) * rows.cols};
          body(p, to);
          for (int64_t k = 0; k < p.n; k++) y[p.at + k] = T(to[k]);
        }
      });
    };
    const int64_t grain = RowGrain((rows.cols + kLanes) * kElementCost);
    const auto make = [=] { return ScratchArray<float>(rows.cols); };
    ParallelForWithScratch(rows.count, grain, make, task);
  }
}
#define DLSYS_MAP_ROW [=](const Position& p, float* to) __attribute__((always_inline))

const float kLowest = -std::numeric_limits<float>::infinity();

template <class T>
DLSYS_INLINE double SumExp(const RowOf<T>& x, float max) {
  return SumOf(x, T(kLowest), [=](float v) __attribute__((always_inline)) { return exp(v - max); });
}

// y = exp(x - max(x)); returns the sum of that.
template <class T>
DLSYS_INLINE double ExpRow(const RowOf<T>& x, float* y) {
  const float max = MaxOf(x);
  return MapRow(x, T(kLowest), y,
                [=](float v) __attribute__((always_inline)) { return exp(v - max); });
}

template <class T>
void Softmax(const DLArray* x, DLArray* y) {
  const T* in = Input<T>("softmax", x);
  T* out = Output<T>("softmax", y);
  CheckSameShape("softmax", x, y);
  const Rows rows = RowsOf("softmax", x);
  MapRows(
      rows, out, DLSYS_MAP_ROW {
        const float scale = (float)(1 / ExpRow(p.Of(in), to));
        for (int64_t k = 0; k < p.n; k++) to[k] *= scale;
      });
}

template <class T>
void LogSoftmax(const DLArray* x, DLArray* y) {
  const T* in = Input<T>("log_softmax", x);
  T* out = Output<T>("log_softmax", y);
  CheckSameShape("log_softmax", x, y);
  const Rows rows = RowsOf("log_softmax", x);
  MapRows(
      rows, out, DLSYS_MAP_ROW {
        const RowOf<T> from = p.Of(in);
        const float max = MaxOf(from);
        const float log_sum = (float)std::log(SumExp(from, max));
        DLSYS_IVDEP
        for (int64_t k = 0; k < p.n; k++) to[k] = from.data[k] - max - log_sum;
      });
}

// The sum of y_c * (logsumexp(x) - x_c); max - x_c comes first, which loses no digits.
template <class T>
DLSYS_INLINE double DenseLoss(const RowOf<T>& x, const RowOf<T>& y) {
  const float max = MaxOf(x);
  const float log_sum = (float)std::log(SumExp(x, max));
  auto term = [=](float logit, float label)
                  __attribute__((always_inline)) { return label * (max - logit + log_sum); };
  return SumOf(x, T(max), y, T(0.f), term);
}

// One value a row, in the shape of the rows.
void CheckPerRow(const char* op, const DLArray* x, const DLArray* values) {
  bool match = values->ndim == x->ndim - 1;
  for (int a = 0; match && a < values->ndim; a++) match = values->shape[a] == x->shape[a];
  if (!match)
    Fail("%s: logits of shape %s need one value a row, got shape %s", op, ShapeText(x).c_str(),
         ShapeText(values).c_str());
}

template <class T>
const T* RowGradients(const char* op, const DLArray* dy, Rows rows) {
  const T* values = Input<T>(op, dy);
  if (Numel(dy) != rows.count)
    Fail("%s: expected the gradients of %ld rows, got shape %s", op, (long)rows.count,
         ShapeText(dy).c_str());
  return values;
}

template <class T>
void CrossEntropy(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "softmax_cross_entropy";
  const T* logits = Input<T>(op, x);
  const T* labels = Input<T>(op, y);
  T* out = Output<T>(op, loss);
  CheckSameShape(op, x, y);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, loss);
  ForRows(rows, DLSYS_ROW { out[p.r] = T(DenseLoss(p.Of(logits), p.Of(labels))); });
}

template <class T>
void CrossEntropyMean(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "softmax_cross_entropy_mean";
  const T* logits = Input<T>(op, x);
  const T* labels = Input<T>(op, y);
  T* out = Output<T>(op, loss);
  CheckSameShape(op, x, y);
  const Rows rows = RowsOf(op, x);
  if (Numel(loss) != 1)
    Fail("%s: expected an output of one element, got shape %s", op, ShapeText(loss).c_str());
  const ScratchArray<double> losses(rows.count);
  double* of_row = losses.data();
  ForRows(rows, DLSYS_ROW { of_row[p.r] = DenseLoss(p.Of(logits), p.Of(labels)); });
  Serially([=] {
    double total = 0;
    for (int64_t r = 0; r < rows.count; r++) total += of_row[r];
    *out = T(total / (double)rows.count);
  });
}

template <class T>
void CrossEntropyGradient(const DLArray* x, const DLArray* y, const DLArray* dy, DLArray* dx) {
  const char* op = "softmax_cross_entropy_gradient";
  const T* logits = Input<T>(op, x);
  const T* labels = Input<T>(op, y);
  T* out = Output<T>(op, dx);
  CheckSameShape(op, x, y);
  CheckSameShape(op, x, dx);
  const Rows rows = RowsOf(op, x);
  const T* gradients = RowGradients<T>(op, dy, rows);
  MapRows(
      rows, out, DLSYS_MAP_ROW {
        const RowOf<T> label = p.Of(labels);
        const float scale = (float)(SumOf(label) / ExpRow(p.Of(logits), to));
        const float gradient = gradients[p.r];
        for (int64_t k = 0; k < p.n; k++) to[k] = (to[k] * scale - label.data[k]) * gradient;
      });
}

// Integer labels of any supported dtype, checked before anything is written.
class SparseLabels {
 public:
  SparseLabels(const char* op, const DLArray* labels, Rows rows)
      : data_(labels->data), dtype_(labels->dtype) {
    if (dtype_ != DL_INT32 && dtype_ != DL_INT64 && dtype_ != DL_UINT8)
      Fail("%s: expected labels of int32, int64 or uint8, got %s", op, DtypeText(dtype_));
    Serially([&] {
      for (int64_t r = 0; r < rows.count; r++) {
        const int64_t label = (*this)[r];
        if (label < 0 || label >= rows.cols) FailOutOfRange(op, "label", label, r, rows.cols);
      }
    });
  }

  DLSYS_INLINE int64_t operator[](int64_t row) const {
    if (dtype_ == DL_INT32) return ((const int32_t*)data_)[row];
    if (dtype_ == DL_INT64) return ((const int64_t*)data_)[row];
    return ((const uint8_t*)data_)[row];
  }

 private:
  const void* data_;
  int dtype_;
};

// R: the dtype of one float a row, that of the logits or float32.
template <class T, class R>
void SparseCrossEntropyOf(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "sparse_softmax_cross_entropy";
  const T* logits = Input<T>(op, x);
  R* out = Output<R>(op, loss);
  Check(op, y);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  CheckPerRow(op, x, loss);
  const SparseLabels labels(op, y, rows);
  ForRows(
      rows, DLSYS_ROW {
        const RowOf<T> from = p.Of(logits);
        const float max = MaxOf(from);
        const float log_sum = (float)std::log(SumExp(from, max));
        out[p.r] = R(max - from.data[labels[p.r]] + log_sum);
      });
}

template <class T>
void SparseCrossEntropy(const DLArray* x, const DLArray* y, DLArray* loss) {
  if (loss->dtype == DL_FLOAT32) return SparseCrossEntropyOf<T, float>(x, y, loss);
  SparseCrossEntropyOf<T, T>(x, y, loss);
}

template <class T, class R>
void SparseCrossEntropyGradientOf(const DLArray* x, const DLArray* y, const DLArray* dy,
                                  DLArray* dx) {
  const char* op = "sparse_softmax_cross_entropy_gradient";
  const T* logits = Input<T>(op, x);
  T* out = Output<T>(op, dx);
  Check(op, y);
  CheckSameShape(op, x, dx);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  const R* gradients = RowGradients<R>(op, dy, rows);
  const SparseLabels labels(op, y, rows);
  MapRows(
      rows, out, DLSYS_MAP_ROW {
        const float scale = (float)(1 / ExpRow(p.Of(logits), to));
        const float gradient = gradients[p.r];
        const int64_t label = labels[p.r];
        // Not gradient * softmax - gradient: near a softmax of 1 that would cancel.
        const float at_label = (to[label] * scale - 1.f) * gradient;
        for (int64_t k = 0; k < p.n; k++) to[k] *= scale * gradient;
        to[label] = at_label;
      });
}

template <class T>
void SparseCrossEntropyGradient(const DLArray* x, const DLArray* y, const DLArray* dy,
                                DLArray* dx) {
  if (dy->dtype == DL_FLOAT32) return SparseCrossEntropyGradientOf<T, float>(x, y, dy, dx);
  SparseCrossEntropyGradientOf<T, T>(x, y, dy, dx);
}

// loss = minus the element of each row at its label.
template <class T>
void NegativeLogLikelihood(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "negative_log_likelihood";
  const T* in = Input<T>(op, x);
  T* out = Output<T>(op, loss);
  Check(op, y);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  CheckPerRow(op, x, loss);
  const SparseLabels labels(op, y, rows);
  ParallelFor(rows.count, RowGrain(kElementCost), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) out[r] = T(-in[r * rows.cols + labels[r]]);
  });
}

// dx = -dy at the label of each row, 0 elsewhere.
template <class T>
void NegativeLogLikelihoodGradient(const DLArray* y, const DLArray* dy, DLArray* dx) {
  const char* op = "negative_log_likelihood_gradient";
  T* out = Output<T>(op, dx);
  Check(op, y);
  const Rows rows = RowsOf(op, dx);
  CheckPerRow(op, dx, y);
  const T* gradients = RowGradients<T>(op, dy, rows);
  const SparseLabels labels(op, y, rows);
  ParallelFor(rows.count, RowGrain(rows.cols), [&](int64_t begin, int64_t end) {
    std::fill(out + begin * rows.cols, out + end * rows.cols, T(0.f));
    for (int64_t r = begin; r < end; r++) out[r * rows.cols + labels[r]] = T(-gradients[r]);
  });
}

// Fused cross-entropy: loss = scale * the sum of the losses of the rows, dx = their gradients times
// dy, the same for all rows. The workspace is for the single-pass reductions of GPUs.
void CheckLoss(const char* op, const DLArray* loss) {
  if (Numel(loss) != 1)
    Fail("%s: expected a loss of one element, got shape %s", op, ShapeText(loss).c_str());
}

// The loss is of T or float32.
template <class T>
void StoreScaledSum(const char* op, const double* of_row, int64_t rows, float scale,
                    DLArray* loss) {
  float* const wide = loss->dtype == DL_FLOAT32 ? Output<float>(op, loss) : nullptr;
  T* const narrow = wide ? nullptr : Output<T>(op, loss);
  Serially([=] {
    double total = 0;
    for (int64_t r = 0; r < rows; r++) total += of_row[r];
    if (wide)
      *wide = (float)(total * scale);
    else
      *narrow = T((float)(total * scale));
  });
}

template <class T>
void FusedCrossEntropy(const DLArray* x, const DLArray* y, const DLArray* workspace, float scale,
                       float dy, DLArray* loss, DLArray* dx) {
  const char* op = "fused_cross_entropy";
  const T* logits = Input<T>(op, x);
  const T* labels = Input<T>(op, y);
  T* out = Output<T>(op, dx);
  Check(op, workspace);
  CheckSameShape(op, x, y);
  CheckSameShape(op, x, dx);
  CheckLoss(op, loss);
  const Rows rows = RowsOf(op, x);
  const ScratchArray<double> losses(rows.count);
  double* of_row = losses.data();
  MapRows(
      rows, out, DLSYS_MAP_ROW {
        const RowOf<T> label = p.Of(labels);
        of_row[p.r] = DenseLoss(p.Of(logits), label);
        const float share = (float)(SumOf(label) / ExpRow(p.Of(logits), to));
        for (int64_t k = 0; k < p.n; k++) to[k] = (to[k] * share - label.data[k]) * dy;
      });
  StoreScaledSum<T>(op, of_row, rows.count, scale, loss);
}

template <class T>
void FusedSparseCrossEntropy(const DLArray* x, const DLArray* y, const DLArray* workspace,
                             float scale, float dy, DLArray* loss, DLArray* dx) {
  const char* op = "fused_sparse_cross_entropy";
  const T* logits = Input<T>(op, x);
  T* out = Output<T>(op, dx);
  Check(op, y);
  Check(op, workspace);
  CheckSameShape(op, x, dx);
  CheckLoss(op, loss);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  const SparseLabels labels("sparse_softmax_cross_entropy", y, rows);  // which the user wrote
  const ScratchArray<double> losses(rows.count);
  double* of_row = losses.data();
  MapRows(
      rows, out, DLSYS_MAP_ROW {
        const RowOf<T> from = p.Of(logits);
        const int64_t label = labels[p.r];
        const float below = MaxOf(from) - from.data[label];
        const double sum = ExpRow(from, to);
        of_row[p.r] = below + (float)std::log(sum);
        const float share = (float)(1 / sum);
        const float at_label = (to[label] * share - 1.f) * dy;
        for (int64_t k = 0; k < p.n; k++) to[k] *= share * dy;
        to[label] = at_label;
      });
  StoreScaledSum<T>(op, of_row, rows.count, scale, loss);
}

DLSYS_KERNEL_TYPED(cpu, fused_cross_entropy, FusedCrossEntropy);
DLSYS_KERNEL_TYPED(cpu, fused_sparse_cross_entropy, FusedSparseCrossEntropy);
DLSYS_KERNEL_TYPED(cpu, softmax, Softmax);
DLSYS_KERNEL_TYPED(cpu, log_softmax, LogSoftmax);
DLSYS_KERNEL_TYPED(cpu, softmax_cross_entropy, CrossEntropy);
DLSYS_KERNEL_TYPED(cpu, softmax_cross_entropy_mean, CrossEntropyMean);
DLSYS_KERNEL_TYPED(cpu, softmax_cross_entropy_gradient, CrossEntropyGradient);
DLSYS_KERNEL_TYPED(cpu, sparse_softmax_cross_entropy, SparseCrossEntropy);
DLSYS_KERNEL_TYPED(cpu, sparse_softmax_cross_entropy_gradient, SparseCrossEntropyGradient);
DLSYS_KERNEL_TYPED(cpu, negative_log_likelihood, NegativeLogLikelihood);
DLSYS_KERNEL_TYPED(cpu, negative_log_likelihood_gradient, NegativeLogLikelihoodGradient);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
