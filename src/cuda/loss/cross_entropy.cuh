// The softmax cross-entropy of one row and its gradient, and how the blocks of a launch add up what
// they have, for the kernels that do this among other things.
#pragma once
#include "cuda/loss/softmax.cuh"

namespace dlsys {
namespace cuda {

// Row(in, row, held, ...) returns the loss of the logits `in` of a row, the same in every lane, and
// calls put(c, d) with the gradient of class c. `held` is what Hold finds for the row, early where
// there is something to do meanwhile. `classes` is the length of a row, `count` the same, or 0 for
// lanes without a row, which have to meet the others.

struct DenseLabels {
  const float* of;  // (rows, classes)
  float dy;
  __device__ __forceinline__ int Hold(int64_t, bool) const { return 0; }
  template <int kLanes, int kUnroll = 4, class Put>
  __device__ float Row(const float* in, int64_t row, int, int64_t classes, int64_t count, int lane,
                       const Put& put) const {
    const float* target = of + row * classes;
    const Stats stats = RowStats<kLanes, kUnroll>(in, count, lane);
    const float log_sum = logf(stats.sum);
    float mass = 0.f, loss = 0.f;
#pragma unroll kUnroll
    for (int64_t c = lane; c < count; c += kLanes) {
      mass += target[c];
      loss += target[c] * (log_sum - (in[c] - stats.max));
    }
    mass = Join<SumOf, kLanes>(mass);
#pragma unroll kUnroll
    for (int64_t c = lane; c < count; c += kLanes)
      put(c, (expf(in[c] - stats.max) / stats.sum * mass - target[c]) * dy);
    return Join<SumOf, kLanes>(loss);
  }
};

struct SparseLabels {
  Labels of;
  float dy;
  __device__ __forceinline__ int64_t Hold(int64_t row, bool exists) const {
    return exists ? of.At(row) : 0;
  }
  template <int kLanes, int kUnroll = 4, class Put>
  __device__ float Row(const float* in, int64_t row, int64_t label, int64_t classes, int64_t count,
                       int lane, const Put& put) const {
    const Stats stats = RowStats<kLanes, kUnroll>(in, count, lane);
    if (count == 0) return 0.f;
    const bool valid = label >= 0 && label < classes;
    const float scale = valid ? dy : NAN;
    const float loss = valid ? logf(stats.sum) - (in[label] - stats.max) : NAN;
    if (!valid && lane == 0) of.faults.OutOfRange(label, row, classes);
#pragma unroll kUnroll
    for (int64_t c = lane; c < count; c += kLanes)
      put(c, (expf(in[c] - stats.max) / stats.sum - (c == label ? 1.f : 0.f)) * scale);
    return loss;
  }
};

// Where the blocks of one launch meet: a place for each block's sum (kMeetingPlaces), and how many
// blocks have come. All are 0 between launches.
struct Meeting {
  unsigned *places, *come;
};
constexpr int kMeetingPlaces = 511;

// How many blocks came before this one, for its first thread. Call it after
// GridDependencySynchronize, and long before AddUp: the answer takes a while.
__device__ __forceinline__ unsigned Come(const Meeting& meeting) {
  return threadIdx.x == 0 ? atomicAdd(meeting.come, 1u) : 0;
}

// total[0] is `scale` times the sum of the blocks' sums, which their first threads have. The block
// that came last adds them, always in the order of the blocks: it waits for the others, which have
// all begun, and these wait for nobody. A whole block of kThreads calls it.
__device__ __forceinline__ void AddUp(float of_block, unsigned came_before, const Meeting& meeting,
                                      float scale, float* total) {
  __shared__ bool came_last;
  if (threadIdx.x == 0) {
    // A place that is taken is not 0: it has the sum's bits and 1 more.
    const unsigned bits = __float_as_uint(isnan(of_block) ? NAN : of_block);
    *(volatile unsigned*)(meeting.places + blockIdx.x) = bits + 1u;
    came_last = came_before == gridDim.x - 1;
  }
  __syncthreads();
  if (!came_last) return;
  float sum = 0.f;
  for (int block = threadIdx.x; block < gridDim.x; block += kThreads) {
    volatile unsigned* place = meeting.places + block;
    unsigned there;
    do there = *place;
    while (there == 0);
    *place = 0;
    sum += __uint_as_float(there - 1u);
  }
  sum = Join<SumOf, kThreads>(sum);
  if (threadIdx.x == 0) {
    *total = scale * sum;
    *meeting.come = 0;
  }
}

// The losses of x (rows, classes) summed times `scale`, and the gradients of all rows in dx.
void RunPair(const char* op, int device, const float* x, int64_t rows, int64_t classes,
             const DenseLabels& labels, float* dx, const Meeting& meeting, float scale, float* loss,
             DLStream stream);
void RunPair(const char* op, int device, const float* x, int64_t rows, int64_t classes,
             const SparseLabels& labels, float* dx, const Meeting& meeting, float scale,
             float* loss, DLStream stream);

// Class numbers of logits x whose gradients are scaled by `dy`. Faults name the operator that was
// asked for, of which these kernels are the faster form.
inline SparseLabels CheckedClasses(const char* op, const DLArray* labels, const DLArray* x,
                                   float dy) {
  SparseLabels checked{CheckedLabels(op, labels, x, Rows(op, x)), dy};
  checked.of.faults.op = "sparse_softmax_cross_entropy";
  return checked;
}

inline Meeting CheckedMeeting(const char* op, const DLArray* meeting) {
  unsigned* come = CheckedMeeting(op, meeting, kMeetingPlaces + 1);
  return Meeting{come + 1, come};
}

inline float* CheckedLoss(const char* op, DLArray* loss) {
  if (Numel(loss) != 1)
    Fail("%s: expected a loss of 1 element, got shape %s", op, ShapeText(loss).c_str());
  return Out(op, loss);
}

}  // namespace cuda
}  // namespace dlsys
