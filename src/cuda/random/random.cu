// Counter-based random numbers and dropout: a thread makes the four words of a Philox block for
// four neighboring elements.
//
// The step is read from device memory, so that a replay of a captured program draws new numbers
// when it has advanced. The output of dropout may be its input. Integer throughput limits it,
// memory bandwidth for dropout.
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/launch.cuh"
#include "math/philox.h"
#include "operators/indexing.h"

namespace dlsys {
namespace cuda {
namespace {

using philox::Stream;
using philox::Words;

// A stream of random numbers whose step is in device memory.
struct Source {
  const int64_t* step;
  uint64_t seed;
  uint32_t node;
  __device__ Stream At() const { return {seed, (uint64_t)*step, node}; }
};

// ---- kernels ----

struct UniformOp {
  float low, range;
  __device__ float Make(uint32_t word, float) const { return philox::Uniform(word, low, range); }
};

struct NormalOp {
  philox::Normal normal;
  __device__ float Make(uint32_t word, float) const { return normal.At(word); }
};

struct BernoulliOp {
  uint64_t threshold;  // of 2^32
  __device__ float Make(uint32_t word, float) const { return word < threshold ? 1.f : 0.f; }
};

struct DropoutOp {
  uint64_t threshold;  // of 2^32
  float scale;
  __device__ float Make(uint32_t word, float x) const { return word < threshold ? scale * x : 0.f; }
};

// y[n] = op of the word of the element and, with kTakesInput, of x[n]; accesses are of four
// elements with `quads`.
template <class T, class Op, bool kTakesInput>
__global__ void WordsKernel(Source source, const T* x, T* y, int64_t n, bool quads, Op op) {
  const Stream stream = source.At();
  const int64_t blocks = (n + 3) / 4;
  for (int64_t b = FirstItem(); b < blocks; b += ItemStep()) {
    const Words words = stream.At((uint64_t)b);
    if (quads && 4 * b + 3 < n) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if constexpr (kTakesInput) v = LoadQuad(x + 4 * b);
      StoreQuad(y + 4 * b, make_float4(op.Make(words.word[0], v.x), op.Make(words.word[1], v.y),
                                       op.Make(words.word[2], v.z), op.Make(words.word[3], v.w)));
      continue;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int64_t i = 4 * b + k;
      if (i < n) y[i] = T(op.Make(words.word[k], kTakesInput ? (float)x[i] : 0.f));
    }
  }
}

__global__ void StepOfDrawKernel(const int64_t* step, const int64_t* draws, int64_t* y) {
  *y = (int64_t)philox::OfDraw((uint64_t)*step, (uint64_t)*draws);
}

// ---- launchers ----

const int64_t* Step(const char* op, const DLArray* step) {
  CheckScalar(op, "step", step, DL_INT64);
  return (const int64_t*)step->data;
}

template <class Op>
void RunWords(const char* op, const DLArray* step, int64_t seed, int64_t node, DLArray* y,
              const Op& body, DLStream stream) {
  Enter(op, y, step);
  const Source source{Step(op, step), (uint64_t)seed, (uint32_t)node};
  float* out = Out(op, y);
  const int64_t n = Numel(y);
  Launch(op, WordsKernel<float, Op, false>, Blocks(CeilDiv(n, 4)), kThreads, 0, stream, source,
         (const float*)nullptr, out, n, Aligned16(out), body);
}

void Uniform(const DLArray* step, int64_t seed, int64_t node, float low, float range, DLArray* y,
             DLStream stream) {
  RunWords("random_uniform", step, seed, node, y, UniformOp{low, range}, stream);
}

void Normal(const DLArray* step, int64_t seed, int64_t node, float mean, float deviation,
            float below, float within, float low, float high, DLArray* y, DLStream stream) {
  const NormalOp body{{mean, deviation, below, within, low, high}};
  RunWords("random_normal", step, seed, node, y, body, stream);
}

void Bernoulli(const DLArray* step, int64_t seed, int64_t node, int64_t threshold, DLArray* y,
               DLStream stream) {
  RunWords("random_bernoulli", step, seed, node, y, BernoulliOp{(uint64_t)threshold}, stream);
}

template <class T>
void Dropout(const DLArray* x, const DLArray* step, int64_t seed, int64_t node, int64_t threshold,
             float scale, DLArray* y, DLStream stream) {
  const char* op = "dropout";
  Enter(op, y, x, step);
  CheckSameShape(op, x, y);
  const Source source{Step(op, step), (uint64_t)seed, (uint32_t)node};
  const T* in = In<T>(op, x);
  T* out = Out<T>(op, y);
  const int64_t n = Numel(y);
  Launch(op, WordsKernel<T, DropoutOp, true>, Blocks(CeilDiv(n, 4)), kThreads, 0, stream, source,
         in, out, n, Aligned16(in) && Aligned16(out), DropoutOp{(uint64_t)threshold, scale});
}

void StepOfDraw(const DLArray* step, const DLArray* draws, DLArray* y, DLStream stream) {
  const char* op = "step_of_draw";
  Enter(op, y, step, draws);
  Step(op, y);
  Launch(op, StepOfDrawKernel, 1, 1, 0, stream, Step(op, step), Step(op, draws), (int64_t*)y->data);
}

DLSYS_KERNEL(cuda, step_of_draw, StepOfDraw);
DLSYS_KERNEL(cuda, random_uniform, Uniform);
DLSYS_KERNEL(cuda, random_normal, Normal);
DLSYS_KERNEL(cuda, random_bernoulli, Bernoulli);
DLSYS_KERNEL_TYPED(cuda, dropout, Dropout);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
