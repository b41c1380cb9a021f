// Optimizer steps by the gradients of all ranks, in place, for all parameters at once: an
// all_reduce with the step as its epilogue. Gradients lie in windows (collective/window.cuh), where
// kernels of other ranks read them, and a step waits for its own memory meanwhile. Sums are of
// float32 in the order of ranks, and all ranks get the same bits.
//
// Of two ranks each reads all gradients of the other and adds them as it steps. Of more, each first
// sums its share of the gradients, in place, and then steps by the shares of all: (n - 1) / n of
// the bytes twice, instead of n - 1 times. A barrier before each kernel tells that what it reads is
// there, and one behind the last that nobody reads any more. Otherwise as update.cu. NVLink limits
// it, or memory bandwidth.
#include <algorithm>

#include "cuda/collective/window.cuh"
#include "cuda/optim/multi_tensor.cuh"
#include "operators/all_reduce_update_args.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int64_t kAlignment = 256;        // bytes, of gradients and of shares
constexpr int64_t kSumBlocks = 8;          // of a multiprocessor, that sum a share
constexpr int64_t kLeastShare = 64 << 10;  // bytes: a chunk lies in two shares at most
static_assert(kLeastShare >= kChunk * (int64_t)sizeof(float), "a chunk is no longer than a share");

// The gradients of one dtype over ranks: bytes of a window, of which each rank has summed `share`,
// in the order of ranks, or 0 where none has.
struct Exchanged {
  Window window;
  const char* begin;
  int64_t nbytes, share;
};

// Gradients that lie in T, or in float32 though T is a type of 16 bits.
template <class T>
struct RankGradients {
  Exchanged all;
  bool narrow;

  // Elements of a gradient: the sum of those at `first` and at `second`, or those of `first` up to
  // index `limit` and of `second` from there on.
  struct Part {
    const char *first, *second;
    int limit;  // -1 for a sum
    bool narrow;
    __device__ __forceinline__ uintptr_t address() const { return (uintptr_t)first; }
    __device__ __forceinline__ float4 QuadOf(const char* g, int i) const {
      return kIs16Bit<T> && narrow ? LoadQuad((const T*)g, i) : LoadQuad((const float*)g, i);
    }
    __device__ __forceinline__ float OneOf(const char* g, int i) const {
      return kIs16Bit<T> && narrow ? (float)((const T*)g)[i] : ((const float*)g)[i];
    }
    __device__ __forceinline__ float4 Quad(int i) const {
      if (limit >= 0) return QuadOf(4 * i < limit ? first : second, i);
      float4 sum = QuadOf(first, i);
      const float4 other = QuadOf(second, i);
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
      return sum;
    }
    __device__ __forceinline__ float One(int i) const {
      if (limit >= 0) return OneOf(i < limit ? first : second, i);
      return OneOf(first, i) + OneOf(second, i);
    }
  };

  __device__ __forceinline__ Part At(const void* g, int64_t i) const {
    const int size = kIs16Bit<T> && narrow ? 2 : 4;
    const char* own = (const char*)g + i * size;
    if (!all.share) return {all.window.Of(0, own), all.window.Of(1, own), -1, narrow};
    const int64_t at = own - all.begin;
    const int rank = (int)(at / all.share), next = min(rank + 1, all.window.size - 1);
    const int64_t left = min((rank + 1) * all.share - at, (int64_t)kChunk * size);
    return {all.window.Of(rank, own), all.window.Of(next, own), (int)left / size, narrow};
  }
};

// Sums this rank's share of the gradients, which lie in T, over all ranks, in place.
template <class T>
__global__ void SumShareKernel(Exchanged all) {
  constexpr int kElements = 16 / sizeof(T);
  struct alignas(16) Several {
    T x[kElements];
  };
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const char* own = all.begin + all.window.rank * all.share;
  const int64_t count = min(all.share, all.begin + all.nbytes - own) / 16;
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) {
    float sum[kElements] = {};
    for (int rank = 0; rank < all.window.size; rank++) {
      const Several of = ((const Several*)all.window.Of(rank, own))[i];
#pragma unroll
      for (int k = 0; k < kElements; k++) sum[k] += (float)of.x[k];
    }
    Several made;
#pragma unroll
    for (int k = 0; k < kElements; k++) made.x[k] = T(sum[k]);
    ((Several*)own)[i] = made;
  }
}

template <class Rule>
const char* Name() {
  static const std::string name = std::string("all_reduce_") + Rule::name;
  return name.c_str();
}

