// Device code that fused cross-entropy shares with the fused MLP head: softmax cross-entropy of one
// row, forward and backward, and a single-pass reduction of the loss over the blocks of a launch.
//
// In the single-pass reduction each block writes its partial sum; the last block to arrive adds the
// partial sums in the order of the blocks, so every run gives the same bits.
#pragma once
#include "cuda/loss/softmax.cuh"
#include "cuda/reduce/reduce.cuh"

namespace dlsys {
namespace cuda {

// Row(in, row, label, ...) returns the loss of the logits `in` of a row, the same in every thread
// of its group, and calls put(c, d) with the gradient of class c. `label` is what LoadLabel
// returned, which is called first so that the load overlaps other work. `classes` is the length of
// a row; `count` is the same, or 0 for a group without a row, which has to reach the barriers as
// well.
//
// RowOfLanes(logit, row, label, classes, put) is the same of a warp and at most kMostInLanes
// classes, whose logits lie in registers: that of class c in lanes 2 c and 2 c + 1, of which the
// first calls put.
constexpr int kMostInLanes = 16;

// The statistics of such a row, and this lane's class.
struct LaneStats {
  int c;
  bool exists, calls;           // the class exists, and this lane calls put
  float max, exponential, sum;  // exponential: exp(x - max), 0 where the class does not exist

  __device__ __forceinline__ LaneStats(float logit, int classes)
      : c((int)threadIdx.x % 32 / 2), exists(c < classes), calls(exists && threadIdx.x % 2 == 0) {
    max = OverClasses<MaxMonoid>(exists ? logit : -INFINITY);
    exponential = exists ? expf(logit - max) : 0.f;
    sum = OverClasses<SumMonoid>(exponential);
  }

  template <class Op>
  static __device__ __forceinline__ float OverClasses(float value) {
#pragma unroll
    for (int distance = kMostInLanes; distance > 1; distance /= 2)
      value = Op::Combine(value, ShuffleXor(value, distance, 32));
    return value;
  }
};

template <class T>
struct DenseLabelsOf {
  const T* of;  // (rows, classes)
  float dy;
  __device__ __forceinline__ int LoadLabel(int64_t, bool) const { return 0; }
  template <int kGroup, int kUnroll = 4, class Put>
  __device__ float Row(const T* in, int64_t row, int, int64_t classes, int64_t count, int rank,
                       const Put& put) const {
    const T* target = of + row * classes;
    const Stats stats = RowStats<kGroup, kUnroll>(in, count, rank);
    const float log_sum = logf(stats.sum);
    float mass = 0.f, loss = 0.f;
#pragma unroll kUnroll
    for (int64_t c = rank; c < count; c += kGroup) {
      mass += target[c];
      loss += target[c] * (log_sum - (in[c] - stats.max));
    }
    mass = GroupReduce<SumMonoid, kGroup>(mass);
#pragma unroll kUnroll
    for (int64_t c = rank; c < count; c += kGroup)
      put(c, (expf(in[c] - stats.max) / stats.sum * mass - target[c]) * dy);
    return GroupReduce<SumMonoid, kGroup>(loss);
  }
  template <class Put>
  __device__ __forceinline__ float RowOfLanes(float logit, int64_t row, int, int classes,
                                              const Put& put) const {
    const LaneStats stats(logit, classes);
    const float target = stats.exists ? of[row * classes + stats.c] : 0.f;
    const float mass = LaneStats::OverClasses<SumMonoid>(target);
    if (stats.calls) put(stats.c, (stats.exponential / stats.sum * mass - target) * dy);
    const float loss = target * (logf(stats.sum) - (logit - stats.max));
    return LaneStats::OverClasses<SumMonoid>(stats.exists ? loss : 0.f);
  }
};

using DenseLabels = DenseLabelsOf<float>;

struct SparseLabels {
  Labels of;
  float dy;
  __device__ __forceinline__ int64_t LoadLabel(int64_t row, bool exists) const {
    return exists ? of.At(row) : 0;
  }
  template <int kGroup, int kUnroll = 4, class T, class Put>
  __device__ float Row(const T* in, int64_t row, int64_t label, int64_t classes, int64_t count,
                       int rank, const Put& put) const {
    const bool valid = label >= 0 && label < classes;
    // Read before the barriers, behind which the gradient may overwrite it.
    const float logit = count && valid ? (float)in[label] : NAN;
    const Stats stats = RowStats<kGroup, kUnroll>(in, count, rank);
    if (count == 0) return 0.f;
    const float scale = valid ? dy : NAN;
    const float loss = logf(stats.sum) - (logit - stats.max);
    if (!valid && rank == 0) of.faults.OutOfRange(label, row, classes);
#pragma unroll kUnroll
    for (int64_t c = rank; c < count; c += kGroup)
      put(c, (expf(in[c] - stats.max) / stats.sum - (c == label ? 1.f : 0.f)) * scale);
    return loss;
  }
  template <class Put>
  __device__ __forceinline__ float RowOfLanes(float logit, int64_t row, int64_t label, int classes,
                                              const Put& put) const {
    const bool valid = label >= 0 && label < classes;
    const LaneStats stats(logit, classes);
    const float scale = valid ? dy : NAN;
    if (stats.calls)
      put(stats.c, (stats.exponential / stats.sum - (stats.c == label ? 1.f : 0.f)) * scale);
    if (!valid && threadIdx.x % 32 == 0) of.faults.OutOfRange(label, row, classes);
    const float own = __shfl_sync(0xffffffffu, logit, valid ? 2 * (int)label : 0);
    return valid ? logf(stats.sum) - (own - stats.max) : NAN;
  }
};

// The workspace of a single-pass reduction: a partial sum a block (kMaxPartials), and the arrival
// counter. All are 0 between launches.
struct GridReduction {
  unsigned *partials, *arrived;
};
constexpr int kMaxPartials = 511;

// Counts this block's arrival; returns to its first thread how many blocks arrived before. Call it
// after GridDependencySynchronize, and long before FinishGridSum, so that the atomic's latency is
// hidden.
__device__ __forceinline__ unsigned Arrive(const GridReduction& reduction) {
  return threadIdx.x == 0 ? atomicAdd(reduction.arrived, 1u) : 0;
}

// Publishes a block's sum, which its first thread has.
__device__ __forceinline__ void PublishBlockSum(float block_sum, const GridReduction& reduction) {
  if (threadIdx.x > 0) return;
  // The bits of the sum plus 1: nonzero, which marks it as written.
  const unsigned bits = __float_as_uint(isnan(block_sum) ? NAN : block_sum);
  *(volatile unsigned*)(reduction.partials + blockIdx.x) = bits + 1u;
}

// The same of the sum of what lies in shared memory, in its order.
template <int kCount>
__device__ __forceinline__ void PublishBlockSum(const float (&parts)[kCount],
                                                const GridReduction& reduction) {
  if (threadIdx.x > 0) return;
  float sum = parts[0];
#pragma unroll
  for (int k = 1; k < kCount; k++) sum += parts[k];
  PublishBlockSum(sum, reduction);
}

// total[0] = `scale` times the sum over the blocks of what they published. The last block to arrive
// adds that in the order of the blocks. It spins until all of it is written, which cannot deadlock:
// the other blocks have started and wait for nobody. All kBlock threads of a block call it.
template <int kBlock = kThreads>
__device__ __forceinline__ void FinishGridSum(unsigned arrival, const GridReduction& reduction,
                                              float scale, Output total) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) is_last = arrival == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  float sum = 0.f;
  for (int block = threadIdx.x; block < gridDim.x; block += kBlock) {
    volatile unsigned* partial = reduction.partials + block;
    unsigned bits;
    do bits = *partial;
    while (bits == 0);
    *partial = 0;
    sum += __uint_as_float(bits - 1u);
  }
  sum = GroupReduce<SumMonoid, kBlock>(sum);
  if (threadIdx.x == 0) {
    total.Store(0, scale * sum);
    *reduction.arrived = 0;
  }
}

