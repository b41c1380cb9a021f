// Kernels over many arrays at once: the table of arrays, which a launch has as a by-value
// parameter, so that a captured one keeps it and nothing is allocated or copied; and the
// optimizer's step of all of them, for update.cu and all_reduce_update.cu. A block works on one
// chunk of one array, which it finds by binary search. Memory bandwidth limits them.
#pragma once
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/lists.cuh"
#include "operators/optimizer_args.h"

namespace dlsys {
namespace cuda {

constexpr int kChunk = 16 * kThreads;    // elements of a block
constexpr int kTableNbytes = 30 * 1024;  // a kernel's parameters may take 32,764 bytes

// The arrays of one launch, `kArrays` of each size, as consecutive chunks.
template <int kArrays, int kCapacity>
struct Table {
  void* data[kCapacity][kArrays];
  int64_t size[kCapacity];
  unsigned first[kCapacity + 1];  // first chunk of each
  int count;

  // The array of a chunk, by binary search.
  __device__ __forceinline__ int Find(unsigned chunk) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= chunk)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
};

template <int kArrays>
constexpr int kMostArrays = kTableNbytes / (int)(kArrays * sizeof(void*) + 8 + 4);
constexpr int kFewArrays = 24;  // copying a table of 30 KB costs the host more than a launch

// A chunk of one array of the table.
struct Chunk {
  int array;
  int64_t begin;
  int n;
  template <class Arrays>
  __device__ __forceinline__ explicit Chunk(const Arrays& table) {
    array = table.Find(blockIdx.x);
    begin = (int64_t)(blockIdx.x - table.first[array]) * kChunk;
    n = (int)min((int64_t)kChunk, table.size[array] - begin);
  }
};

// data[k] = the states of parameter k, which is stored in P, then its gradient. `gradients.At(g,
// i)` is what `Quad` and `One` read from element i of one on.
template <class P, class Rule, int kCapacity, class Gradients>
__global__ void UpdateKernel(const __grid_constant__ Table<Rule::kStates + 1, kCapacity> table,
                             rule::Source source, Gradients gradients) {
  constexpr int kStates = Rule::kStates;
  const Chunk chunk(table);
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (!source.Due(Rule::kEveryRun)) return;
  __shared__ rule::Step<Rule> shared;
  if (threadIdx.x == 0) shared = source.Make<Rule>(source.Look());
  __syncthreads();
  const rule::Step<Rule> step = shared;

  P* p = (P*)table.data[chunk.array][0] + chunk.begin;
  float* slots[kStates];  // of the states from 1 on
  uintptr_t addresses = (uintptr_t)p;
#pragma unroll
  for (int j = 1; j < kStates; j++) {
    slots[j] = (float*)table.data[chunk.array][j] + chunk.begin;
    addresses |= (uintptr_t)slots[j];
  }
  const auto grads = gradients.At(table.data[chunk.array][kStates], chunk.begin);
  const int quads = (addresses | grads.address()) % 16 == 0 ? chunk.n / 4 : 0;
  for (int i = threadIdx.x; i < quads; i += kThreads) {
    float4 at[kStates] = {LoadQuad(p, i)};
#pragma unroll
    for (int j = 1; j < kStates; j++) at[j] = LoadQuad(slots[j], i);
    const float4 grad = grads.Quad(i);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float element[kStates];
#pragma unroll
      for (int j = 0; j < kStates; j++) element[j] = (&at[j].x)[c];
      step(element, (&grad.x)[c]);
#pragma unroll
      for (int j = 0; j < kStates; j++) (&at[j].x)[c] = element[j];
    }
    StoreQuad(p, i, at[0]);
#pragma unroll
    for (int j = 1; j < kStates; j++) StoreQuad(slots[j], i, at[j]);
  }
  for (int i = 4 * quads + threadIdx.x; i < chunk.n; i += kThreads) {
    float at[kStates] = {p[i]};
#pragma unroll
    for (int j = 1; j < kStates; j++) at[j] = slots[j][i];
    step(at, grads.One(i));
    p[i] = P(at[0]);
#pragma unroll
    for (int j = 1; j < kStates; j++) slots[j][i] = at[j];
  }
}

// ---- launchers ----

inline unsigned Chunks(const DLArray* a) { return (unsigned)CeilDiv(Numel(a), kChunk); }

// Fills the table with arrays from index `next` on, whose addresses `fill` writes, and returns the
// index of the first that did not fit. Arrays without elements, or of another dtype, are skipped.
template <int kArrays, int kCapacity, class F>
int64_t Fill(Table<kArrays, kCapacity>* table, const DLArrayList* arrays, int64_t next, int dtype,
             F&& fill) {
  table->count = 0;
  table->first[0] = 0;
  for (; next < arrays->count && table->count < kCapacity; next++) {
    const DLArray* a = arrays->arrays[next];
    const int64_t n = Numel(a);
    if (n == 0 || a->dtype != dtype) continue;
    const int k = table->count++;
    fill(next, table->data[k]);
    table->size[k] = n;
    table->first[k + 1] = table->first[k] + Chunks(a);
  }
  return next;
}

}  // namespace cuda
}  // namespace dlsys