// What ranks exchange of the gradients of a dtype, which lie side by side in one window.
Exchanged ExchangedOf(const char* op, const DLArrayList* grads, int dtype,
                      const AllReduceUpdateOptions& options) {
  const char *begin = nullptr, *end = nullptr;
  for (int64_t k = 0; k < grads->count; k++) {
    const DLArray* g = grads->arrays[k];
    const char* data = (const char*)g->data;
    if (!Numel(g) || g->dtype != dtype) continue;
    begin = begin ? std::min(begin, data) : data;
    end = std::max(end, data + Numel(g) * DtypeNbytes(dtype));
  }
  if (!begin) return {};
  for (int64_t k = 0; k < grads->count; k++) {
    const DLArray* g = grads->arrays[k];
    const bool between = (const char*)g->data >= begin && (const char*)g->data < end;
    if (between && g->dtype != dtype && Numel(g))
      Fail("%s: expected gradients of %s side by side, got %s between them", op, DtypeText(dtype),
           DtypeText(g->dtype));
  }
  const int64_t nbytes = CeilDiv(end - begin, kAlignment) * kAlignment;
  const Window window = WindowOf(op, options.ranks, begin, nbytes);
  if (!options.shares && window.size != 2)
    Fail("%s: expected a group of two ranks, got %d", op, window.size);
  const int64_t even = CeilDiv(CeilDiv(nbytes, window.size), kAlignment) * kAlignment;
  return {window, begin, nbytes, options.shares ? std::max(even, kLeastShare) : 0};
}

template <class T>
void SumShare(const char* op, const Exchanged& all, int device, DLStream stream) {
  if (!all.share) return;
  const int64_t most = kSumBlocks * Multiprocessors(device);
  const unsigned blocks = (unsigned)std::min(CeilDiv(all.share, 16 * kThreads), most);
  LaunchClusters(op, SumShareKernel<T>, blocks, 1, kThreads, 0, ComputeMajor(device) >= 9, stream,
                 all);
}

// Steps the parameters whose gradients are of a dtype.
template <class T, class Rule>
void UpdateBySums(DLArrayList* states, const DLArrayList* grads, int dtype,
                  const rule::Source& source, const Exchanged& all, int device, DLStream stream) {
  if (!all.begin) return;
  const RankGradients<T> sums{all, kIs16Bit<T> && dtype == kDtype<T>};
  constexpr int kArrays = Rule::kStates + 1, kCapacity = kMostArrays<kArrays>;
  Table<kArrays, kCapacity> table;
  for (int64_t next = 0; next < grads->count;) {
    next = Fill(&table, grads, next, dtype, [&](int64_t k, void** data) {
      for (int j = 0; j < Rule::kStates; j++) data[j] = states->arrays[j * grads->count + k]->data;
      data[Rule::kStates] = grads->arrays[k]->data;
    });
    LaunchSmall(Name<Rule>(), UpdateKernel<float, Rule, kCapacity, RankGradients<T>>,
                table.first[table.count], 1, kThreads, 0, ComputeMajor(device) >= 9, stream, table,
                source, sums);
  }
}

// Steps each float32 parameter by the sum of all ranks' gradients of it.
template <class T, class Rule>
void AllReduceUpdate(DLArrayList* states, const DLArrayList* grads, const DLArrayList* lr,
                     const DLArrayList* step, const DLArrayList* count, const DLArrayList* scale,
                     Struct<AllReduceUpdateOptions> options, DLStream stream) {
  const char* op = Name<Rule>();
  EnterAll(op, {states, grads, lr, step, count, scale});
  CheckStates<T, Rule>(op, states, grads);
  const rule::Source source = CheckedSource(op, lr, step, count, scale, options->update);
  if (!grads->count || Workspace::Querying()) return;
  if (states->arrays[0]->dtype != DL_FLOAT32)
    Fail("%s: expected parameters of float32, got %s", op, DtypeText(states->arrays[0]->dtype));
  const Exchanged wide = ExchangedOf(op, grads, DL_FLOAT32, *options);
  const Exchanged narrow = kIs16Bit<T> ? ExchangedOf(op, grads, kDtype<T>, *options) : Exchanged{};
  if (!wide.begin && !narrow.begin) return;
  const int device = grads->arrays[0]->ctx.device_id;
  Barrier(op, options->ranks, stream);
  if (options->shares) {
    SumShare<T>(op, narrow, device, stream);
    SumShare<float>(op, wide, device, stream);
    Barrier(op, options->ranks, stream);
  }
  UpdateBySums<T, Rule>(states, grads, kDtype<T>, source, narrow, device, stream);
  UpdateBySums<T, Rule>(states, grads, DL_FLOAT32, source, wide, device, stream);
  Barrier(op, options->ranks, stream);
}

#define DLSYS_UPDATE(Rule)                                                  \
  DLSYS_KERNEL_OF(cuda, all_reduce_##Rule, Name<rule::Rule>(), DL_FLOAT32,  \
                  AllReduceUpdate<float, rule::Rule>);                      \
  DLSYS_KERNEL_OF(cuda, all_reduce_##Rule, Name<rule::Rule>(), DL_BFLOAT16, \
                  AllReduceUpdate<bfloat16, rule::Rule>);
DLSYS_RULES(DLSYS_UPDATE)
#undef DLSYS_UPDATE

}  // namespace
}  // namespace cuda
}  // namespace dlsys
