// Row-wise softmax, log-softmax, softmax cross-entropy (also fused, forward and backward) and
// negative log-likelihood on the CPU. The maximum of a row is subtracted first, so that logits of
// any size neither overflow nor lose the digits of the result.
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
  DLSYS_INLINE Row Of(const float* data) const { return {data + at, n, readable}; }
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

const float kLowest = -std::numeric_limits<float>::infinity();

DLSYS_INLINE double SumExp(const Row& x, float max) {
  return SumOf(x, kLowest, [=](float v) __attribute__((always_inline)) { return exp(v - max); });
}

// y = exp(x - max(x)); returns the sum of that.
DLSYS_INLINE double ExpRow(const Row& x, float* y) {
  const float max = MaxOf(x);
  return MapRow(x, kLowest, y,
                [=](float v) __attribute__((always_inline)) { return exp(v - max); });
}

void Softmax(const DLArray* x, DLArray* y) {
  const float* in = Input("softmax", x);
  float* out = Output("softmax", y);
  CheckSameShape("softmax", x, y);
  const Rows rows = RowsOf("softmax", x);
  ForRows(
      rows, DLSYS_ROW {
        float* to = out + p.at;
        const float scale = (float)(1 / ExpRow(p.Of(in), to));
        for (int64_t k = 0; k < p.n; k++) to[k] *= scale;
      });
}

void LogSoftmax(const DLArray* x, DLArray* y) {
  const float* in = Input("log_softmax", x);
  float* out = Output("log_softmax", y);
  CheckSameShape("log_softmax", x, y);
  const Rows rows = RowsOf("log_softmax", x);
  ForRows(
      rows, DLSYS_ROW {
        const Row from = p.Of(in);
        const float max = MaxOf(from);
        const float log_sum = (float)std::log(SumExp(from, max));
        float* to = out + p.at;
        DLSYS_IVDEP
        for (int64_t k = 0; k < p.n; k++) to[k] = from.data[k] - max - log_sum;
      });
}

// The sum of y_c * (logsumexp(x) - x_c); max - x_c comes first, which loses no digits.
DLSYS_INLINE double DenseLoss(const Row& x, const Row& y) {
  const float max = MaxOf(x);
  const float log_sum = (float)std::log(SumExp(x, max));
  auto term = [=](float logit, float label)
                  __attribute__((always_inline)) { return label * (max - logit + log_sum); };
  return SumOf(x, max, y, 0.f, term);
}

// One value a row, in the shape of the rows.
void CheckPerRow(const char* op, const DLArray* x, const DLArray* values) {
  bool match = values->ndim == x->ndim - 1;
  for (int a = 0; match && a < values->ndim; a++) match = values->shape[a] == x->shape[a];
  if (!match)
    Fail("%s: logits of shape %s need one value a row, got shape %s", op, ShapeText(x).c_str(),
         ShapeText(values).c_str());
}

const float* RowGradients(const char* op, const DLArray* dy, Rows rows) {
  const float* values = Input(op, dy);
  if (Numel(dy) != rows.count)
    Fail("%s: expected the gradients of %ld rows, got shape %s", op, (long)rows.count,
         ShapeText(dy).c_str());
  return values;
}

void CrossEntropy(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "softmax_cross_entropy";
  const float* logits = Input(op, x);
  const float* labels = Input(op, y);
  float* out = Output(op, loss);
  CheckSameShape(op, x, y);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, loss);
  ForRows(rows, DLSYS_ROW { out[p.r] = (float)DenseLoss(p.Of(logits), p.Of(labels)); });
}

void CrossEntropyMean(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "softmax_cross_entropy_mean";
  const float* logits = Input(op, x);
  const float* labels = Input(op, y);
  float* out = Output(op, loss);
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
    *out = (float)(total / (double)rows.count);
  });
}

