// Optimizer steps in place as multi-tensor kernels: one launch updates all parameters, and one
// makes their copies of 16 bits.
//
// The table of arrays is a by-value kernel parameter, which a captured launch keeps, so nothing is
// allocated or copied. A block updates one chunk of one array, which it finds by binary search.
// Rates and counts live in device memory and may change between runs of a captured program. States
// have the shape of their gradient and are read and written; gradients are only read and overlap no
// state. Gradients, or they and parameters, may be of 16 bits: slots and arithmetic are float32.
// Memory bandwidth limits it.
#include "cuda/pointwise/quad.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/lists.cuh"
#include "operators/optimizer_args.h"

namespace dlsys {
namespace cuda {
namespace {

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

// ---- kernels ----

// The gradients of a launch, which lie in T, or in float32 though T is a type of 16 bits.
template <class T>
struct Gradients {
  bool narrow;
  __device__ __forceinline__ const void* At(const void* g, int64_t i) const {
    return kIs16Bit<T> && narrow ? (const void*)((const T*)g + i) : (const float*)g + i;
  }
  __device__ __forceinline__ float4 Quad(const void* g, int i) const {
    return kIs16Bit<T> && narrow ? LoadQuad((const T*)g, i) : LoadQuad((const float*)g, i);
  }
  __device__ __forceinline__ float One(const void* g, int i) const {
    return kIs16Bit<T> && narrow ? (float)((const T*)g)[i] : ((const float*)g)[i];
  }
};

// data[k] = the states of parameter k, which is stored in P, then its gradient.
template <class T, class P, class Rule, int kCapacity>
__global__ void UpdateKernel(const __grid_constant__ Table<Rule::kStates + 1, kCapacity> table,
                             rule::Source source, Gradients<T> gradients) {
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
  const void* g = gradients.At(table.data[chunk.array][kStates], chunk.begin);
  const int quads = (addresses | (uintptr_t)g) % 16 == 0 ? chunk.n / 4 : 0;
  for (int i = threadIdx.x; i < quads; i += kThreads) {
    float4 at[kStates] = {LoadQuad(p, i)};
#pragma unroll
    for (int j = 1; j < kStates; j++) at[j] = LoadQuad(slots[j], i);
    const float4 grad = gradients.Quad(g, i);
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
    step(at, gradients.One(g, i));
    p[i] = P(at[0]);
#pragma unroll
    for (int j = 1; j < kStates; j++) slots[j][i] = at[j];
  }
}

// The sum of `value` over the block, in a fixed order.
__device__ __forceinline__ double BlockSum(double value) {
  __shared__ double warp_sums[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (double warp_sum : warp_sums) sum += warp_sum;
  return sum;
}

// sums[chunk] = the sum of squares of the chunk.
template <class T, int kCapacity>
__global__ void SquaresKernel(const __grid_constant__ Table<1, kCapacity> table, double* sums) {
  const Chunk chunk(table);
  const T* x = (const T*)table.data[chunk.array][0] + chunk.begin;
  const int quads = (uintptr_t)x % 16 == 0 ? chunk.n / 4 : 0;
  double sum = 0;
  for (int i = threadIdx.x; i < quads; i += kThreads) {
    const float4 v = LoadQuad(x, i);
    sum += ((double)v.x * v.x + (double)v.y * v.y) + ((double)v.z * v.z + (double)v.w * v.w);
  }
  for (int i = 4 * quads + threadIdx.x; i < chunk.n; i += kThreads) {
    const float v = x[i];
    sum += (double)v * v;
  }
  sum = BlockSum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// norm[0] = sqrt(sum of sums[n]), by one block.
__global__ void RootKernel(const double* sums, int64_t n, float* norm) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += sums[i];
  sum = BlockSum(sum);
  if (threadIdx.x == 0) *norm = (float)sqrt(sum);
}

// data[k] = a float32 array, and its copy in T.
template <class T, int kCapacity>
__global__ void CastsKernel(const __grid_constant__ Table<2, kCapacity> table) {
  const Chunk chunk(table);
  const float* x = (const float*)table.data[chunk.array][0] + chunk.begin;
  T* y = (T*)table.data[chunk.array][1] + chunk.begin;
  const int quads = ((uintptr_t)x | (uintptr_t)y) % 16 == 0 ? chunk.n / 4 : 0;
  for (int i = threadIdx.x; i < quads; i += kThreads) StoreQuad(y, i, LoadQuad(x, i));
  for (int i = 4 * quads + threadIdx.x; i < chunk.n; i += kThreads) y[i] = T(x[i]);
}

struct CounterTable {
  static constexpr int kCapacity = 128;
  long long* at[kCapacity];
};

// Increments each counter at the end of every `every` runs, one thread a counter.
__global__ void AdvanceKernel(const __grid_constant__ CounterTable counters, const long long* count,
                              int64_t every) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  if (count && (*count + 1) % every != 0) return;
  ++*counters.at[threadIdx.x];
}

// ---- launchers ----

unsigned Chunks(const DLArray* a) { return (unsigned)CeilDiv(Numel(a), kChunk); }

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

template <class T, class P, class Rule, int kCapacity>
void UpdateBy(DLArrayList* states, const DLArrayList* grads, const rule::Source& source,
              DLStream stream) {
  if (!grads->count) return;
  const int dtype = grads->arrays[0]->dtype;  // CheckStates says that all have it
  const bool pdl = ComputeMajor(grads->arrays[0]->ctx.device_id) >= 9;
  Table<Rule::kStates + 1, kCapacity> table;
  for (int64_t next = 0; next < grads->count;) {
    next = Fill(&table, grads, next, dtype, [&](int64_t k, void** data) {
      for (int j = 0; j < Rule::kStates; j++) data[j] = states->arrays[j * grads->count + k]->data;
      data[Rule::kStates] = grads->arrays[k]->data;
    });
    LaunchSmall(Rule::name, UpdateKernel<T, P, Rule, kCapacity>, table.first[table.count], 1,
                kThreads, 0, pdl, stream, table, source, Gradients<T>{dtype == kDtype<T>});
  }
}

template <class T, class P, class Rule>
void UpdateStored(DLArrayList* states, const DLArrayList* grads, const rule::Source& source,
                  DLStream stream) {
  if (grads->count <= kFewArrays)
    UpdateBy<T, P, Rule, kFewArrays>(states, grads, source, stream);
  else
    UpdateBy<T, P, Rule, kMostArrays<Rule::kStates + 1>>(states, grads, source, stream);
}

template <class T, class Rule>
void Update(DLArrayList* states, const DLArrayList* grads, const DLArrayList* lr,
            const DLArrayList* step, const DLArrayList* count, const DLArrayList* scale,
            Struct<rule::UpdateOptions> options, DLStream stream) {
  const char* op = Rule::name;
  EnterAll(op, {states, grads, lr, step, count, scale});
  CheckStates<T, Rule>(op, states, grads);
  const rule::Source source = CheckedSource(op, lr, step, count, scale, *options);
  if (!states->count || states->arrays[0]->dtype == DL_FLOAT32)
    UpdateStored<T, float, Rule>(states, grads, source, stream);
  else
    UpdateStored<T, rule::Stored<T, Rule>, Rule>(states, grads, source, stream);
}

// The sums of squares of the chunks of all arrays of T, and where those of others go.
template <class T, int kCapacity>
double* SquaresBy(const char* op, const DLArrayList* arrays, double* sums, DLStream stream) {
  Table<1, kCapacity> table;
  for (int64_t next = 0; next < arrays->count;) {
    next = Fill(&table, arrays, next, kDtype<T>,
                [&](int64_t k, void** data) { data[0] = arrays->arrays[k]->data; });
    const unsigned chunks = table.first[table.count];
    if (chunks) Launch(op, SquaresKernel<T, kCapacity>, chunks, kThreads, 0, stream, table, sums);
    sums += chunks;
  }
  return sums;
}

template <class T>
double* Squares(const char* op, const DLArrayList* arrays, double* sums, DLStream stream) {
  if (arrays->count <= kFewArrays) return SquaresBy<T, kFewArrays>(op, arrays, sums, stream);
  return SquaresBy<T, kMostArrays<1>>(op, arrays, sums, stream);
}

// norm = sqrt(sum of all squares): a partial sum in double a chunk, then one block adds these.
// Arrays are of float32 or of T.
template <class T>
void GlobalNorm(const DLArrayList* arrays, DLArray* norm, DLStream stream) {
  const char* op = "global_norm";
  Enter(op, norm);
  EnterAll(op, {arrays});
  CheckScalar(op, "norm", norm, DL_FLOAT32);
  int64_t chunks = 0;
  for (int64_t k = 0; k < arrays->count; k++) {
    const DLArray* a = arrays->arrays[k];
    if (a->dtype != DL_FLOAT32) In<T>(op, a);
    chunks += Chunks(a);
  }
  Scratch scratch(norm->ctx, chunks * (int64_t)sizeof(double), stream);
  double* sums = (double*)scratch.data();
  double* rest = Squares<float>(op, arrays, sums, stream);
  if constexpr (kIs16Bit<T>) Squares<T>(op, arrays, rest, stream);
  Launch(op, RootKernel, 1, kThreads, 0, stream, sums, chunks, Out(op, norm));
}

void Advance(DLArrayList* counters, const DLArrayList* count, int64_t every, DLStream stream) {
  const char* op = "advance_step";
  EnterAll(op, {counters, count});
  const long long* runs = OptionalCount(op, "count", count);
  for (int64_t first = 0; first < counters->count; first += CounterTable::kCapacity) {
    CounterTable some;
    int n = 0;
    for (; n < CounterTable::kCapacity && first + n < counters->count; n++) {
      CheckScalar(op, "step", counters->arrays[first + n], DL_INT64);
      some.at[n] = (long long*)counters->arrays[first + n]->data;
    }
    const bool pdl = ComputeMajor(counters->arrays[0]->ctx.device_id) >= 9;
    LaunchSmall(op, AdvanceKernel, 1, 1, n, 0, pdl, stream, some, runs, every);
  }
}

template <class T, int kCapacity>
void CastsBy(const char* op, const DLArrayList* arrays, const DLArrayList* copies,
             DLStream stream) {
  Table<2, kCapacity> table;
  for (int64_t next = 0; next < arrays->count;) {
    next = Fill(&table, arrays, next, DL_FLOAT32, [&](int64_t k, void** data) {
      data[0] = arrays->arrays[k]->data;
      data[1] = copies->arrays[k]->data;
    });
    const unsigned chunks = table.first[table.count];
    if (chunks) Launch(op, CastsKernel<T, kCapacity>, chunks, kThreads, 0, stream, table);
  }
}

// copies[k] = arrays[k], float32, in T.
template <class T>
void CastAll(const DLArrayList* arrays, DLArrayList* copies, DLStream stream) {
  const char* op = "casts";
  EnterAll(op, {arrays, copies});
  CheckCopies<T>(op, arrays, copies);
  if (arrays->count <= kFewArrays) return CastsBy<T, kFewArrays>(op, arrays, copies, stream);
  CastsBy<T, kMostArrays<2>>(op, arrays, copies, stream);
}

#define DLSYS_UPDATE(Rule) \
  DLSYS_KERNEL_TYPED_NAMED(cuda, Rule, rule::Rule::name, Update, rule::Rule);
DLSYS_RULES(DLSYS_UPDATE)
#undef DLSYS_UPDATE
DLSYS_KERNEL(cuda, advance_step, Advance);
DLSYS_KERNEL_TYPED(cuda, global_norm, GlobalNorm);
DLSYS_KERNEL_TYPED(cuda, casts, CastAll);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
