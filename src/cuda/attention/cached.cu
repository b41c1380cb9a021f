// Attention of generation over a cache of keys and values: new ones are stored at the positions
// from `start` on, which lies in device memory, and new queries attend to all positions up to their
// own. Keys are split among the blocks of a cluster (split keys, as Flash-Decoding has it): each
// makes scores, their largest, the sum of their exponentials and the weighted sum of values over
// its part, and the first block joins these through distributed shared memory in a fixed order.
// A block serves one query, or eight neighbors of a prompt, which share the reads of keys. float32;
// the result overlaps nothing that is read. Reading the cache limits it, a microsecond or two of
// latency where it is short.
#include <algorithm>

#include "cuda/reduce/group.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/attention.h"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kBlock = 128, kWarps = kBlock / 32;
constexpr int kLanes = 8;  // that share a key
constexpr int64_t kMostSplits = kPortableCluster;
constexpr int64_t kKeysOfSplit = 128;  // of the whole cache, at least, where there are several
constexpr int64_t kMostHead = kBlock * 4;

// keys and values (pairs, capacity, d), where pairs are batch * heads; new ones (pairs, length, d).
struct Cache {
  float *keys, *values;
  const float *new_keys, *new_values;
  const int64_t* start;
  int64_t pairs, capacity, length, d;
};

__global__ void __launch_bounds__(kThreads) AppendKernel(Cache cache) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int64_t of_pair = cache.length * cache.d, start = *cache.start;
  for (int64_t i = FirstItem(); i < cache.pairs * of_pair; i += ItemStep()) {
    const int64_t pair = i / of_pair, row = i % of_pair / cache.d;
    if (start + row < 0 || start + row >= cache.capacity) continue;
    const int64_t to = (pair * cache.capacity + start + row) * cache.d + i % cache.d;
    cache.keys[to] = cache.new_keys[i];
    cache.values[to] = cache.new_values[i];
  }
}

// q (pairs, length, d) and y (batch, length, heads, d).
struct Attention {
  const float *q, *keys, *values;
  float* y;
  const int64_t* start;
  int64_t heads, length, capacity;
  int d, splits, most_keys;  // of a split
  int tiles;                 // of queries, a pair
  float scale;
};

// Shared memory of a block, in floats: what its peers read comes first.
template <int kRows>
struct Layout {
  int d, keys;
  __host__ __device__ int Largest() const { return 0; }
  __host__ __device__ int Totals() const { return kRows; }
  __host__ __device__ int Sums() const { return 2 * kRows + 8 - 2 * kRows % 8; }
  __host__ __device__ int Queries() const { return Sums() + kRows * d; }
  __host__ __device__ int Partial() const { return Queries() + kRows * d; }
  __host__ __device__ int Scores() const { return Partial() + kRows * kBlock * 4; }
  __host__ __device__ size_t Nbytes() const { return (Scores() + kRows * keys) * sizeof(float); }
};

template <int kRows>
__global__ void __launch_bounds__(kBlock) AttentionKernel(const Attention p) {
  float* const memory = DynamicShared<float>();
  const Layout<kRows> at{p.d, p.most_keys};
  float *largest = memory + at.Largest(), *totals = memory + at.Totals();
  float *sums = memory + at.Sums(), *queries = memory + at.Queries();
  float *partial = memory + at.Partial(), *scores = memory + at.Scores();
  const int thread = threadIdx.x, split = blockIdx.x % p.splits;
  const int64_t group = blockIdx.x / p.splits, pair = group / p.tiles;
  const int64_t first_row = group % p.tiles * kRows;
  const int rows = (int)min(p.length - first_row, (int64_t)kRows);
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  const int64_t start = *p.start + first_row;  // the position of the first query
  const int visible = (int)max(min(start + rows, p.capacity), (int64_t)0);
  const int each = (visible + p.splits - 1) / p.splits;
  const int begin = min(split * each, visible), count = min(each, visible - begin);
  for (int i = thread; i < kRows * p.d; i += kBlock)
    queries[i] = i < rows * p.d ? p.q[(pair * p.length + first_row) * p.d + i] * p.scale : 0.f;
  __syncthreads();

  const float* keys = p.keys + (pair * p.capacity + begin) * p.d;
  const int lane = thread % kLanes;
#pragma unroll 4
  for (int base = 0; base < count; base += kBlock / kLanes) {
    const int j = base + thread / kLanes;
    const float* key = keys + (int64_t)min(j, count - 1) * p.d;
    float dot[kRows] = {};
    for (int e = lane * 4; e < p.d; e += kLanes * 4) {
      const float4 k = *(const float4*)(key + e);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float4 q = *(const float4*)(queries + r * p.d + e);
        dot[r] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const float score = GroupReduce<SumMonoid, kLanes>(dot[r]);
      if (lane == 0 && j < count)
        scores[r * p.most_keys + j] = begin + j <= start + r ? score : -INFINITY;
    }
  }
  __syncthreads();

  for (int r = thread / 32; r < kRows; r += kWarps) {
    float* row = scores + r * p.most_keys;
    float most = -INFINITY, total = 0.f;
    for (int j = thread % 32; j < count; j += 32) most = fmaxf(most, row[j]);
    most = GroupReduce<MaxMonoid, 32>(most);
    for (int j = thread % 32; j < count; j += 32) {
      row[j] = most == -INFINITY ? 0.f : expf(row[j] - most);
      total += row[j];
    }
    total = GroupReduce<SumMonoid, 32>(total);
    if (thread % 32 == 0) largest[r] = most, totals[r] = total;
  }
  __syncthreads();

  const float* values = p.values + (pair * p.capacity + begin) * p.d;
  const int quads = p.d / 4, groups = kBlock / quads, own = thread / quads, quad = thread % quads;
  float4 sum[kRows] = {};
  if (own < groups) {
#pragma unroll 4
    for (int j = own; j < count; j += groups) {
      const float4 v = *(const float4*)(values + (int64_t)j * p.d + quad * 4);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float weight = scores[r * p.most_keys + j];
        sum[r].x += weight * v.x, sum[r].y += weight * v.y;
        sum[r].z += weight * v.z, sum[r].w += weight * v.w;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; r++)
      *(float4*)(partial + (own * kRows + r) * p.d + quad * 4) = sum[r];
  }
  __syncthreads();
  for (int i = thread; i < kRows * p.d; i += kBlock) {
    float total = 0.f;
    for (int g = 0; g < groups; g++) total += partial[g * kRows * p.d + i];
    sums[i] = total;
  }
  p.splits > 1 ? MeetCluster() : __syncthreads();

  for (int i = split * kBlock + thread; i < rows * p.d; i += kBlock * p.splits) {
    const int r = i / p.d, e = i % p.d;
    float most = -INFINITY, total = 0.f, weighted = 0.f;
    for (int peer = 0; peer < p.splits; peer++)
      most = fmaxf(most, p.splits > 1 ? OfPeer(largest, peer)[r] : largest[r]);
    for (int peer = 0; peer < p.splits; peer++) {
      const float* base = p.splits > 1 ? OfPeer(memory, peer) : memory;
      const float factor = expf(base[at.Largest() + r] - most);
      total += base[at.Totals() + r] * factor;
      weighted += base[at.Sums() + i] * factor;
    }
    const int64_t row = pair / p.heads * p.length + first_row + r;
    p.y[(row * p.heads + pair % p.heads) * p.d + e] = weighted / total;
  }
  if (p.splits > 1) LeaveCluster();
}

