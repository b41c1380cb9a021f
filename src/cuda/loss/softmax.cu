// Row-wise softmax, log-softmax, dense and sparse cross-entropy, negative log-likelihood, and their
// gradients, over x (rows, classes).
//
// A thread group takes a row: 16 lanes for up to 16 classes, a warp for up to 512, a block beyond.
// The softmax is two-pass: the maximum, then sum(exp(x - max)), which cannot overflow; later reads
// hit the cache. Cross-entropy of class indices over thousands of classes is that of long_rows.cuh;
// of logits of 16 bits its losses, and their gradients, may be float32. A row is written only after
// its group has read it, so an output may be the buffer of an input of its shape. A label out of
// range gives NaN for its row and is reported (fault.cuh). Memory bandwidth limits it.
#include "cuda/loss/long_rows.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Runs op on every row with a group of kGroup threads. A group without a row sees a row of 0
// classes, since all threads of the block have to reach the barriers.
template <int kGroup, class Op>
__global__ void RowsKernel(int64_t rows, int64_t classes, Op op) {
  constexpr int kGroups = kThreads / kGroup;
  const int group = threadIdx.x / kGroup;
  const int rank = threadIdx.x % kGroup;
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < rows;
       first += (int64_t)gridDim.x * kGroups) {
    const int64_t row = first + group;
    const bool exists = row < rows;
    op.template Row<kGroup>(exists ? row : 0, classes, exists ? classes : 0, rank,
                            exists && rank == 0);
  }
}

// In every op below: `classes` is the length of a row, `count` the same or 0, and `writes` is true
// in the one thread that writes the result of the row.

template <class T>
struct SoftmaxOp {
  const T* x;  // (rows, classes)
  T* y;        // (rows, classes)
  template <int kGroup>
  __device__ void Row(int64_t row, int64_t classes, int64_t count, int rank, bool) const {
    const T* in = x + row * classes;
    T* out = y + row * classes;
    const Stats stats = RowStats<kGroup>(in, count, rank);
    for (int64_t c = rank; c < count; c += kGroup) out[c] = T(expf(in[c] - stats.max) / stats.sum);
  }
};

template <class T>
struct LogSoftmaxOp {
  const T* x;  // (rows, classes)
  T* y;        // (rows, classes)
  template <int kGroup>
  __device__ void Row(int64_t row, int64_t classes, int64_t count, int rank, bool) const {
    const T* in = x + row * classes;
    T* out = y + row * classes;
    const Stats stats = RowStats<kGroup>(in, count, rank);
    const float log_sum = logf(stats.sum);
    for (int64_t c = rank; c < count; c += kGroup) out[c] = T((in[c] - stats.max) - log_sum);
  }
};

template <class T, class Loss>
struct CrossEntropyOp {
  const T* x;       // logits (rows, classes)
  const T* labels;  // (rows, classes)
  Loss* loss;       // (rows)
  template <int kGroup>
  __device__ void Row(int64_t row, int64_t classes, int64_t count, int rank, bool writes) const {
    const T* in = x + row * classes;
    const T* target = labels + row * classes;
    const Stats stats = RowStats<kGroup>(in, count, rank);
    const float log_sum = logf(stats.sum);
    float sum = 0.f;
    for (int64_t c = rank; c < count; c += kGroup)
      sum += target[c] * (log_sum - (in[c] - stats.max));
    sum = GroupReduce<SumMonoid, kGroup>(sum);
    if (writes) loss[row] = Loss(sum);
  }
};

template <class T>
struct CrossEntropyGradientOp {
  const T* x;       // logits (rows, classes)
  const T* labels;  // (rows, classes)
  const T* dy;      // (rows)
  T* dx;            // (rows, classes)
  template <int kGroup>
  __device__ void Row(int64_t row, int64_t classes, int64_t count, int rank, bool) const {
    const T* in = x + row * classes;
    const T* target = labels + row * classes;
    T* out = dx + row * classes;
    const Stats stats = RowStats<kGroup>(in, count, rank);
    float mass = 0.f;
    for (int64_t c = rank; c < count; c += kGroup) mass += target[c];
    mass = GroupReduce<SumMonoid, kGroup>(mass);
    for (int64_t c = rank; c < count; c += kGroup)
      out[c] = T((expf(in[c] - stats.max) / stats.sum * mass - target[c]) * dy[row]);
  }
};

template <class T>
struct SparseCrossEntropyOp {
  const T* x;  // logits (rows, classes)
  Labels labels;
  Output loss;  // (rows)
  template <int kGroup>
  __device__ void Row(int64_t row, int64_t classes, int64_t count, int rank, bool writes) const {
    const T* in = x + row * classes;
    const Stats stats = RowStats<kGroup>(in, count, rank);
    if (!writes) return;
    const int64_t label = labels.At(row);
    const bool valid = label >= 0 && label < classes;
    loss.Store(row, valid ? logf(stats.sum) - (in[label] - stats.max) : NAN);
    if (!valid) labels.faults.OutOfRange(label, row, classes);
  }
};

