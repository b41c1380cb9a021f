// Batches of a device-resident data set: the order of samples, and a gather of rows that casts and
// scales.
//
// samples (count, size) of uint8 or float32 -> x (batch, size) of float32 (or uint8 unchanged), a
// few rows a block, 16-byte stores where channels and alignment allow; the same launch copies the
// labels. The step is read from device memory, so that a replay takes the next batch when it has
// advanced. An index out of range makes its row NaN and is reported (fault.cuh). Outputs never
// overlap inputs. Latency limits small batches, memory bandwidth large ones.
#include <algorithm>

#include "cuda/runtime/fault.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/device_batch.h"

namespace dlsys {
namespace cuda {
namespace {

using batch::Affine;
using batch::Labels;
using batch::Order;
using batch::Scaled;

// ---- samples of a batch: At(i) is the sample of row i, -1 where it does not exist ----

struct IndexedSamples {
  Indices indices;
  int64_t count;
  Faults faults;
  __device__ int64_t At(int64_t i) const {
    const int64_t at = indices[i];
    if (at >= 0 && at < count) return at;
    faults.OutOfRange(at, i, count);
    return -1;
  }
};

struct OrderedSamples {
  Order order;
  const int64_t* step;
  int64_t batch;
  __device__ int64_t At(int64_t i) const {
    return order.At((uint64_t)*step * (uint64_t)batch + (uint64_t)i);
  }
};

// ---- kernels ----

__global__ void IndexKernel(OrderedSamples rows, int64_t* index) {
  for (int64_t i = FirstItem(); i < rows.batch; i += ItemStep()) index[i] = rows.At(i);
}

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) AlignedVec {
  T of[kWidth];
};

// An element as it is, or scaled to float.
template <class To, class T>
__device__ __forceinline__ To Converted(bool exists, T x, float scale, float shift) {
  if constexpr (std::is_same_v<To, float>)
    return exists ? Scaled(x, scale, shift) : NAN;
  else
    return exists ? x : T(0);
}

constexpr int kMostRows = 8;  // of a block

// Gathers `count` samples, kWidth elements of one channel at a time; samples below 0 do not exist.
// `scale` and `shift` are those of the first channel. `ready` is called between the first load and
// the first store.
template <int kWidth, class T, class To, class Ready>
__device__ __forceinline__ void TakeRows(const int64_t* sample_of, int count, const T* samples,
                                         const Affine& affine, float scale, float shift, To* to,
                                         Ready&& ready) {
  constexpr int kBatch = kMostRows;  // rows with loads in flight
  const int size = (int)affine.size, inner = (int)affine.inner;
  for (int k = kWidth * (int)threadIdx.x; k < size; k += kWidth * (int)blockDim.x) {
    if (affine.channels > 1) {
      scale = affine.scale[k / inner];
      shift = affine.shift[k / inner];
    }
    for (int first = 0; first < count; first += kBatch) {
      AlignedVec<T, kWidth> x[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; b++)
        if (first + b < count && sample_of[first + b] >= 0)
          x[b] = *(const AlignedVec<T, kWidth>*)(samples + sample_of[first + b] * affine.size + k);
      ready();
#pragma unroll
      for (int b = 0; b < kBatch; b++) {
        if (first + b >= count) break;
        AlignedVec<To, kWidth> y;
#pragma unroll
        for (int j = 0; j < kWidth; j++)
          y.of[j] = Converted<To>(sample_of[first + b] >= 0, x[b].of[j], scale, shift);
        *(AlignedVec<To, kWidth>*)(to + (int64_t)(first + b) * size + k) = y;
      }
    }
  }
}

// The labels of some samples, as bytes.
struct LabelBytes {
  const int64_t* sample_of;
  const Labels& labels;
  int count;
  __device__ __forceinline__ uint8_t operator[](int i) const {
    const int nbytes = (int)labels.nbytes;
    return i < count ? labels.from[sample_of[i / nbytes] * nbytes + i % nbytes] : 0;
  }
};

// One thread a row finds the samples, then all threads gather them. With `inputs_ready` (nothing
// that it reads is being written) it loads before the preceding kernels are done (programmatic
// dependent launch).
template <int kWidth, class T, class To, class Rows>
__global__ void TakeKernel(Rows rows, const T* samples, Affine affine, To* x, int64_t n,
                           int of_block, Labels labels, bool inputs_ready) {
  __shared__ int64_t sample_of[kMostRows];
  bool waited = false;
  const auto ready = [&] {
    if (waited) return;
    GridDependencySynchronize();
    TriggerProgrammaticLaunch();
    waited = true;
  };
  if (!inputs_ready) ready();
  const float scale = affine.scale ? affine.scale[0] : 1.f;
  const float shift = affine.shift ? affine.shift[0] : 0.f;
  const int64_t step = (int64_t)gridDim.x * of_block;
  for (int64_t first = (int64_t)blockIdx.x * of_block; first < n; first += step) {
    const int count = (int)min((int64_t)of_block, n - first);
    if ((int)threadIdx.x < count) sample_of[threadIdx.x] = rows.At(first + threadIdx.x);
    __syncthreads();
    const LabelBytes bytes = {sample_of, labels, count * (int)labels.nbytes};
    const uint8_t byte = bytes[(int)threadIdx.x];  // under way together with the samples
    TakeRows<kWidth>(sample_of, count, samples, affine, scale, shift, x + first * affine.size,
                     ready);
    ready();
    uint8_t* const to = labels.to + first * labels.nbytes;
    if ((int)threadIdx.x < bytes.count) to[threadIdx.x] = byte;
    for (int i = (int)(threadIdx.x + blockDim.x); i < bytes.count; i += (int)blockDim.x)
      to[i] = bytes[i];
    __syncthreads();  // all threads have read sample_of
  }
}

// ---- launchers ----

// `inputs`: how many the step has, all of which are read.
template <class T, class To, class Rows>
void TakeOf(const char* op, const Rows& rows, const DLArray* samples, const Affine& affine, To* x,
            int64_t n, const Labels& labels, int inputs, DLStream stream) {
  if (affine.size > INT32_MAX / 2)
    Fail("%s: a sample has %lld elements, too many for a row", op, (long long)affine.size);
  if (labels.nbytes > INT32_MAX / kMostRows)
    Fail("%s: a label has %lld bytes, too many for a row", op, (long long)labels.nbytes);
  constexpr int kWidth = 16 / sizeof(To);
  const T* from = (const T*)samples->data;
  const bool vectorized = affine.inner % kWidth == 0 && Aligned16(from) && Aligned16(x);
  const int64_t items = vectorized ? affine.size / kWidth : affine.size;
  const int64_t threads = items < kThreads ? CeilDiv(items + (items == 0), 32) * 32 : kThreads;
  const int device = samples->ctx.device_id;
  const bool pdl = ComputeMajor(device) >= 9;
  // One block a multiprocessor: more would displace kernels of concurrent graph branches.
  const int64_t even = CeilDiv(n, Multiprocessors(device));
  const int of_block = (int)std::max<int64_t>(1, std::min<int64_t>(even, kMostRows));
  const auto kernel = vectorized ? TakeKernel<kWidth, T, To, Rows> : TakeKernel<1, T, To, Rows>;
  LaunchSmall(op, kernel, Blocks(n, of_block), 1, (unsigned)threads, 0, pdl, stream, rows, from,
              affine, x, n, of_block, labels, InputsAreReady(0, inputs));
}

template <class Rows>
void Take(const char* op, const Rows& rows, const DLArray* samples, const Affine& affine, float* x,
          int64_t n, const Labels& labels, int inputs, DLStream stream) {
  if (samples->dtype == DL_UINT8)
    TakeOf<uint8_t>(op, rows, samples, affine, x, n, labels, inputs, stream);
  else
    TakeOf<float>(op, rows, samples, affine, x, n, labels, inputs, stream);
}

void ShuffledIndex(const DLArray* step, int64_t count, int64_t seed, int64_t shuffle,
                   DLArray* index, DLStream stream) {
  const char* op = "shuffled_index";
  Enter(op, index, step);
  if (index->dtype != DL_INT64) Fail("%s: expected an output of int64", op);
  const int64_t n = Numel(index);
  const OrderedSamples rows{batch::OrderOf(op, count, seed, shuffle), batch::StepOf(op, step), n};
  Launch(op, IndexKernel, Blocks(n), kThreads, 0, stream, rows, (int64_t*)index->data);
}

void TakeBatch(const DLArray* samples, const DLArray* index, const DLArray* scale,
               const DLArray* shift, DLArray* y, DLStream stream) {
  const char* op = "take_batch";
  Enter(op, y, samples, index, scale, shift);
  const Affine affine = batch::AffineOf(op, samples, scale, shift);
  CheckGathered(op, samples, 0, index, y);
  const IndexedSamples rows{IndicesOf(op, index), samples->shape[0],
                            FaultsOf(op, "index", y->ctx.device_id)};
  Take(op, rows, samples, affine, Out(op, y), Numel(index), Labels(), 4, stream);
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
  const OrderedSamples rows{order, batch::StepOf(op, step), n};
  Take(op, rows, samples, affine, Out(op, x), n, moved, 5, stream);
}

// The batch as uint8, unscaled.
void ShuffledRows(const DLArray* samples, const DLArray* labels, const DLArray* step, int64_t seed,
                  int64_t shuffle, DLArray* x, DLArray* y, DLStream stream) {
  const char* op = "shuffled_rows";
  Enter(op, x, samples, labels, step, y);
  if (samples->dtype != DL_UINT8 || x->dtype != DL_UINT8)
    Fail("%s: expected bytes, got %s into %s", op, DtypeText(samples->dtype), DtypeText(x->dtype));
  const Labels moved = batch::LabelsOf(op, samples, labels, y);
  const Order order = batch::BatchOrder(op, samples, seed, shuffle, x, y);
  const int64_t n = x->shape[0], size = n ? Numel(x) / n : 0;
  const Affine unscaled = {nullptr, nullptr, size, 1, size};
  const OrderedSamples rows{order, batch::StepOf(op, step), n};
  TakeOf<uint8_t>(op, rows, samples, unscaled, (uint8_t*)x->data, n, moved, 3, stream);
}

DLSYS_KERNEL(cuda, shuffled_index, ShuffledIndex);
DLSYS_KERNEL(cuda, take_batch, TakeBatch);
DLSYS_KERNEL(cuda, shuffled_batch, ShuffledBatch);
DLSYS_KERNEL(cuda, shuffled_rows, ShuffledRows);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
