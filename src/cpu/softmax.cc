// Softmax, log-softmax and softmax cross-entropy over the last axis, a row at a time: the row's maximum is taken off
// first, so that logits of any size neither overflow nor lose the digits of the result.
#include <cmath>

#include "math.h"
#include "parallel.h"
#include "rows.h"
#include "simd.h"
#include "strides.h"

namespace dlsys {
namespace cpu {
namespace {

const int64_t kElementCost = 4;  // an element costs as much as some of simple arithmetic

struct Rows {
  int64_t count, cols;
};

Rows RowsOf(const char* op, const DLArray* x) {
  if (x->ndim < 1) Fail("%s: expected at least one axis, got shape ()", op);
  Rows rows{1, x->shape[x->ndim - 1]};
  for (int a = 0; a < x->ndim - 1; a++) rows.count *= x->shape[a];
  return rows;
}

// Calls body(row) for every row, on some thread, inside the version for this processor.
template <class F>
void ForRows(Rows rows, const F& body) {
  ParallelFor(rows.count, RowGrain((rows.cols + kLanes) * kElementCost), [&](int64_t begin, int64_t end) {
    Dispatch([&]() __attribute__((always_inline)) {
      for (int64_t r = begin; r < end; r++) body(r);
    });
  });
}
#define DLSYS_ROW [=](int64_t r) __attribute__((always_inline))

#define DLSYS_TERMS \
  [=](int64_t k, int64_t left, float(&lane)[kLanes]) __attribute__((always_inline))

// lane = exp(x - max), and 0 where there is no x.
DLSYS_INLINE void ExpLanes(const float* x, int64_t left, float max, float (&lane)[kLanes]) {
  LoadLanes(x, left, -std::numeric_limits<float>::infinity(), lane);
  for (int j = 0; j < kLanes; j++) lane[j] = exp(lane[j] - max);
}

DLSYS_INLINE double SumExp(const float* x, int64_t n, float max) {
  return SumOf(n, DLSYS_TERMS { ExpLanes(x + k, left, max, lane); });
}

// y = exp(x - max(x)) and the sum of that.
DLSYS_INLINE double ExpRow(const float* x, float* y, int64_t n) {
  const float max = MaxOf(x, n);
  return SumOf(n, DLSYS_TERMS {
    ExpLanes(x + k, left, max, lane);
    StoreLanes(y + k, left, lane);
  });
}

void Softmax(const DLArray* x, DLArray* y) {
  const float* in = Input("softmax", x);
  float* out = Output("softmax", y);
  CheckSameShape("softmax", x, y);
  const Rows rows = RowsOf("softmax", x);
  const int64_t n = rows.cols;
  ForRows(rows, DLSYS_ROW {
    float* to = out + r * n;
    const float scale = (float)(1 / ExpRow(in + r * n, to, n));
    for (int64_t k = 0; k < n; k++) to[k] *= scale;
  });
}

void LogSoftmax(const DLArray* x, DLArray* y) {
  const float* in = Input("log_softmax", x);
  float* out = Output("log_softmax", y);
  CheckSameShape("log_softmax", x, y);
  const Rows rows = RowsOf("log_softmax", x);
  const int64_t n = rows.cols;
  ForRows(rows, DLSYS_ROW {
    const float* from = in + r * n;
    float* to = out + r * n;
    const float max = MaxOf(from, n);
    const float log_sum = (float)std::log(SumExp(from, n, max));
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) to[k] = from[k] - max - log_sum;
  });
}

// The sum of y_c * (logsumexp(x) - x_c); x_c is taken from the maximum first, where no digits are lost.
DLSYS_INLINE double DenseLoss(const float* x, const float* y, int64_t n) {
  const float max = MaxOf(x, n);
  const float log_sum = (float)std::log(SumExp(x, n, max));
  return SumOf(n, DLSYS_TERMS {
    float label[kLanes];
    LoadLanes(x + k, left, max, lane);
    LoadLanes(y + k, left, 0.f, label);
    for (int j = 0; j < kLanes; j++) lane[j] = label[j] * (max - lane[j] + log_sum);
  });
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
  const int64_t n = rows.cols;
  ForRows(rows, DLSYS_ROW { out[r] = (float)DenseLoss(logits + r * n, labels + r * n, n); });
}

thread_local Scratch loss_scratch;

void CrossEntropyMean(const DLArray* x, const DLArray* y, DLArray* loss) {
  const char* op = "softmax_cross_entropy_mean";
  const float* logits = Input(op, x);
  const float* labels = Input(op, y);
  float* out = Output(op, loss);
  CheckSameShape(op, x, y);
  const Rows rows = RowsOf(op, x);
  if (Numel(loss) != 1)
    Fail("%s: expected an output of one element, got shape %s", op, ShapeText(loss).c_str());
  const int64_t n = rows.cols;
  double* of_row = loss_scratch.Get<double>(rows.count);
  ForRows(rows, DLSYS_ROW { of_row[r] = DenseLoss(logits + r * n, labels + r * n, n); });
  double total = 0;
  for (int64_t r = 0; r < rows.count; r++) total += of_row[r];
  *out = (float)(total / (double)rows.count);
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
  const int64_t n = rows.cols;
  ForRows(rows, DLSYS_ROW {
    const float* label = labels + r * n;
    float* to = out + r * n;
    const float scale = (float)(SumOf(label, n) / ExpRow(logits + r * n, to, n));
    const float gradient = gradients[r];
    DLSYS_IVDEP
    for (int64_t k = 0; k < n; k++) to[k] = (to[k] * scale - label[k]) * gradient;
  });
}

// Integer labels of any supported dtype, checked before anything is written.
class SparseLabels {
 public:
  SparseLabels(const char* op, const DLArray* labels, Rows rows)
      : data_(labels->data), dtype_(labels->dtype) {
    if (dtype_ != DL_INT32 && dtype_ != DL_INT64 && dtype_ != DL_UINT8)
      Fail("%s: expected labels of int32, int64 or uint8, got %s", op, DtypeText(dtype_));
    for (int64_t r = 0; r < rows.count; r++) {
      const int64_t label = (*this)[r];
      if (label < 0 || label >= rows.cols)
        Fail("%s: label %ld of row %ld is not one of the %ld classes 0 to %ld", op, (long)label,
             (long)r, (long)rows.cols, (long)rows.cols - 1);
    }
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
  const int64_t n = rows.cols;
  ForRows(rows, DLSYS_ROW {
    const float* from = logits + r * n;
    const float max = MaxOf(from, n);
    const float log_sum = (float)std::log(SumExp(from, n, max));
    out[r] = max - from[labels[r]] + log_sum;
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
  const int64_t n = rows.cols;
  ForRows(rows, DLSYS_ROW {
    float* to = out + r * n;
    const float max = MaxOf(from, n);
    const float scale = (float)(1 / ExpRow(logits + r * n, to, n));
    const float gradient = gradients[r];
    const int64_t label = labels[r];
    // Not gradient * softmax minus gradient: near a softmax of 1 the difference comes first.
    const float at_label = (to[label] * scale - 1.f) * gradient;
    for (int64_t k = 0; k < n; k++) to[k] *= scale * gradient;
    to[label] = at_label;
  });
}

DLSYS_KERNEL(cpu, softmax, Softmax);
DLSYS_KERNEL(cpu, log_softmax, LogSoftmax);
DLSYS_KERNEL(cpu, softmax_cross_entropy, CrossEntropy);
DLSYS_KERNEL(cpu, softmax_cross_entropy_mean, CrossEntropyMean);
DLSYS_KERNEL(cpu, softmax_cross_entropy_gradient, CrossEntropyGradient);
DLSYS_KERNEL(cpu, sparse_softmax_cross_entropy, SparseCrossEntropy);
DLSYS_KERNEL(cpu, sparse_softmax_cross_entropy_gradient, SparseCrossEntropyGradient);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