template <class T>
struct SparseCrossEntropyGradientOp {
  const T* x;  // logits (rows, classes)
  Labels labels;
  RowFloats dy;
  T* dx;  // (rows, classes)
  template <int kGroup>
  __device__ void Row(int64_t row, int64_t classes, int64_t count, int rank, bool) const {
    const T* in = x + row * classes;
    T* out = dx + row * classes;
    const Stats stats = RowStats<kGroup>(in, count, rank);
    if (count == 0) return;
    const int64_t label = labels.At(row);
    const bool valid = label >= 0 && label < classes;
    const float scale = valid ? dy.At(row) : NAN;
    if (!valid && rank == 0) labels.faults.OutOfRange(label, row, classes);
    for (int64_t c = rank; c < count; c += kGroup)
      out[c] = T((expf(in[c] - stats.max) / stats.sum - (c == label ? 1.f : 0.f)) * scale);
  }
};

template <class T>
struct LikelihoodGradientOp {
  Labels labels;
  const T* dy;  // (rows)
  T* dx;        // (rows, classes)
  template <int kGroup>
  __device__ void Row(int64_t row, int64_t classes, int64_t count, int rank, bool) const {
    if (count == 0) return;
    T* out = dx + row * classes;
    const int64_t label = labels.At(row);
    const bool valid = label >= 0 && label < classes;
    const float at_label = -dy[row], elsewhere = valid ? 0.f : NAN;
    if (!valid && rank == 0) labels.faults.OutOfRange(label, row, classes);
    for (int64_t c = rank; c < count; c += kGroup) out[c] = T(c == label ? at_label : elsewhere);
  }
};

// x (rows, classes) -> loss (rows), a thread a row; it reads one element.
template <class T>
__global__ void LikelihoodKernel(const T* x, Labels labels, T* loss, int64_t rows,
                                 int64_t classes) {
  for (int64_t row = FirstItem(); row < rows; row += ItemStep()) {
    const int64_t label = labels.At(row);
    const bool valid = label >= 0 && label < classes;
    loss[row] = T(valid ? -x[row * classes + label] : NAN);
    if (!valid) labels.faults.OutOfRange(label, row, classes);
  }
}

// ---- launchers ----

template <class Op>
void RunRows(const char* op, const Rows& rows, const Op& body, DLStream stream) {
  const int64_t n = rows.count;
  if (rows.classes <= 16) {
    Launch(op, RowsKernel<16, Op>, Blocks(n, kThreads / 16), kThreads, 0, stream, n, rows.classes,
           body);
  } else if (rows.classes <= 512) {
    Launch(op, RowsKernel<32, Op>, Blocks(n, kThreads / 32), kThreads, 0, stream, n, rows.classes,
           body);
  } else {
    Launch(op, RowsKernel<kThreads, Op>, Blocks(n, 1), kThreads, 0, stream, n, rows.classes, body);
  }
}

template <class T>
void Softmax(const DLArray* x, DLArray* y, DLStream stream) {
  Enter("softmax", y, x);
  CheckSameShape("softmax", x, y);
  RunRows("softmax", Rows("softmax", x), SoftmaxOp<T>{In<T>("softmax", x), Out<T>("softmax", y)},
          stream);
}

template <class T>
void LogSoftmax(const DLArray* x, DLArray* y, DLStream stream) {
  Enter("log_softmax", y, x);
  CheckSameShape("log_softmax", x, y);
  RunRows("log_softmax", Rows("log_softmax", x),
          LogSoftmaxOp<T>{In<T>("log_softmax", x), Out<T>("log_softmax", y)}, stream);
}

template <class T>
void CrossEntropy(const DLArray* x, const DLArray* labels, DLArray* loss, DLStream stream) {
  const char* op = "softmax_cross_entropy";
  Enter(op, loss, x, labels);
  CheckSameShape(op, x, labels);
  const Rows rows(op, x);
  CheckOneARow(op, "loss", loss, x, rows);
  RunRows(op, rows, CrossEntropyOp<T, T>{In<T>(op, x), In<T>(op, labels), Out<T>(op, loss)},
          stream);
}

template <class T>
void SparseCrossEntropy(const DLArray* x, const DLArray* labels, DLArray* loss, DLStream stream) {
  const char* op = "sparse_softmax_cross_entropy";
  Enter(op, loss, x, labels);
  const Rows rows(op, x);
  CheckOneARow(op, "loss", loss, x, rows);
  const T* logits = In<T>(op, x);
  const Labels checked = CheckedLabels(op, labels, x, rows);
  const Output losses =
      loss->dtype == DL_FLOAT32 ? Output(Out(op, loss)) : Output(Out<T>(op, loss));
  if (HasLongRows(rows.classes, logits, logits))
    return RunLongRows(op, x->ctx.device_id, logits, rows, checked, (T*)nullptr, RowLosses{losses},
                       stream);
  RunRows(op, rows, SparseCrossEntropyOp<T>{logits, checked, losses}, stream);
}

