// Pointwise fusion: a chain of elementwise operators in one kernel, an interpreter of the bytecode
// of src/math/pointwise_vm.h.
//
// A thread runs the program on four neighboring elements, which amortizes decoding, or on one where
// there are few. All threads are at the same instruction, so the dispatch does not diverge. Slots
// are columns of shared memory, one a thread, since registers cannot be indexed; the accumulator,
// which most operands are, stays in registers. The output, of a storage type or bool, may be the
// buffer of an input of its shape and dtype: a thread reads what it overwrites before it writes.
// Decoding limits it for short programs, memory bandwidth otherwise.
#include "cuda/runtime/launch.cuh"
#include "math/pointwise_vm.h"

namespace dlsys {
namespace cuda {
namespace {

using pointwise::Program;

constexpr int kBlockThreads = 128;
constexpr size_t kSharedNbytes = 48 << 10;  // available to every block
constexpr int64_t kFew = 1 << 14;           // elements that one wave of threads covers one by one

// W neighboring elements.
template <int W>
struct alignas(4 * W) Vec {
  float v[W];
};

struct Source {
  const void* data;
  pointwise::Broadcast broadcast;
  int dtype;
  bool same;  // shape: no broadcast

  __device__ __forceinline__ float At(int64_t i) const {
    switch (dtype) {
      case DL_FLOAT32:
        return ((const float*)data)[i];
      case DL_BFLOAT16:
        return ((const bfloat16*)data)[i];
      case DL_FLOAT16:
        return ((const float16*)data)[i];
      case DL_INT32:
        return (float)((const int32_t*)data)[i];
      case DL_INT64:
        return (float)((const int64_t*)data)[i];
      case DL_UINT8:
        return (float)((const uint8_t*)data)[i];
      default:
        return ((const uint8_t*)data)[i] ? 1.f : 0.f;
    }
  }
  __device__ __forceinline__ int64_t Index(int64_t i) const {
    if (same) return i;
    // 32-bit division takes a third of the time.
    if (((i | broadcast.inner | broadcast.count) >> 31) == 0)
      return (uint32_t)i / (uint32_t)broadcast.inner % (uint32_t)broadcast.count;
    return i / broadcast.inner % broadcast.count;
  }
};

struct Sources {
  Source at[pointwise::kInputs];
  int count;
};

// ---- the kernel ----

// W elements of 16 bits.
template <class T, int W>
struct alignas(W * sizeof(T)) Narrow {
  T v[W];
};

template <int W, class T>
__device__ __forceinline__ Vec<W> LoadVec(const T* x) {
  const Narrow<T, W> narrow = *(const Narrow<T, W>*)x;
  Vec<W> vec;
#pragma unroll
  for (int k = 0; k < W; k++) vec.v[k] = narrow.v[k];
  return vec;
}

template <int W, class T>
__device__ __forceinline__ void StoreVec(const Vec<W>& vec, T* y) {
  Narrow<T, W> narrow;
#pragma unroll
  for (int k = 0; k < W; k++) narrow.v[k] = T(vec.v[k]);
  *(Narrow<T, W>*)y = narrow;
}

// Loads elements i to i + W - 1 of an input to its slot; those from n on repeat the last one.
template <int W>
__device__ __forceinline__ void LoadInput(const Source& source, int64_t i, int64_t n,
                                          Vec<W>* slot) {
  if (source.same && source.dtype == DL_FLOAT32 && i + W <= n) {
    const float* from = (const float*)source.data + i;
    W == 4 ? CopyAsync16(slot->v, from, true) : CopyAsync4(slot->v, from, true);
    return;
  }
  const pointwise::Broadcast broadcast = source.broadcast;
  Vec<W> vec;
  if (source.same && source.dtype == DL_BFLOAT16 && i + W <= n) {
    *slot = LoadVec<W>((const bfloat16*)source.data + i);
    return;
  }
  if (source.same && source.dtype == DL_FLOAT16 && i + W <= n) {
    *slot = LoadVec<W>((const float16*)source.data + i);
    return;
  }
  if (broadcast.count == 1 || broadcast.inner % W == 0) {
    const float value = source.At(broadcast.count == 1 ? 0 : source.Index(i));
#pragma unroll
    for (int k = 0; k < W; k++) vec.v[k] = value;
  } else if (broadcast.inner == 1 && broadcast.count % W == 0) {
    const int64_t first = source.Index(i);
#pragma unroll
    for (int k = 0; k < W; k++) vec.v[k] = source.At(first + k);
  } else {
#pragma unroll
    for (int k = 0; k < W; k++) vec.v[k] = source.At(source.Index(i + k < n ? i + k : n - 1));
  }
  *slot = vec;
}

template <class F, class First, class... More>
__device__ __forceinline__ First Map(First first, More... more) {
  const F f;
  First result;
#pragma unroll
  for (int k = 0; k < (int)(sizeof(First) / sizeof(float)); k++)
    result.v[k] = f(first.v[k], more.v[k]...);
  return result;
}

// Applies one instruction of that many operands. A switch becomes a tree of branches, so the most
// common opcodes are tested first.
template <class V>
__device__ __forceinline__ V Apply(int opcode, const V& a) {
  switch (opcode) {
#define DLSYS_CASE(Name)   \
  case pointwise::k##Name: \
    return Map<pointwise::Name>(a);
    DLSYS_OPCODES_1(DLSYS_CASE)
#undef DLSYS_CASE
  }
  return a;
}

template <class V>
__device__ __forceinline__ V Apply(int opcode, const V& a, const V& b) {
  if (opcode == pointwise::kMul) return Map<pointwise::Mul>(a, b);
  if (opcode == pointwise::kAdd) return Map<pointwise::Add>(a, b);
  switch (opcode) {
#define DLSYS_CASE(Name)   \
  case pointwise::k##Name: \
    return Map<pointwise::Name>(a, b);
    DLSYS_OPCODES_2(DLSYS_CASE)
#undef DLSYS_CASE
  }
  return a;
}

template <class V>
__device__ __forceinline__ V Apply(int opcode, const V& a, const V& b, const V& c) {
  return opcode == pointwise::kWhere ? Map<pointwise::Where>(a, b, c)
                                     : Map<pointwise::ClipTo>(a, b, c);
}

template <class V>
__device__ __forceinline__ V Apply(int opcode, const V& a, const V& b, const V& c, const V& d) {
  switch (opcode) {
#define DLSYS_CASE(Name)   \
  case pointwise::k##Name: \
    return Map<pointwise::Name>(a, b, c, d);
    DLSYS_OPCODES_4(DLSYS_CASE)
#undef DLSYS_CASE
  }
  return a;
}

template <int W>
__device__ __forceinline__ Vec<W> ReadOperand(const Program& program, int operand,
                                              const Vec<W>& accumulator, const Vec<W>* slots) {
  if (operand == 0) return accumulator;
  if (operand < pointwise::kFirstImmediate) return slots[(operand - 1) * blockDim.x];
  Vec<W> vec;
#pragma unroll
  for (int k = 0; k < W; k++) vec.v[k] = program.immediates[operand - pointwise::kFirstImmediate];
  return vec;
}

// Loads an instruction as one word.
__device__ __forceinline__ uint64_t WordAt(const Program& program, int at) {
  uint64_t word;
  memcpy(&word, &program.code[at], sizeof word);
  return word;
}

template <int W>
__device__ __forceinline__ Vec<W> Run(const Program& program, Vec<W>* slots) {
  Vec<W> accumulator = {};
  uint64_t next = WordAt(program, 0);
  for (int at = 1; next & 255; at++) {
    const uint64_t word = next;
    next = WordAt(program, at);  // prefetched
    const int opcode = (int)(word & 255), to = (int)(word >> 8 & 255);
    const auto operand = [&](int k) {
      return ReadOperand(program, (int)(word >> (8 * k + 16) & 255), accumulator, slots);
    };
    const Vec<W> a = operand(0);
    if (opcode < pointwise::kFirstOf2)
      accumulator = Apply(opcode, a);
    else if (opcode < pointwise::kFirstOf3)
      accumulator = Apply(opcode, a, operand(1));
    else if (opcode < pointwise::kFirstOf4)
      accumulator = Apply(opcode, a, operand(1), operand(2));
    else
      accumulator = Apply(opcode, a, operand(1), operand(2), operand(3));
    if (to) slots[(to - 1) * blockDim.x] = accumulator;
  }
  return accumulator;
}

// Stores element k of those from i on.
template <int W>
__device__ __forceinline__ void StoreElement(const Vec<W>& vec, int k, void* out, int dtype,
                                             int64_t i) {
  const float value = vec.v[k];
  switch (dtype) {
    case DL_FLOAT32:
      ((float*)out)[i + k] = value;
      return;
    case DL_BFLOAT16:
      ((bfloat16*)out)[i + k] = bfloat16(value);
      return;
    case DL_FLOAT16:
      ((float16*)out)[i + k] = float16(value);
      return;
  }
  ((uint8_t*)out)[i + k] = value != 0.f;
}

template <int W>
__device__ __forceinline__ void Store(const Vec<W>& vec, void* out, int dtype, int64_t i,
                                      int64_t n) {
  if (i + W <= n) {
    if (dtype == DL_FLOAT32) {
      ((Vec<W>*)out)[i / W] = vec;
      return;
    }
    if (dtype == DL_BFLOAT16) return StoreVec(vec, (bfloat16*)out + i);
    if (dtype == DL_FLOAT16) return StoreVec(vec, (float16*)out + i);
  }
#pragma unroll
  for (int k = 0; k < W; k++) {
    if (i + k >= n) return;
    StoreElement(vec, k, out, dtype, i);
  }
}

// All threads of a block run the program, so that its control flow is uniform.
template <int W>
__global__ __launch_bounds__(kBlockThreads) void PointwiseKernel(
    const __grid_constant__ Program program, const __grid_constant__ Sources sources, void* out,
    int dtype, int64_t n) {
  Vec<W>* const slots = DynamicShared<Vec<W>>() + threadIdx.x;  // (slots, threads)
  const int64_t step = W * ItemStep();
  for (int64_t first = (int64_t)blockIdx.x * blockDim.x * W; first < n; first += step) {
    const int64_t i = first + threadIdx.x * W;
    if (i < n)
      for (int k = 0; k < sources.count; k++)
        LoadInput(sources.at[k], i, n, slots + k * blockDim.x);
    CloseCopies();
    WaitForCopies<0>();
    const Vec<W> result = Run(program, slots);
    if (i < n) Store(result, out, dtype, i, n);
  }
}

// ---- the launcher ----

template <int W>
void LaunchPointwise(const Program& program, const Sources& sources, DLArray* out,
                     DLStream stream) {
  const int64_t n = Numel(out), threads = CeilDiv(n, W);
  const size_t column = program.slots * sizeof(Vec<W>);
  unsigned block = threads <= 32 ? 32 : kBlockThreads;
  if (block * column > kSharedNbytes) block /= 2;
  Launch("pointwise", PointwiseKernel<W>, Blocks(threads, block), block, block * column, stream,
         program, sources, out->data, out->dtype, n);
}

bool IsFloat(int dtype) {
  return dtype == DL_FLOAT32 || dtype == DL_BFLOAT16 || dtype == DL_FLOAT16;
}

void Pointwise(const DLArrayList* inputs, Struct<pointwise::Bytecode> bytecode, DLArray* out,
               DLStream stream) {
  const Program program = pointwise::Checked(*bytecode, inputs);
  Enter("pointwise", out);
  pointwise::CheckOutput(out);
  const int64_t n = Numel(out);
  Sources sources = {};
  bool wide = n > kFew && Aligned16(out->data);
  for (; sources.count < inputs->count; sources.count++) {
    const DLArray* a = inputs->arrays[sources.count];
    CheckArray("pointwise", a, out->ctx);
    pointwise::CheckInput(a);
    const pointwise::Broadcast broadcast = pointwise::BroadcastOf(a, out);
    const bool same = broadcast.inner == 1 && broadcast.count == n;
    sources.at[sources.count] = {a->data, broadcast, a->dtype, same};
    wide &= !same || !IsFloat(a->dtype) || Aligned16(a->data);
  }
  return wide ? LaunchPointwise<4>(program, sources, out, stream)
              : LaunchPointwise<1>(program, sources, out, stream);
}

DLSYS_KERNEL_ANY(cuda, pointwise, Pointwise);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
