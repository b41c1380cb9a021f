// Counter-based random numbers and dropout on the CPU, in batches that compile to vector code. The
// step is an array of one int64, so that a replay of a program draws new numbers when it has
// advanced. The output of dropout may be its input. Integer throughput limits it.
#include "cpu/runtime/common.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/simd.h"
#include "math/float_math.h"
#include "math/philox.h"
#include "operators/indexing.h"

namespace dlsys {
namespace cpu {
namespace {

using philox::Stream;
using philox::Words;

void CheckStep(const char* op, const DLArray* step) {
  Check(op, step);
  CheckScalar(op, "step", step, DL_INT64);
}

Stream StreamOf(const char* op, const DLArray* step, int64_t seed, int64_t node) {
  CheckStep(op, step);
  uint64_t at = 0;
  Serially([&] { at = *(const uint64_t*)step->data; });
  return {(uint64_t)seed, at, (uint32_t)node};
}

const int64_t kBlocks = 64;          // Philox blocks of a batch
const int64_t kBatch = 4 * kBlocks;  // elements of a batch
const int64_t kElementCost = 8;      // of an element, in elements of simple arithmetic
const int64_t kTask = kGrain / kElementCost / kBatch;  // batches of a task, at least

// The words of elements from `first`, a multiple of 4, on.
DLSYS_INLINE void Fill(const Stream& stream, int64_t first, uint32_t (&words)[kBatch]) {
  uint32_t of[4][kBlocks];
  for (int64_t j = 0; j < kBlocks; j++) {
    const Words block = stream.At((uint64_t)first / 4 + j);
    for (int k = 0; k < 4; k++) of[k][j] = block.word[k];
  }
  for (int64_t j = 0; j < kBlocks; j++)
    for (int k = 0; k < 4; k++) words[4 * j + k] = of[k][j];
}

// Calls body(first, count, words) for batches of elements, each on some thread.
template <class Body>
void ForBatches(const Stream& stream, int64_t n, const Body& body) {
  const int64_t batches = (n + kBatch - 1) / kBatch;
  ParallelFor(batches, kTask, [&](int64_t begin, int64_t end) {
    Dispatch([=]() __attribute__((always_inline)) {
      uint32_t words[kBatch];
      for (int64_t batch = begin; batch < end; batch++) {
        const int64_t first = batch * kBatch;
        Fill(stream, first, words);
        body(first, std::min(kBatch, n - first), words);
      }
    });
  });
}

// Calls body(k, word) for every element k of n, on some thread.
template <class Body>
void ForWords(const Stream& stream, int64_t n, const Body& body) {
  ForBatches(stream, n,
             [=](int64_t first, int64_t count, const uint32_t* words)
                 __attribute__((always_inline)) {
                   DLSYS_IVDEP
                   for (int64_t j = 0; j < count; j++) body(first + j, words[j]);
                 });
}
#define DLSYS_ELEMENT [=](int64_t k, uint32_t word) __attribute__((always_inline))

void Uniform(const DLArray* step, int64_t seed, int64_t node, float low, float range, DLArray* y) {
  float* out = Output("random_uniform", y);
  const Stream stream = StreamOf("random_uniform", step, seed, node);
  ForWords(stream, Numel(y), DLSYS_ELEMENT { out[k] = philox::Uniform(word, low, range); });
}

// Computes a batch by the central approximation, then compacts the elements in the tails and
// recomputes them: loops without branches.
DLSYS_INLINE void NormalBatch(const philox::Normal& normal, const uint32_t* words, int64_t n,
                              float* y) {
  double p[kBatch], x[kBatch], tail[kBatch], r[kBatch];
  int32_t index[kBatch];
  for (int64_t k = 0; k < n; k++) {
    p[k] = normal.Probability(words[k]);
    x[k] = philox::MiddleQuantile(p[k] - 0.5);
  }
  int64_t tails = 0;
  for (int64_t k = 0; k < n; k++) {
    const double q = p[k] - 0.5;
    index[tails] = (int32_t)k;
    tail[tails] = std::min(p[k], 1 - p[k]);
    tails += !(__builtin_fabs(q) <= philox::kMiddle);
  }
  for (int64_t t = 0; t < tails; t++) {
    r[t] = __builtin_sqrt(-Log(tail[t]));
    tail[t] = philox::TailQuantile(r[t]);
  }
  for (int64_t t = 0; t < tails; t++) {
    const int32_t k = index[t];
    x[k] = __builtin_copysign(tail[t], p[k] - 0.5);
    if (!(r[t] <= philox::kTail)) x[k] = philox::NormalQuantile(p[k]);
  }
  for (int64_t k = 0; k < n; k++) y[k] = normal.Made(x[k]);
}

void Normal(const DLArray* step, int64_t seed, int64_t node, float mean, float deviation,
            float below, float within, float low, float high, DLArray* y) {
  float* out = Output("random_normal", y);
  const Stream stream = StreamOf("random_normal", step, seed, node);
  const philox::Normal normal{mean, deviation, below, within, low, high};
  ForBatches(
      stream, Numel(y),
      [=](int64_t first, int64_t count, const uint32_t* words)
          __attribute__((always_inline)) { NormalBatch(normal, words, count, out + first); });
}

// 1 where the word is below the threshold, a count of 2^32, else 0.
void Bernoulli(const DLArray* step, int64_t seed, int64_t node, int64_t threshold, DLArray* y) {
  float* out = Output("random_bernoulli", y);
  const Stream stream = StreamOf("random_bernoulli", step, seed, node);
  ForWords(
      stream, Numel(y),
      DLSYS_ELEMENT { out[k] = (uint64_t)word < (uint64_t)threshold ? 1.f : 0.f; });
}

// y = scale * x where the word is below the threshold, else 0; y may be x.
template <class T>
void Dropout(const DLArray* x, const DLArray* step, int64_t seed, int64_t node, int64_t threshold,
             float scale, DLArray* y) {
  const T* in = Input<T>("dropout", x);
  T* out = Output<T>("dropout", y);
  CheckSameShape("dropout", x, y);
  const Stream stream = StreamOf("dropout", step, seed, node);
  ForWords(
      stream, Numel(y),
      DLSYS_ELEMENT { out[k] = T((uint64_t)word < (uint64_t)threshold ? scale * in[k] : 0.f); });
}

void StepOfDraw(const DLArray* step, const DLArray* draws, DLArray* y) {
  for (const DLArray* a : {step, draws, (const DLArray*)y}) CheckStep("step_of_draw", a);
  Serially([=] {
    *(uint64_t*)y->data =
        philox::OfDraw(*(const uint64_t*)step->data, *(const uint64_t*)draws->data);
  });
}

DLSYS_KERNEL(cpu, step_of_draw, StepOfDraw);
DLSYS_KERNEL(cpu, random_uniform, Uniform);
DLSYS_KERNEL(cpu, random_normal, Normal);
DLSYS_KERNEL(cpu, random_bernoulli, Bernoulli);
DLSYS_KERNEL_TYPED(cpu, dropout, Dropout);

}  // namespace
}  // namespace cpu
}  // namespace dlsys