template <int kBlock = kThreads>
__device__ __forceinline__ void FinishGridSum(float block_sum, unsigned arrival,
                                              const GridReduction& reduction, float scale,
                                              Output total) {
  PublishBlockSum(block_sum, reduction);
  FinishGridSum<kBlock>(arrival, reduction, scale, total);
}

// loss[0] = `scale` times the sum of the losses of the rows of x (rows, classes), dx = their
// gradients.
void RunFusedCrossEntropy(const char* op, int device, const float* x, int64_t rows, int64_t classes,
                          const DenseLabels& labels, float* dx, const GridReduction& reduction,
                          float scale, Output loss, DLStream stream);
void RunFusedCrossEntropy(const char* op, int device, const float* x, int64_t rows, int64_t classes,
                          const SparseLabels& labels, float* dx, const GridReduction& reduction,
                          float scale, Output loss, DLStream stream);

// Class indices for logits x, with gradients scaled by `dy`. Faults name the unfused operator,
// which is the one that the user wrote.
inline SparseLabels CheckedClasses(const char* op, const DLArray* labels, const DLArray* x,
                                   float dy) {
  SparseLabels checked{CheckedLabels(op, labels, x, Rows(op, x)), dy};
  checked.of.faults.op = "sparse_softmax_cross_entropy";
  return checked;
}

inline GridReduction CheckedReduction(const char* op, const DLArray* workspace) {
  unsigned* arrived = CheckedCounters(op, workspace, kMaxPartials + 1);
  return GridReduction{arrived + 1, arrived};
}

// The loss, of T or float32.
template <class T = float>
inline Output CheckedLoss(const char* op, DLArray* loss) {
  if (Numel(loss) != 1)
    Fail("%s: expected a loss of 1 element, got shape %s", op, ShapeText(loss).c_str());
  return loss->dtype == DL_FLOAT32 ? Output(Out(op, loss)) : Output(Out<T>(op, loss));
}

// What a kernel needs to reduce the losses of its rows.
struct LossArgs {
  GridReduction reduction;
  float scale;
  Output loss;
};

}  // namespace cuda
}  // namespace dlsys
