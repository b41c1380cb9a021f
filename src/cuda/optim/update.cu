// Optimizer steps in place as multi-tensor kernels (multi_tensor.cuh): one launch updates all
// parameters, and one makes their copies of 16 bits.
//
// Rates and counts live in device memory and may change between runs of a captured program. States
// have the shape of their gradient and are read and written; gradients are only read and overlap no
// state. Gradients, or they and parameters, may be of 16 bits: slots and arithmetic are float32.
// Memory bandwidth limits it.
#include "cuda/optim/multi_tensor.cuh"

namespace dlsys {
namespace cuda {
namespace {

// ---- kernels ----

// The gradients of a launch, which lie in T, or in float32 though T is a type of 16 bits.
template <class T>
struct Gradients {
  bool narrow;
  struct Part {
    bool narrow;
    const void* g;
    __device__ __forceinline__ uintptr_t address() const { return (uintptr_t)g; }
    __device__ __forceinline__ float4 Quad(int i) const {
      return kIs16Bit<T> && narrow ? LoadQuad((const T*)g, i) : LoadQuad((const float*)g, i);
    }
    __device__ __forceinline__ float One(int i) const {
      return kIs16Bit<T> && narrow ? (float)((const T*)g)[i] : ((const float*)g)[i];
    }
  };
  __device__ __forceinline__ Part At(const void* g, int64_t i) const {
    return {narrow, kIs16Bit<T> && narrow ? (const void*)((const T*)g + i) : (const float*)g + i};
  }
};

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

template <class T, class P, class Rule, int kCapacity>
void UpdateBy(DLArrayList* states, const DLArrayList* grads, const rule::Source& source,
              DLStream stream) {
  if (!grads->count) return;
  const int dtype = grads->arrays[0]->dtype;  // CheckOneDtype says that all have it
  const bool pdl = ComputeMajor(grads->arrays[0]->ctx.device_id) >= 9;
  Table<Rule::kStates + 1, kCapacity> table;
  for (int64_t next = 0; next < grads->count;) {
    next = Fill(&table, grads, next, dtype, [&](int64_t k, void** data) {
      for (int j = 0; j < Rule::kStates; j++) data[j] = states->arrays[j * grads->count + k]->data;
      data[Rule::kStates] = grads->arrays[k]->data;
    });
    LaunchSmall(Rule::name, UpdateKernel<P, Rule, kCapacity, Gradients<T>>,
                table.first[table.count], 1, kThreads, 0, pdl, stream, table, source,
                Gradients<T>{dtype == kDtype<T>});
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
  CheckOneDtype(op, grads);
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
