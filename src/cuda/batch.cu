// Batches of a resident data set: orders of samples, and rows taken, cast and scaled.
//
// samples (count, size) of uint8 or float32 -> x (batch, size) of float32, a block a row: its first
// thread finds the sample, all of them copy it, four elements at a time where planes and addresses
// allow. Labels are moved by the same launch. The step is read from device memory, so that a
// captured program takes the next batch when it has advanced. An index out of range makes its row
// NaN: a kernel cannot fail. Outputs never overlap inputs.
#include "batch.h"
#include "cuda/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

using batch::Affine;
using batch::Labels;
using batch::Order;

// ---- which samples: At(i) is the one of row i, -1 where it does not exist ----

struct Given {
  Indices indices;
  int64_t count;
  __device__ int64_t At(int64_t i) const {
    const int64_t at = indices[i];
    return at >= 0 && at < count ? at : -1;
  }
};

struct Next {
  Order order;
  const int64_t* step;
  int64_t batch;
  __device__ int64_t At(int64_t i) const {
    return order.At((uint64_t)*step * (uint64_t)batch + (uint64_t)i);
  }
};

// ---- kernels ----

__global__ void IndexKernel(Next next, int64_t* index) {
  for (int64_t i = FirstItem(); i < next.batch; i += ItemStep()) index[i] = next.At(i);
}

template <class T>
struct Quad {
  T of[4];
};
template <>
struct alignas(4) Quad<uint8_t> {
  uint8_t of[4];
};
template <>
struct alignas(16) Quad<float> {
  float of[4];
};

// Affine::Of, which without a shift rounds once: then float does, at a fraction of the cost.
template <class T>
__device__ __forceinline__ float Scaled(T x, float scale, float shift) {
  return shift == 0.f ? fmaf((float)x, scale, 0.f) : Affine::Of(x, scale, shift);
}

// The row at `from` to the row at `to`, kWidth elements of one plane at a time. `scale` and `shift`
// are those of the first plane.
template <int kWidth, class T>
__device__ void TakeRow(const T* from, const Affine& affine, float scale, float shift, float* to) {
  const int size = (int)affine.size, inner = (int)affine.inner;
  for (int k = kWidth * (int)threadIdx.x; k < size; k += kWidth * (int)blockDim.x) {
    if (affine.channels > 1) {
      scale = affine.scale[k / inner];
      shift = affine.shift[k / inner];
    }
    if constexpr (kWidth == 4) {
      const Quad<T> x = *(const Quad<T>*)(from + k);
      Quad<float> y;
#pragma unroll
      for (int j = 0; j < 4; j++) y.of[j] = Scaled(x.of[j], scale, shift);
      *(Quad<float>*)(to + k) = y;
    } else {
      to[k] = Scaled(from[k], scale, shift);
    }
  }
}

// What takes long to come is asked for before it is needed: scale and shift while the first thread
// looks for the sample, the label before the row.
template <int kWidth, class T, class Rows>
__global__ void TakeKernel(Rows rows, const T* samples, Affine affine, float* x, int64_t n,
                           Labels labels) {
  __shared__ int64_t chosen;
  WaitForEarlierKernels();
  const float scale = affine.scale[0], shift = affine.shift[0];
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    if (threadIdx.x == 0) chosen = rows.At(i);
    __syncthreads();
    const int64_t row = chosen;
    const uint8_t* label = labels.from + row * labels.nbytes;
    uint8_t* to_label = labels.to + i * labels.nbytes;
    const bool has_byte = threadIdx.x < labels.nbytes;
    const uint8_t byte = has_byte ? label[threadIdx.x] : 0;
    float* to = x + i * affine.size;
    if (row < 0)
      for (int64_t k = threadIdx.x; k < affine.size; k += blockDim.x) to[k] = NAN;
    else
      TakeRow<kWidth>(samples + row * affine.size, affine, scale, shift, to);
    if (has_byte) to_label[threadIdx.x] = byte;
    for (int64_t k = threadIdx.x + blockDim.x; k < labels.nbytes; k += blockDim.x)
      to_label[k] = label[k];
    __syncthreads();  // everybody has read `chosen`
  }
}

// ---- launchers ----

template <class T, class Rows>
void TakeOf(const char* op, const Rows& rows, const DLArray* samples, const Affine& affine,
            float* x, int64_t n, const Labels& labels, DLStream stream) {
  const T* from = (const T*)samples->data;
  const bool quads = affine.inner % 4 == 0 && Aligned16(from) && Aligned16(x);
  const int64_t items = quads ? affine.size / 4 : affine.size;
  const int64_t threads = items < kThreads ? CeilDiv(items + (items == 0), 32) * 32 : kThreads;
  const bool early = ComputeMajor(samples->ctx.device_id) >= 9;
  LaunchClusters(op, quads ? TakeKernel<4, T, Rows> : TakeKernel<1, T, Rows>, Blocks(n, 1), 1,
                 (unsigned)threads, 0, early, stream, rows, from, affine, x, n, labels);
}

template <class Rows>
void Take(const char* op, const Rows& rows, const DLArray* samples, const Affine& affine, float* x,
          int64_t n, const Labels& labels, DLStream stream) {
  if (affine.size > INT32_MAX / 2)
    Fail("%s: a sample has %lld elements, too many for a row", op, (long long)affine.size);
  if (samples->dtype == DL_UINT8)
    TakeOf<uint8_t>(op, rows, samples, affine, x, n, labels, stream);
  else
    TakeOf<float>(op, rows, samples, affine, x, n, labels, stream);
}

void ShuffledIndex(const DLArray* step, int64_t count, int64_t seed, int64_t shuffle,
                   DLArray* index, DLStream stream) {
  const char* op = "shuffled_index";
  Enter(op, index, step);
  if (index->dtype != DL_INT64) Fail("%s: expected an output of int64", op);
  const int64_t n = Numel(index);
  const Next next{batch::OrderOf(op, count, seed, shuffle), batch::StepOf(op, step), n};
  Launch(op, IndexKernel, Blocks(n), kThreads, 0, stream, next, (int64_t*)index->data);
}

void TakeBatch(const DLArray* samples, const DLArray* index, const DLArray* scale,
               const DLArray* shift, DLArray* y, DLStream stream) {
  const char* op = "take_batch";
  Enter(op, y, samples, index, scale, shift);
  const Affine affine = batch::AffineOf(op, samples, scale, shift);
  CheckTaken(op, samples, 0, index, y);
  const Given given{IndicesOf(op, index), samples->shape[0]};
  Take(op, given, samples, affine, Out(op, y), Numel(index), Labels(), stream);
}

void ShuffledBatch(const DLArray* samples, const DLArray* labels, const DLArray* step,
                   const DLArray* scale, const DLArray* shift, int64_t seed, int64_t shuffle,
                   DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "shuffled_batch";
  Enter(op, x, samples, labels, step, scale, shift, y);
  const Affine affine = batch::AffineOf(op, samples, scale, shift);
  const Labels moved = batch::LabelsOf(op, samples, labels, y);
  const Order order = batch::BatchOrder(op, samples, seed, shuffle, x, y);
  const int64_t n = x->shape[0];
  const Next next{order, batch::StepOf(op, step), n};
  Take(op, next, samples, affine, Out(op, x), n, moved, stream);
}

DLSYS_KERNEL(cuda, shuffled_index, ShuffledIndex);
DLSYS_KERNEL(cuda, take_batch, TakeBatch);
DLSYS_KERNEL(cuda, shuffled_batch, ShuffledBatch);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