const int64_t* Start(const char* op, const DLArray* start) {
  if (start->dtype != DL_INT64 || Numel(start) != 1)
    Fail("%s: expected a start of one int64, got %s %s", op, DtypeText(start->dtype),
         ShapeText(start).c_str());
  return (const int64_t*)start->data;
}

void AppendToCache(DLArray* keys, DLArray* values, const DLArray* k, const DLArray* v,
                   const DLArray* start, DLStream stream) {
  const char* op = "append_to_cache";
  Enter(op, keys, values, k, v, start);
  CheckFitsCache(op, k, keys);
  CheckSameShape(op, k, v);
  CheckSameShape(op, keys, values);
  const Cache cache{Out(op, keys),  Out(op, values),  In(op, k),
                    In(op, v),      Start(op, start), k->shape[0] * k->shape[1],
                    keys->shape[2], k->shape[2],      k->shape[3]};
  const bool pdl = ComputeMajor(keys->ctx.device_id) >= 9;
  LaunchClusters(op, AppendKernel, Blocks(Numel(k)), 1, kThreads, 0, pdl, stream, cache);
}

void CachedAttention(const DLArray* q, const DLArray* keys, const DLArray* values,
                     const DLArray* start, float scale, DLArray* y, DLStream stream) {
  const char* op = "cached_attention";
  Enter(op, y, q, keys, values, start);
  CheckFitsCache(op, q, keys);
  CheckSameShape(op, keys, values);
  const int64_t length = q->shape[2], d = q->shape[3], capacity = keys->shape[2];
  const int64_t pairs = q->shape[0] * q->shape[1];
  Attention p = {};
  p.q = In(op, q), p.keys = In(op, keys), p.values = In(op, values), p.y = Out(op, y);
  p.start = Start(op, start);
  if (d % 4 || d > kMostHead || d == 0)
    Fail("%s: expected heads of 4 to %ld features, a multiple of 4, got %ld", op, (long)kMostHead,
         (long)d);
  if (!Aligned16(p.keys) || !Aligned16(p.values))
    Fail("%s: expected a cache at a multiple of 16 bytes", op);
  const int device = y->ctx.device_id;
  const bool clusters = ComputeMajor(device) >= 9;
  p.heads = q->shape[1], p.length = length, p.capacity = capacity, p.d = (int)d, p.scale = scale;
  p.splits = 1;
  while (clusters && p.splits < kMostSplits && capacity >= 2 * p.splits * kKeysOfSplit)
    p.splits *= 2;
  p.most_keys = (int)CeilDiv(capacity, p.splits);
  const auto launch = [&](auto of_block) {
    constexpr int kRows = decltype(of_block)::value;
    const size_t nbytes = Layout<kRows>{p.d, p.most_keys}.Nbytes();
    p.tiles = (int)CeilDiv(length, kRows);
    const int64_t blocks = pairs * p.tiles * p.splits;
    LaunchClusters(op, AttentionKernel<kRows>, (unsigned)blocks, (unsigned)p.splits, kBlock, nbytes,
                   clusters, stream, p);
  };
  const size_t limit = SharedLimit(device);
  if (Layout<1>{p.d, p.most_keys}.Nbytes() > limit)
    Fail("%s: a cache of %ld positions is too long", op, (long)capacity);
  if (length >= 4 && Layout<8>{p.d, p.most_keys}.Nbytes() <= limit)
    return launch(std::integral_constant<int, 8>());
  launch(std::integral_constant<int, 1>());
}

DLSYS_KERNEL(cuda, append_to_cache, AppendToCache);
DLSYS_KERNEL(cuda, cached_attention, CachedAttention);

}  // namespace
}  // namespace cuda
}  // namespace dlsys