template <class T>
void CrossEntropyGradient(const DLArray* x, const DLArray* labels, const DLArray* dy, DLArray* dx,
                          DLStream stream) {
  const char* op = "softmax_cross_entropy_gradient";
  Enter(op, dx, x, labels, dy);
  CheckSameShape(op, x, labels);
  CheckSameShape(op, x, dx);
  const Rows rows(op, x);
  CheckOneARow(op, "dy", dy, x, rows);
  RunRows(op, rows,
          CrossEntropyGradientOp<T>{In<T>(op, x), In<T>(op, labels), In<T>(op, dy), Out<T>(op, dx)},
          stream);
}

template <class T>
void SparseCrossEntropyGradient(const DLArray* x, const DLArray* labels, const DLArray* dy,
                                DLArray* dx, DLStream stream) {
  const char* op = "sparse_softmax_cross_entropy_gradient";
  Enter(op, dx, x, labels, dy);
  CheckSameShape(op, x, dx);
  const Rows rows(op, x);
  CheckOneARow(op, "dy", dy, x, rows);
  const Labels checked = CheckedLabels(op, labels, x, rows);
  const bool wide = dy->dtype == DL_FLOAT32;
  const RowFloats values{wide ? (const void*)In(op, dy) : In<T>(op, dy), dy->dtype};
  const T* logits = In<T>(op, x);
  T* to = Out<T>(op, dx);
  if (HasLongRows(rows.classes, logits, to))
    return RunLongRows(op, x->ctx.device_id, logits, rows, checked, to, RowGradients{values},
                       stream);
  RunRows(op, rows, SparseCrossEntropyGradientOp<T>{logits, checked, values, to}, stream);
}

template <class T>
void NegativeLogLikelihood(const DLArray* x, const DLArray* labels, DLArray* loss,
                           DLStream stream) {
  const char* op = "negative_log_likelihood";
  Enter(op, loss, x, labels);
  const Rows rows(op, x);
  CheckOneARow(op, "loss", loss, x, rows);
  Launch(op, LikelihoodKernel<T>, Blocks(rows.count), kThreads, 0, stream, In<T>(op, x),
         CheckedLabels(op, labels, x, rows), Out<T>(op, loss), rows.count, rows.classes);
}

template <class T>
void NegativeLogLikelihoodGradient(const DLArray* labels, const DLArray* dy, DLArray* dx,
                                   DLStream stream) {
  const char* op = "negative_log_likelihood_gradient";
  Enter(op, dx, labels, dy);
  const Rows rows(op, dx);
  CheckOneARow(op, "dy", dy, dx, rows);
  const Labels checked = CheckedLabels(op, labels, dx, rows);
  RunRows(op, rows, LikelihoodGradientOp<T>{checked, In<T>(op, dy), Out<T>(op, dx)}, stream);
}

// The losses of the rows go to scratch, then their mean. The mean of no rows is NaN, as in numpy.
template <class T>
void CrossEntropyMean(const DLArray* x, const DLArray* labels, DLArray* loss, DLStream stream) {
  const char* op = "softmax_cross_entropy_mean";
  Enter(op, loss, x, labels);
  CheckSameShape(op, x, labels);
  if (Numel(loss) != 1)
    Fail("%s: expected a loss of 1 element, got shape %s", op, ShapeText(loss).c_str());
  const Rows rows(op, x);
  Scratch per_row(loss->ctx, rows.count * (int64_t)sizeof(float), stream);
  RunRows(op, rows, CrossEntropyOp<T, float>{In<T>(op, x), In<T>(op, labels), per_row.floats()},
          stream);
  SumAxis(op, loss->ctx, per_row.floats(), 1, rows.count, 1, 1.f / (float)rows.count,
          Out<T>(op, loss), stream);
}

DLSYS_KERNEL_TYPED(cuda, softmax, Softmax);
DLSYS_KERNEL_TYPED(cuda, log_softmax, LogSoftmax);
DLSYS_KERNEL_TYPED(cuda, softmax_cross_entropy, CrossEntropy);
DLSYS_KERNEL_TYPED(cuda, softmax_cross_entropy_gradient, CrossEntropyGradient);
DLSYS_KERNEL_TYPED(cuda, sparse_softmax_cross_entropy, SparseCrossEntropy);
DLSYS_KERNEL_TYPED(cuda, sparse_softmax_cross_entropy_gradient, SparseCrossEntropyGradient);
DLSYS_KERNEL_TYPED(cuda, negative_log_likelihood, NegativeLogLikelihood);
DLSYS_KERNEL_TYPED(cuda, negative_log_likelihood_gradient, NegativeLogLikelihoodGradient);
DLSYS_KERNEL_TYPED(cuda, softmax_cross_entropy_mean, CrossEntropyMean);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
