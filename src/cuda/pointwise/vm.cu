// Chains of elementwise operators in one kernel, which interprets the program of
// src/math/pointwise_vm.h: each thread runs it on four neighbouring elements, so that decoding is
// paid once for four, or on one where there are few. All threads are at the same instruction, and
// so its switch does not diverge.
//
// Slots are columns of shared memory, one a thread: registers cannot be indexed by what an
// instruction says. The result of the instruction before stays in registers, and most operands are
// that. The output, float32 or bool, may be the buffer of an input of its shape and dtype: a thread
// reads what it overwrites before it writes, and no other thread reads it.
#include "cuda/runtime/launch.cuh"
#include "math/pointwise_vm.h"

namespace dlsys {
namespace cuda {
namespace {

using chain::Program;

constexpr int kChainThreads = 128;
constexpr size_t kSharedNbytes = 48 << 10;  // that every block may have
constexpr int64_t kFew = 1 << 14;           // elements that one wave of threads holds one by one

// W neighbouring elements.
template <int W>
struct alignas(4 * W) Lanes {
  float v[W];
};

struct Source {
  const void* data;
  chain::Band band;
  int dtype;
  bool same;  // element i meets element i

  __device__ __forceinline__ float At(int64_t i) const {
    switch (dtype) {
      case DL_FLOAT32:
        return ((const float*)data)[i];
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
  __device__ __forceinline__ int64_t Place(int64_t i) const {
    if (same) return i;
    if (((i | band.inner | band.count) >> 31) ==
        0)  // a division of half the width, a third of the time
      return (uint32_t)i / (uint32_t)band.inner % (uint32_t)band.count;
    return i / band.inner % band.count;
  }
};

struct Sources {
  Source at[chain::kInputs];
  int count;
};

// ---- the kernel ----

// Elements i to i + W - 1 of an input into its slot; those from n on repeat the last one.
template <int W>
__device__ __forceinline__ void Fetch(const Source& source, int64_t i, int64_t n, Lanes<W>* slot) {
  if (source.same && source.dtype == DL_FLOAT32 && i + W <= n) {
    const float* from = (const float*)source.data + i;
    W == 4 ? CopyAsync16(slot->v, from, true) : CopyAsync4(slot->v, from, true);
    return;
  }
  const chain::Band band = source.band;
  Lanes<W> lanes;
  if (band.count == 1 || band.inner % W == 0) {
    const float value = source.At(band.count == 1 ? 0 : source.Place(i));
#pragma unroll
    for (int k = 0; k < W; k++) lanes.v[k] = value;
  } else if (band.inner == 1 && band.count % W == 0) {
    const int64_t place = source.Place(i);
#pragma unroll
    for (int k = 0; k < W; k++) lanes.v[k] = source.At(place + k);
  } else {
#pragma unroll
    for (int k = 0; k < W; k++) lanes.v[k] = source.At(source.Place(i + k < n ? i + k : n - 1));
  }
  *slot = lanes;
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

// One of the instructions with so many operands. Switches become trees of branches, so that the
// most common instructions are asked for first.
template <class V>
__device__ __forceinline__ V Apply(int code, const V& a) {
  switch (code) {
#define DLSYS_CASE(Name) \
  case chain::k##Name:   \
    return Map<chain::Name>(a);
    DLSYS_CHAIN_1(DLSYS_CASE)
#undef DLSYS_CASE
  }
  return a;
}

template <class V>
__device__ __forceinline__ V Apply(int code, const V& a, const V& b) {
  if (code == chain::kMul) return Map<chain::Mul>(a, b);
  if (code == chain::kAdd) return Map<chain::Add>(a, b);
  switch (code) {
#define DLSYS_CASE(Name) \
  case chain::k##Name:   \
    return Map<chain::Name>(a, b);
    DLSYS_CHAIN_2(DLSYS_CASE)
#undef DLSYS_CASE
  }
  return a;
}

template <class V>
__device__ __forceinline__ V Apply(int code, const V& a, const V& b, const V& c) {
  return code == chain::kWhere ? Map<chain::Where>(a, b, c) : Map<chain::ClipTo>(a, b, c);
}

template <class V>
__device__ __forceinline__ V Apply(int code, const V& a, const V& b, const V& c, const V& d) {
  switch (code) {
#define DLSYS_CASE(Name) \
  case chain::k##Name:   \
    return Map<chain::Name>(a, b, c, d);
    DLSYS_CHAIN_4(DLSYS_CASE)
#undef DLSYS_CASE
  }
  return a;
}

template <int W>
__device__ __forceinline__ Lanes<W> Operand(const Program& program, int place, const Lanes<W>& last,
                                            const Lanes<W>* mine) {
  if (place == 0) return last;
  if (place < chain::kFirstNumber) return mine[(place - 1) * blockDim.x];
  Lanes<W> lanes;
#pragma unroll
  for (int k = 0; k < W; k++) lanes.v[k] = program.numbers[place - chain::kFirstNumber];
  return lanes;
}

// An instruction in one load, where bytes would be loads each.
__device__ __forceinline__ uint64_t WordAt(const Program& program, int at) {
  uint64_t word;
  memcpy(&word, &program.code[at], sizeof word);
  return word;
}

template <int W>
__device__ __forceinline__ Lanes<W> Run(const Program& program, Lanes<W>* mine) {
  Lanes<W> last = {};
  uint64_t next = WordAt(program, 0);
  for (int at = 1; next & 255; at++) {
    const uint64_t word = next;
    next = WordAt(program, at);  // arrives while this one is at work
    const int code = (int)(word & 255), to = (int)(word >> 8 & 255);
    const auto operand = [&](int k) {
      return Operand(program, (int)(word >> (8 * k + 16) & 255), last, mine);
    };
    const Lanes<W> a = operand(0);
    if (code < chain::kFirstOf2)
      last = Apply(code, a);
    else if (code < chain::kFirstOf3)
      last = Apply(code, a, operand(1));
    else if (code < chain::kFirstOf4)
      last = Apply(code, a, operand(1), operand(2));
    else
      last = Apply(code, a, operand(1), operand(2), operand(3));
    if (to) mine[(to - 1) * blockDim.x] = last;
  }
  return last;
}

template <int W>
__device__ __forceinline__ void Store(const Lanes<W>& lanes, void* out, bool truth, int64_t i,
                                      int64_t n) {
  if (!truth && i + W <= n) {
    ((Lanes<W>*)out)[i / W] = lanes;
    return;
  }
#pragma unroll
  for (int k = 0; k < W; k++) {
    if (i + k >= n) return;
    if (truth)
      ((uint8_t*)out)[i + k] = lanes.v[k] != 0.f;
    else
      ((float*)out)[i + k] = lanes.v[k];
  }
}

// Whole blocks go through the program, whose control is the same for all threads then.
template <int W>
__global__ __launch_bounds__(kChainThreads) void ChainKernel(
    const __grid_constant__ Program program, const __grid_constant__ Sources sources, void* out,
    bool truth, int64_t n) {
  Lanes<W>* const mine = DynamicShared<Lanes<W>>() + threadIdx.x;  // (slots, threads)
  const int64_t step = W * ItemStep();
  for (int64_t first = (int64_t)blockIdx.x * blockDim.x * W; first < n; first += step) {
    const int64_t i = first + threadIdx.x * W;
    if (i < n)
      for (int k = 0; k < sources.count; k++) Fetch(sources.at[k], i, n, mine + k * blockDim.x);
    CloseCopies();
    WaitForCopies<0>();
    const Lanes<W> result = Run(program, mine);
    if (i < n) Store(result, out, truth, i, n);
  }
}

// ---- the launcher ----

template <int W>
void LaunchChain(const Program& program, const Sources& sources, DLArray* out, DLStream stream) {
  const int64_t n = Numel(out), threads = CeilDiv(n, W);
  const size_t column = program.slots * sizeof(Lanes<W>);
  unsigned block = threads <= 32 ? 32 : kChainThreads;
  if (block * column > kSharedNbytes) block /= 2;
  Launch("pointwise", ChainKernel<W>, Blocks(threads, block), block, block * column, stream,
         program, sources, out->data, out->dtype == DL_BOOL, n);
}

void Chain(const DLArrayList* inputs, const Program& program, DLArray* out, DLStream stream) {
  Enter("pointwise", out);
  chain::CheckOutput(out);
  const int64_t n = Numel(out);
  Sources sources = {};
  bool wide = n > kFew && Aligned16(out->data);
  for (; sources.count < inputs->count; sources.count++) {
    const DLArray* a = inputs->arrays[sources.count];
    CheckArray("pointwise", a, out->ctx);
    chain::CheckInput(a);
    const chain::Band band = chain::BandOf(a, out);
    const bool same = band.inner == 1 && band.count == n;
    sources.at[sources.count] = {a->data, band, a->dtype, same};
    wide &= !same || a->dtype != DL_FLOAT32 || Aligned16(a->data);
  }
  return wide ? LaunchChain<4>(program, sources, out, stream)
              : LaunchChain<1>(program, sources, out, stream);
}

DLSYS_KERNEL(cuda, pointwise, chain::Kernel<Chain>::Call);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
