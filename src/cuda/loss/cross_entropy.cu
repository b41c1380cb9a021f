// Fused cross-entropy: softmax cross-entropy summed over rows x (rows, classes), forward and
// backward in one launch, where all rows have the same gradient.
//
// A thread group takes a row, as in softmax.cu, and reads it again from the cache for the gradient;
// rows of thousands of classes with class indices are those of long_rows.cuh. The loss is a
// single-pass reduction over the blocks, and float32 where told to. Statistics are float32. Each
// element of the gradient is written by the thread that reads the logit last, so that it may
// overwrite the logits. Memory bandwidth limits it, for few rows the latency of the launch.
#include "cuda/loss/long_rows.cuh"

namespace dlsys {
namespace cuda {
namespace {

// loss[0] = `scale` times the sum of the losses of the rows, dx (rows, classes) = their gradients.
template <int kGroup, class T, class Op>
__global__ void FusedCrossEntropyKernel(int64_t rows, int64_t classes, const T* x, Op op, T* dx,
                                        GridReduction reduction, float scale, Output loss) {
  constexpr int kGroups = kThreads / kGroup;
  const int group = threadIdx.x / kGroup;
  const int rank = threadIdx.x % kGroup;
  GridDependencySynchronize();
  const unsigned arrival = Arrive(reduction);
  float sum = 0.f;
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < rows;
       first += (int64_t)gridDim.x * kGroups) {
    const bool exists = first + group < rows;
    const int64_t row = exists ? first + group : 0;
    T* out = dx + row * classes;
    const float row_loss = op.template Row<kGroup>(
        x + row * classes, row, op.LoadLabel(row, exists), classes, exists ? classes : 0, rank,
        [&](int64_t c, float d) { out[c] = T(d); });
    if (exists && rank == 0) sum += row_loss;
  }
  TriggerProgrammaticLaunch();
  FinishGridSum(GroupReduce<SumMonoid, kThreads>(sum), arrival, reduction, scale, loss);
}

template <class T, class Op>
void RunRows(const char* op, int device, const T* x, int64_t rows, int64_t classes, const Op& body,
             T* dx, const GridReduction& reduction, float scale, Output loss, DLStream stream) {
  const auto run = [&](auto kernel, int group) {
    const unsigned wanted = Blocks(rows, kThreads / group);
    const unsigned blocks = wanted < kMaxPartials ? (wanted ? wanted : 1) : kMaxPartials;
    LaunchClusters(op, kernel, blocks, 1, kThreads, 0, ComputeMajor(device) >= 9, stream, rows,
                   classes, x, body, dx, reduction, scale, loss);
  };
  if constexpr (std::is_same_v<Op, SparseLabels>)
    if (HasLongRows(classes, x, dx))
      return RunFusedLongRows(op, device, x, rows, classes, body, dx, reduction, scale, loss,
                              stream);
  if (classes <= 16) return run(FusedCrossEntropyKernel<16, T, Op>, 16);
  if (classes <= 512) return run(FusedCrossEntropyKernel<32, T, Op>, 32);
  run(FusedCrossEntropyKernel<kThreads, T, Op>, kThreads);
}

}  // namespace

void RunFusedCrossEntropy(const char* op, int device, const float* x, int64_t rows, int64_t classes,
                          const DenseLabels& labels, float* dx, const GridReduction& reduction,
                          float scale, Output loss, DLStream stream) {
  RunRows(op, device, x, rows, classes, labels, dx, reduction, scale, loss, stream);
}
void RunFusedCrossEntropy(const char* op, int device, const float* x, int64_t rows, int64_t classes,
                          const SparseLabels& labels, float* dx, const GridReduction& reduction,
                          float scale, Output loss, DLStream stream) {
  RunRows(op, device, x, rows, classes, labels, dx, reduction, scale, loss, stream);
}

namespace {

// loss = scale * the sum of the losses of the rows, dx = their gradients times dy.
template <class T>
void FusedCrossEntropy(const DLArray* x, const DLArray* labels, const DLArray* workspace,
                       float scale, float dy, DLArray* loss, DLArray* dx, DLStream stream) {
  const char* op = "fused_cross_entropy";
  Enter(op, loss, x, labels, workspace, dx);
  CheckSameShape(op, x, labels);
  CheckSameShape(op, x, dx);
  const Rows rows(op, x);
  RunRows(op, x->ctx.device_id, In<T>(op, x), rows.count, rows.classes,
          DenseLabelsOf<T>{In<T>(op, labels), dy}, Out<T>(op, dx), CheckedReduction(op, workspace),
          scale, CheckedLoss<T>(op, loss), stream);
}

template <class T>
void FusedSparseCrossEntropy(const DLArray* x, const DLArray* labels, const DLArray* workspace,
                             float scale, float dy, DLArray* loss, DLArray* dx, DLStream stream) {
  const char* op = "fused_sparse_cross_entropy";
  Enter(op, loss, x, labels, workspace, dx);
  CheckSameShape(op, x, dx);
  const Rows rows(op, x);
  RunRows(op, x->ctx.device_id, In<T>(op, x), rows.count, rows.classes,
          CheckedClasses(op, labels, x, dy), Out<T>(op, dx), CheckedReduction(op, workspace), scale,
          CheckedLoss<T>(op, loss), stream);
}

DLSYS_KERNEL_TYPED(cuda, fused_cross_entropy, FusedCrossEntropy);
DLSYS_KERNEL_TYPED(cuda, fused_sparse_cross_entropy, FusedSparseCrossEntropy);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
