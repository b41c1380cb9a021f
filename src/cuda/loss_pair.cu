// Softmax cross-entropy summed over rows x (rows, classes), and its gradient where all rows count
// the same, in one launch: a row is read from the cache for both. Rows and labels are as in
// softmax.cu; outputs overlap no input.
#include "cuda/softmax.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// Row writes the gradient of a row and returns its loss, the same in every lane. `classes` is the
// length of a row, `count` the same, or 0 for lanes without a row, which have to meet the others.

struct CrossEntropyPairOp {
  const float* x;       // logits (rows, classes)
  const float* labels;  // (rows, classes)
  float dy;
  float* dx;  // (rows, classes)
  template <int kLanes>
  __device__ float Row(int64_t row, int64_t classes, int64_t count, int lane) const {
    const float* in = x + row * classes;
    const float* target = labels + row * classes;
    float* out = dx + row * classes;
    const Stats stats = RowStats<kLanes>(in, count, lane);
    const float log_sum = logf(stats.sum);
    float mass = 0.f, loss = 0.f;
    for (int64_t c = lane; c < count; c += kLanes) {
      mass += target[c];
      loss += target[c] * (log_sum - (in[c] - stats.max));
    }
    mass = Join<SumOf, kLanes>(mass);
    for (int64_t c = lane; c < count; c += kLanes)
      out[c] = (expf(in[c] - stats.max) / stats.sum * mass - target[c]) * dy;
    return Join<SumOf, kLanes>(loss);
  }
};

struct SparseCrossEntropyPairOp {
  const float* x;  // logits (rows, classes)
  Labels labels;
  float dy;
  float* dx;  // (rows, classes)
  template <int kLanes>
  __device__ float Row(int64_t row, int64_t classes, int64_t count, int lane) const {
    const float* in = x + row * classes;
    float* out = dx + row * classes;
    const Stats stats = RowStats<kLanes>(in, count, lane);
    if (count == 0) return 0.f;
    const int64_t label = labels.At(row);
    const bool valid = label >= 0 && label < classes;
    const float scale = valid ? dy : NAN;
    const float loss = valid ? logf(stats.sum) - (in[label] - stats.max) : NAN;
    for (int64_t c = lane; c < count; c += kLanes)
      out[c] = (expf(in[c] - stats.max) / stats.sum - (c == label ? 1.f : 0.f)) * scale;
    return loss;
  }
};

// Where the blocks of one launch meet: sums (kMeetingPlaces), one a block, and how many blocks have
// arrived, 0 between launches.
struct Meeting {
  float* sums;
  unsigned* arrived;
};
constexpr int kMeetingPlaces = 511;

// Runs op on every row; loss[0] is `scale` times the sum of what it returns. The last block to
// arrive adds the blocks' sums, always in the order of the blocks.
template <int kLanes, class Op>
__global__ void LossKernel(int64_t rows, int64_t classes, Op op, Meeting meeting, float scale,
                           float* loss) {
  constexpr int kGroups = kThreads / kLanes;
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  WaitForEarlierKernels();
  float sum = 0.f;
  for (int64_t first = (int64_t)blockIdx.x * kGroups; first < rows;
       first += (int64_t)gridDim.x * kGroups) {
    const int64_t row = first + group;
    const bool exists = row < rows;
    const float of_row =
        op.template Row<kLanes>(exists ? row : 0, classes, exists ? classes : 0, lane);
    if (exists && lane == 0) sum += of_row;
  }
  LetNextKernelBegin();
  sum = Join<SumOf, kThreads>(sum);
  __shared__ bool last;
  if (threadIdx.x == 0) {
    meeting.sums[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(meeting.arrived, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  sum = 0.f;
  for (int block = threadIdx.x; block < gridDim.x; block += kThreads)
    sum += __ldcg(meeting.sums + block);
  sum = Join<SumOf, kThreads>(sum);
  if (threadIdx.x == 0) {
    *loss = scale * sum;
    *meeting.arrived = 0;
  }
}

// ---- launchers ----

template <class Op>
void RunLoss(const char* op, int device, const Rows& rows, const Op& body, const Meeting& meeting,
             float scale, float* loss, DLStream stream) {
  const bool early = ComputeMajor(device) >= 9;
  const auto run = [&](auto kernel, int lanes) {
    const unsigned wanted = Blocks(rows.count, kThreads / lanes);
    const unsigned blocks = wanted < kMeetingPlaces ? (wanted ? wanted : 1) : kMeetingPlaces;
    LaunchClusters(op, kernel, blocks, 1, kThreads, early, stream, rows.count, rows.classes, body,
                   meeting, scale, loss);
  };
  if (rows.classes <= 16) return run(LossKernel<16, Op>, 16);
  if (rows.classes <= 512) return run(LossKernel<32, Op>, 32);
  run(LossKernel<kThreads, Op>, kThreads);
}

// The meeting is the int32 array of kMeetingPlaces + 1 zeros that a plan holds for the launch; it
// is zero again when the launch is done, in what other launches may see.
Meeting CheckedMeeting(const char* op, const DLArray* meeting) {
  if (meeting->dtype != DL_INT32 || Numel(meeting) != kMeetingPlaces + 1)
    Fail("%s: expected %d int32 zeros to meet at, got %s of %s", op, kMeetingPlaces + 1,
         ShapeText(meeting).c_str(), DtypeText(meeting->dtype));
  return Meeting{(float*)meeting->data + 1, (unsigned*)meeting->data};
}

void CheckLoss(const char* op, const DLArray* loss) {
  if (Numel(loss) != 1)
    Fail("%s: expected a loss of 1 element, got shape %s", op, ShapeText(loss).c_str());
}

// loss = scale * the sum of the rows' losses, dx = their gradients times dy.
void CrossEntropyPair(const DLArray* x, const DLArray* labels, const DLArray* meeting, float scale,
                      float dy, DLArray* loss, DLArray* dx, DLStream stream) {
  const char* op = "softmax_cross_entropy_pair";
  Enter(op, loss, x, labels, meeting, dx);
  CheckSameShape(op, x, labels);
  CheckSameShape(op, x, dx);
  CheckLoss(op, loss);
  const Rows rows(op, x);
  RunLoss(op, x->ctx.device_id, rows,
          CrossEntropyPairOp{In(op, x), In(op, labels), dy, Out(op, dx)},
          CheckedMeeting(op, meeting), scale, Out(op, loss), stream);
}

void SparseCrossEntropyPair(const DLArray* x, const DLArray* labels, const DLArray* meeting,
                            float scale, float dy, DLArray* loss, DLArray* dx, DLStream stream) {
  const char* op = "sparse_softmax_cross_entropy_pair";
  Enter(op, loss, x, labels, meeting, dx);
  CheckSameShape(op, x, dx);
  CheckLoss(op, loss);
  const Rows rows(op, x);
  const Labels checked = CheckedLabels(op, labels, x, rows);
  RunLoss(op, x->ctx.device_id, rows, SparseCrossEntropyPairOp{In(op, x), checked, dy, Out(op, dx)},
          CheckedMeeting(op, meeting), scale, Out(op, loss), stream);
}

DLSYS_KERNEL(cuda, softmax_cross_entropy_pair, CrossEntropyPair);
DLSYS_KERNEL(cuda, sparse_softmax_cross_entropy_pair, SparseCrossEntropyPair);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
