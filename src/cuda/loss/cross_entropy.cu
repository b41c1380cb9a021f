// Softmax cross-entropy summed over rows x (rows, classes), and its gradient where all rows count
// the same, in one launch: a row is read from the cache for both. Rows and labels are as in
// softmax.cu; outputs overlap no input.
#include "cuda/loss/cross_entropy.cuh"

namespace dlsys {
namespace cuda {
namespace {

// loss[0] is `scale` times the sum of the rows' losses, dx (rows, classes) has their gradients.
template <int kLanes, class Op>
__global__ void LossKernel(int64_t rows, int64_t classes, const float* x, Op op, float* dx,
                           Meeting meeting, float scale, float* loss) {
  constexpr int kGroups = kThreads / kLanes;
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  GridDependencySynchronize();
  const unsigned came_before = Come(meeting);
  float sum = 0.f;
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < rows;
       first += (int64_t)gridDim.x * kGroups) {
    const bool exists = first + group < rows;
    const int64_t row = exists ? first + group : 0;
    float* out = dx + row * classes;
    const float of_row = op.template Row<kLanes>(x + row * classes, row, op.Hold(row, exists),
                                                 classes, exists ? classes : 0, lane,
                                                 [&](int64_t c, float d) { out[c] = d; });
    if (exists && lane == 0) sum += of_row;
  }
  TriggerProgrammaticLaunch();
  AddUp(Join<SumOf, kThreads>(sum), came_before, meeting, scale, loss);
}

template <class Op>
void RunLoss(const char* op, int device, const float* x, int64_t rows, int64_t classes,
             const Op& body, float* dx, const Meeting& meeting, float scale, float* loss,
             DLStream stream) {
  const auto run = [&](auto kernel, int lanes) {
    const unsigned wanted = Blocks(rows, kThreads / lanes);
    const unsigned blocks = wanted < kMeetingPlaces ? (wanted ? wanted : 1) : kMeetingPlaces;
    LaunchClusters(op, kernel, blocks, 1, kThreads, 0, ComputeMajor(device) >= 9, stream, rows,
                   classes, x, body, dx, meeting, scale, loss);
  };
  if (classes <= 16) return run(LossKernel<16, Op>, 16);
  if (classes <= 512) return run(LossKernel<32, Op>, 32);
  run(LossKernel<kThreads, Op>, kThreads);
}

}  // namespace

void RunPair(const char* op, int device, const float* x, int64_t rows, int64_t classes,
             const DenseLabels& labels, float* dx, const Meeting& meeting, float scale, float* loss,
             DLStream stream) {
  RunLoss(op, device, x, rows, classes, labels, dx, meeting, scale, loss, stream);
}
void RunPair(const char* op, int device, const float* x, int64_t rows, int64_t classes,
             const SparseLabels& labels, float* dx, const Meeting& meeting, float scale,
             float* loss, DLStream stream) {
  RunLoss(op, device, x, rows, classes, labels, dx, meeting, scale, loss, stream);
}

namespace {

// loss = scale * the sum of the rows' losses, dx = their gradients times dy.
void CrossEntropyPair(const DLArray* x, const DLArray* labels, const DLArray* meeting, float scale,
                      float dy, DLArray* loss, DLArray* dx, DLStream stream) {
  const char* op = "fused_cross_entropy";
  Enter(op, loss, x, labels, meeting, dx);
  CheckSameShape(op, x, labels);
  CheckSameShape(op, x, dx);
  const Rows rows(op, x);
  RunPair(op, x->ctx.device_id, In(op, x), rows.count, rows.classes,
          DenseLabels{In(op, labels), dy}, Out(op, dx), CheckedMeeting(op, meeting), scale,
          CheckedLoss(op, loss), stream);
}

void SparseCrossEntropyPair(const DLArray* x, const DLArray* labels, const DLArray* meeting,
                            float scale, float dy, DLArray* loss, DLArray* dx, DLStream stream) {
  const char* op = "fused_sparse_cross_entropy";
  Enter(op, loss, x, labels, meeting, dx);
  CheckSameShape(op, x, dx);
  const Rows rows(op, x);
  RunPair(op, x->ctx.device_id, In(op, x), rows.count, rows.classes,
          CheckedClasses(op, labels, x, dy), Out(op, dx), CheckedMeeting(op, meeting), scale,
          CheckedLoss(op, loss), stream);
}

DLSYS_KERNEL(cuda, fused_cross_entropy, CrossEntropyPair);
DLSYS_KERNEL(cuda, fused_sparse_cross_entropy, SparseCrossEntropyPair);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