void CrossEntropyGradient(const DLArray* x, const DLArray* y, const DLArray* dy, DLArray* dx) {
  const char* op = "softmax_cross_entropy_gradient";
  const float* logits = Input(op, x);
  const float* labels = Input(op, y);
  float* out = Output(op, dx);
  CheckSameShape(op, x, y);
  CheckSameShape(op, x, dx);
  const Rows rows = RowsOf(op, x);
  const float* gradients = RowGradients(op, dy, rows);
  ForRows(
      rows, DLSYS_ROW {
        const Row label = p.Of(labels);
        float* to = out + p.at;
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

void SparseCrossEntropy(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "sparse_softmax_cross_entropy";
  const float* logits = Input(op, x);
  float* out = Output(op, loss);
  Check(op, y);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  CheckPerRow(op, x, loss);
  const SparseLabels labels(op, y, rows);
  ForRows(
      rows, DLSYS_ROW {
        const Row from = p.Of(logits);
        const float max = MaxOf(from);
        const float log_sum = (float)std::log(SumExp(from, max));
        out[p.r] = max - from.data[labels[p.r]] + log_sum;
      });
}

void SparseCrossEntropyGradient(const DLArray* x, const DLArray* y, const DLArray* dy,
                                DLArray* dx) {
  const char* op = "sparse_softmax_cross_entropy_gradient";
  const float* logits = Input(op, x);
  float* out = Output(op, dx);
  Check(op, y);
  CheckSameShape(op, x, dx);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  const float* gradients = RowGradients(op, dy, rows);
  const SparseLabels labels(op, y, rows);
  ForRows(
      rows, DLSYS_ROW {
        float* to = out + p.at;
        const float scale = (float)(1 / ExpRow(p.Of(logits), to));
        const float gradient = gradients[p.r];
        const int64_t label = labels[p.r];
        // Not gradient * softmax - gradient: near a softmax of 1 that would cancel.
        const float at_label = (to[label] * scale - 1.f) * gradient;
        for (int64_t k = 0; k < p.n; k++) to[k] *= scale * gradient;
        to[label] = at_label;
      });
}

// loss = minus the element of each row at its label.
void NegativeLogLikelihood(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "negative_log_likelihood";
  const float* in = Input(op, x);
  float* out = Output(op, loss);
  Check(op, y);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  CheckPerRow(op, x, loss);
  const SparseLabels labels(op, y, rows);
  ParallelFor(rows.count, RowGrain(kElementCost), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) out[r] = -in[r * rows.cols + labels[r]];
  });
}

// dx = -dy at the label of each row, 0 elsewhere.
void NegativeLogLikelihoodGradient(const DLArray* y, const DLArray* dy, DLArray* dx) {
  const char* op = "negative_log_likelihood_gradient";
  float* out = Output(op, dx);
  Check(op, y);
  const Rows rows = RowsOf(op, dx);
  CheckPerRow(op, dx, y);
  const float* gradients = RowGradients(op, dy, rows);
  const SparseLabels labels(op, y, rows);
  ParallelFor(rows.count, RowGrain(rows.cols), [&](int64_t begin, int64_t end) {
    std::fill(out + begin * rows.cols, out + end * rows.cols, 0.f);
    for (int64_t r = begin; r < end; r++) out[r * rows.cols + labels[r]] = -gradients[r];
  });
}

// Fused cross-entropy: loss = scale * the sum of the losses of the rows, dx = their gradients times
// dy, the same for all rows. The workspace is for the single-pass reductions of GPUs.
void CheckLoss(const char* op, const DLArray* loss) {
  if (Numel(loss) != 1)
    Fail("%s: expected a loss of one element, got shape %s", op, ShapeText(loss).c_str());
}

void StoreScaledSum(const double* of_row, int64_t rows, float scale, float* to) {
  Serially([=] {
    double total = 0;
    for (int64_t r = 0; r < rows; r++) total += of_row[r];
    *to = (float)(total * scale);
  });
}

void FusedCrossEntropy(const DLArray* x, const DLArray* y, const DLArray* workspace, float scale,
                       float dy, DLArray* loss, DLArray* dx) {
  const char* op = "fused_cross_entropy";
  const float* logits = Input(op, x);
  const float* labels = Input(op, y);
  float* total = Output(op, loss);
  float* out = Output(op, dx);
  Check(op, workspace);
  CheckSameShape(op, x, y);
  CheckSameShape(op, x, dx);
  CheckLoss(op, loss);
  const Rows rows = RowsOf(op, x);
  const ScratchArray<double> losses(rows.count);
  double* of_row = losses.data();
  ForRows(
      rows, DLSYS_ROW {
        const Row label = p.Of(labels);
        of_row[p.r] = DenseLoss(p.Of(logits), label);
        float* to = out + p.at;
        const float share = (float)(SumOf(label) / ExpRow(p.Of(logits), to));
        for (int64_t k = 0; k < p.n; k++) to[k] = (to[k] * share - label.data[k]) * dy;
      });
  StoreScaledSum(of_row, rows.count, scale, total);
}

void FusedSparseCrossEntropy(const DLArray* x, const DLArray* y, const DLArray* workspace,
                             float scale, float dy, DLArray* loss, DLArray* dx) {
  const char* op = "fused_sparse_cross_entropy";
  const float* logits = Input(op, x);
  float* total = Output(op, loss);
  float* out = Output(op, dx);
  Check(op, y);
  Check(op, workspace);
  CheckSameShape(op, x, dx);
  CheckLoss(op, loss);
  const Rows rows = RowsOf(op, x);
  CheckPerRow(op, x, y);
  const SparseLabels labels("sparse_softmax_cross_entropy", y, rows);  // which the user wrote
  const ScratchArray<double> losses(rows.count);
  double* of_row = losses.data();
  ForRows(
      rows, DLSYS_ROW {
        const Row from = p.Of(logits);
        const int64_t label = labels[p.r];
        const float below = MaxOf(from) - from.data[label];
        float* to = out + p.at;
        const double sum = ExpRow(from, to);
        of_row[p.r] = below + (float)std::log(sum);
        const float share = (float)(1 / sum);
        const float at_label = (to[label] * share - 1.f) * dy;
        for (int64_t k = 0; k < p.n; k++) to[k] *= share * dy;
        to[label] = at_label;
      });
  StoreScaledSum(of_row, rows.count, scale, total);
}

DLSYS_KERNEL(cpu, fused_cross_entropy, FusedCrossEntropy);
DLSYS_KERNEL(cpu, fused_sparse_cross_entropy, FusedSparseCrossEntropy);
DLSYS_KERNEL(cpu, softmax, Softmax);
DLSYS_KERNEL(cpu, log_softmax, LogSoftmax);
DLSYS_KERNEL(cpu, softmax_cross_entropy, CrossEntropy);
DLSYS_KERNEL(cpu, softmax_cross_entropy_mean, CrossEntropyMean);
DLSYS_KERNEL(cpu, softmax_cross_entropy_gradient, CrossEntropyGradient);
DLSYS_KERNEL(cpu, sparse_softmax_cross_entropy, SparseCrossEntropy);
DLSYS_KERNEL(cpu, sparse_softmax_cross_entropy_gradient, SparseCrossEntropyGradient);
DLSYS_KERNEL(cpu, negative_log_likelihood, NegativeLogLikelihood);
DLSYS_KERNEL(cpu, negative_log_likelihood_gradient, NegativeLogLikelihoodGradient);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
