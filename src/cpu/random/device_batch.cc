// Batches of a resident data set on the CPU: the index of shuffled samples, and a gather of rows
// (samples, channels, inner) that casts to float and scales each channel. The shuffle is a keyed
// permutation that is computed for each position (operators/device_batch.h), so no order is stored.
// Outputs overlap no input. Memory bandwidth limits the gather, the rounds of the permutation the
// index.
#include "operators/device_batch.h"

#include <cstring>

#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"

namespace dlsys {
namespace cpu {
namespace {

using batch::Affine;
using batch::Labels;
using batch::Order;

template <class T>
void TakeChannel(const T* x, float scale, float shift, float* y, int64_t n) {
  Dispatch(DLSYS_SIMD {
    for (int64_t k = 0; k < n; k++) y[k] = Affine::Of(x[k], scale, shift);
  });
}

// y[i] = sample at(i), cast and scaled, for n samples; its labels are copied along.
template <class T, class At>
void TakeRows(const T* x, const Affine& affine, float* y, int64_t n, const Labels& labels,
              const At& at) {
  ParallelFor(n, RowGrain(affine.size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = at(i);
      for (int64_t c = 0; c < affine.channels; c++)
        TakeChannel(x + row * affine.size + c * affine.inner, affine.scale[c], affine.shift[c],
                    y + i * affine.size + c * affine.inner, affine.inner);
      if (labels.nbytes)
        memcpy(labels.to + i * labels.nbytes, labels.from + row * labels.nbytes, labels.nbytes);
    }
  });
}

template <class At>
void Take(const DLArray* samples, const Affine& affine, float* y, int64_t n, const Labels& labels,
          const At& at) {
  if (samples->dtype == DL_UINT8)
    TakeRows((const uint8_t*)samples->data, affine, y, n, labels, at);
  else
    TakeRows((const float*)samples->data, affine, y, n, labels, at);
}

// The position in the stream of samples at which a batch of n begins.
uint64_t FirstOfBatch(const char* op, const DLArray* step, int64_t n) {
  const int64_t* batches = batch::StepOf(op, step);
  uint64_t first = 0;
  Serially([&] { first = (uint64_t)*batches * (uint64_t)n; });
  return first;
}

void ShuffledIndex(const DLArray* step, int64_t count, int64_t seed, int64_t shuffle,
                   DLArray* index) {
  const char* op = "shuffled_index";
  Check(op, step);
  Check(op, index);
  if (index->dtype != DL_INT64) Fail("%s: expected an output of int64", op);
  const Order order = batch::OrderOf(op, count, seed, shuffle);
  const int64_t n = Numel(index);
  const uint64_t first = FirstOfBatch(op, step, n);
  int64_t* out = (int64_t*)index->data;
  ParallelFor(n, RowGrain(8 * batch::kRounds), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) out[i] = order.At(first + (uint64_t)i);
  });
}

void TakeBatch(const DLArray* samples, const DLArray* index, const DLArray* scale,
               const DLArray* shift, DLArray* y) {
  const char* op = "take_batch";
  for (const DLArray* a : {samples, index, scale, shift, (const DLArray*)y}) Check(op, a);
  const Affine affine = batch::AffineOf(op, samples, scale, shift);
  const Indices indices = IndicesOf(op, index);
  CheckGathered(op, samples, 0, index, y);
  const int64_t n = Numel(index), count = samples->shape[0];
  Serially([&] {
    for (int64_t i = 0; i < n; i++)
      if (indices[i] < 0 || indices[i] >= count) FailOutOfRange(op, "index", indices[i], i, count);
  });
  Take(samples, affine, Out(op, y), n, Labels(), [&](int64_t i) { return indices[i]; });
}

void ShuffledBatch(const DLArray* samples, const DLArray* labels, const DLArray* step,
                   const DLArray* scale, const DLArray* shift, int64_t seed, int64_t shuffle,
                   DLArray* x, DLArray* y) {
  const char* op = "shuffled_batch";
  for (const DLArray* a :
       {samples, labels, step, scale, shift, (const DLArray*)x, (const DLArray*)y})
    Check(op, a);
  const Affine affine = batch::AffineOf(op, samples, scale, shift);
  const Labels moved = batch::LabelsOf(op, samples, labels, y);
  const Order order = batch::BatchOrder(op, samples, seed, shuffle, x, y);
  const int64_t n = x->shape[0];
  const uint64_t first = FirstOfBatch(op, step, n);
  Take(samples, affine, Out(op, x), n, moved,
       [&](int64_t i) { return order.At(first + (uint64_t)i); });
}

DLSYS_KERNEL(cpu, shuffled_index, ShuffledIndex);
DLSYS_KERNEL(cpu, take_batch, TakeBatch);
DLSYS_KERNEL(cpu, shuffled_batch, ShuffledBatch);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
