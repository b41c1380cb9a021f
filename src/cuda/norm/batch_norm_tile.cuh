// Tiling for kernels that reduce or map x (outer, channels, inner) channel by channel.
//
// A tile is a run of neighboring channels, about a kilobyte of each image n, and is shared by
// `parts` blocks. Threads load vectors of four elements where alignment and sizes allow. In a tile
// of several channels a thread keeps its position in the run for all n, and so the channels of its
// vector; in a tile of one channel, threads lie along the runs of all n. A thread knows its
// channels before its loop and advances by constant steps, without divisions.
//
// Reductions walk the images from last to first with interleaved blocks, maps from first to last:
// each starts with what the kernel before it left in the L2 cache. Memory bandwidth limits both.
#pragma once
#include "cuda/norm/norm.cuh"
#include "cuda/pointwise/quad.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {

constexpr int kMaxWidth = 128;
constexpr int64_t kResidentBlocks = 4 * 132;  // on a GPU of 132 multiprocessors

struct ChannelTiling {
  int width;        // channels of a tile
  int reducers;     // threads a channel in the last step of a reduction, a power of 2
  int loaders;      // threads of a block that load
  bool vectorized;  // four elements a vector, else one
  int run;          // vectors of one image
  int64_t vecs;     // vectors of a tile
  int64_t tiles, parts;
  int64_t first;             // vectors from the start of a part to that of the next
  int64_t step;              // vectors from one of a thread to its next, which is
  int step_n, step_run;      // so many images and vectors of a run,
  int64_t step_at, wrap_at;  // so many elements, and so many more past the end of a run
  int max_vecs;              // vectors of a thread, at most
  bool reversed;             // from the last n to the first

  // For reductions: as many parts as are resident at a time, each of four vectors a thread or more.
  static ChannelTiling OfSums(const Channels& shape, bool aligned) {
    ChannelTiling t(shape, aligned);
    const int64_t worth = CeilDiv(t.vecs, 4 * t.loaders);
    t.parts =
        std::max<int64_t>(1, std::min(worth, kResidentBlocks / std::max<int64_t>(t.tiles, 1)));
    t.first = t.loaders;
    t.max_vecs = (int)CeilDiv(t.vecs, t.parts * t.loaders);
    t.Step(shape, t.parts * t.loaders, true);
    return t;
  }
  // For maps: a part is a run of images, of 4 to 16 vectors a thread.
  static ChannelTiling OfMap(const Channels& shape, bool aligned) {
    ChannelTiling t(shape, aligned);
    const int64_t all = CeilDiv(t.vecs, t.loaders);
    const int64_t fair = CeilDiv(all * t.tiles, 2 * kResidentBlocks);
    t.max_vecs = (int)std::max<int64_t>(4, std::min<int64_t>(16, fair));
    t.parts = CeilDiv(all, t.max_vecs);
    t.first = t.max_vecs * t.loaders;
    t.Step(shape, t.loaders, false);
    return t;
  }

  unsigned Blocks() const { return (unsigned)(tiles * parts); }
  __host__ __device__ int Vector() const { return vectorized ? 4 : 1; }
  // Elements of each channel in a part of a reduction.
  __host__ __device__ int64_t PerChannel(int64_t part) const {
    const int64_t left = vecs % step - part * loaders;
    const int64_t loaded = vecs / step * loaders + (left < 0 ? 0 : left < loaders ? left : loaders);
    return loaded * Vector() / width;
  }

 private:
  ChannelTiling(const Channels& shape, bool aligned) {
    const bool empty = shape.Numel() == 0;
    vectorized = aligned && !empty && shape.count * shape.inner % 4 == 0;
    const int64_t even = !vectorized || shape.inner % 4 == 0 ? 1 : shape.inner % 2 == 0 ? 2 : 4;
    width = empty ? 1 : (int)Width(shape, even);
    if (even > 1 && width * shape.inner > 4 * kThreads) {  // more vectors than threads
      vectorized = false;
      width = 1;
    }
    run = (int)std::max<int64_t>(1, width * shape.inner / Vector());
    loaders = width > 1 ? kThreads / run * run : kThreads;
    vecs = empty ? 0 : shape.outer * run;
    tiles = CeilDiv(shape.count, width);
    reducers = 32;
    while (reducers * width > kThreads) reducers /= 2;
  }
  void Step(const Channels& shape, int64_t step_vecs, bool from_last) {
    reversed = from_last;
    step = step_vecs;
    step_n = (int)(step / run);
    step_run = (int)(step % run);
    const int64_t image = (reversed ? -1 : 1) * shape.count * shape.inner;
    step_at = step_n * image + step_run * Vector();
    wrap_at = image - run * Vector();
  }
  // Channels of a tile: 128 contiguous elements or more; a multiple of `even`, or all channels.
  static int64_t Width(const Channels& shape, int64_t even) {
    const int64_t enough = CeilDiv(kMaxWidth, std::max<int64_t>(even * shape.inner, 1));
    return std::max<int64_t>(1, std::min(shape.count, std::min<int64_t>(kMaxWidth, even * enough)));
  }
};

// ---- vectors of elements ----

template <int kVector>
struct Vec {
  float v[kVector];
};

template <int kVector, class T>
__device__ __forceinline__ Vec<kVector> Read(const T* p) {
  if constexpr (kVector == 1) {
    return {*p};
  } else {
    const float4 v = LoadQuad(p);
    return {v.x, v.y, v.z, v.w};
  }
}
// Streaming load, for what is not read again: it is evicted first.
template <int kVector, class T>
__device__ __forceinline__ Vec<kVector> ReadLast(const T* p) {
  if constexpr (kVector == 1) {
    return {LoadLast(p)};
  } else {
    const float4 v = LoadQuadLast(p);
    return {v.x, v.y, v.z, v.w};
  }
}
template <int kVector, class T>
__device__ __forceinline__ void Write(T* p, const Vec<kVector>& u) {
  if constexpr (kVector == 1)
    *p = T(u.v[0]);
  else
    StoreQuad(p, make_float4(u.v[0], u.v[1], u.v[2], u.v[3]));
}

// Iterates over the vectors of a thread in one part of one tile.
template <int kVector>
struct TileIterator {
  int count;           // of vectors
  int64_t n, at;       // of the next one: its image, and its offset in the array
  int64_t c[kVector];  // the channel of each of its elements

  __device__ TileIterator(const Channels& shape, const ChannelTiling& tiling, int64_t part,
                          int64_t tile)
      : count(0), n(0), tiling_(tiling) {
    const int64_t begin = tile * tiling.width;
    const int64_t vec = part * tiling.first + threadIdx.x;
    if (threadIdx.x < tiling.loaders && vec < tiling.vecs) {
      count = (int)min((int64_t)tiling.max_vecs, (tiling.vecs - 1 - vec) / tiling.step + 1);
      n = vec / tiling.run;
      k_ = (int)(vec - n * tiling.run);
    }
    if (begin * shape.inner + (k_ + 1) * kVector > shape.count * shape.inner)
      count = k_ = 0;  // the last tile may have fewer channels
#pragma unroll
    for (int e = 0; e < kVector; e++)
      c[e] = begin + (tiling.width == 1 ? 0 : (k_ * kVector + e) / (int)shape.inner);
    if (tiling.reversed) n = shape.outer - 1 - n;
    at = (n * shape.count + begin) * shape.inner + k_ * kVector;
  }

  // Calls add(load(n, at), at) for every vector, with kBatch loads in flight.
  template <int kBatch, class Load, class Add>
  __device__ __forceinline__ void ForEach(const Load& load, const Add& add) {
    int left = count;
    for (; left >= kBatch; left -= kBatch) Batch<kBatch, true>(kBatch, load, add);
    if (left > 0) Batch<kBatch, false>(left, load, add);
  }

 private:
  const ChannelTiling& tiling_;
  int k_ = 0;

  template <int kBatch, bool kFull, class Load, class Add>
  __device__ __forceinline__ void Batch(int left, const Load& load, const Add& add) {
    decltype(load(n, at)) loaded[kBatch];
    int64_t where[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++)
      if (kFull || j < left) {
        where[j] = at;
        loaded[j] = load(n, at);
        Advance();
      }
#pragma unroll
    for (int j = 0; j < kBatch; j++)
      if (kFull || j < left) add(loaded[j], where[j]);
  }

  __device__ __forceinline__ void Advance() {
    n += tiling_.reversed ? -tiling_.step_n : tiling_.step_n;
    at += tiling_.step_at;
    k_ += tiling_.step_run;
    if (k_ < tiling_.run) return;
    k_ -= tiling_.run;
    n += tiling_.reversed ? -1 : 1;
    at += tiling_.wrap_at;
  }
};

// ---- block reductions by channel; all threads of a block call these ----

struct TileSums {
  float of[kMaxWidth];  // a channel of the tile
};

// The sums of `value` by channel, each over kThreads / width neighboring threads.
__device__ __forceinline__ void ReduceThreads(const ChannelTiling& tiling, float value,
                                              TileSums* totals) {
  if (tiling.width == 1) {
    value = GroupReduce<SumMonoid, kThreads>(value);
    if (threadIdx.x == 0) totals->of[0] = value;
    __syncthreads();
    return;
  }
  __shared__ float values[kThreads];
  const int w = threadIdx.x / tiling.reducers, each = kThreads / tiling.width;
  __syncthreads();  // the previous call's readers are done
  values[threadIdx.x] = value;
  __syncthreads();
  float sum = 0.f;
  if (w < tiling.width)
    for (int k = threadIdx.x % tiling.reducers; k < each; k += tiling.reducers)
      sum += values[w * each + k];
  for (int distance = tiling.reducers / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (w < tiling.width && threadIdx.x % tiling.reducers == 0) totals->of[w] = sum;
  __syncthreads();
}

// The sums by channel of what each thread has for each element of its vectors.
template <int kVector>
__device__ __forceinline__ void ReduceVecs(const Channels& shape, const ChannelTiling& tiling,
                                           const float (&of)[kVector], TileSums* totals) {
  float sum = 0.f;
  if (tiling.width == 1) {
#pragma unroll
    for (int e = 0; e < kVector; e++) sum += of[e];
    return ReduceThreads(tiling, sum, totals);
  }
  __shared__ __align__(16) float entries[kThreads * kVector];
  __syncthreads();  // the previous call's readers are done
  Vec<kVector> own;
#pragma unroll
  for (int e = 0; e < kVector; e++) own.v[e] = of[e];
  Write(entries + threadIdx.x * kVector, own);
  __syncthreads();
  const int each = kThreads / tiling.width, inner = (int)shape.inner;
  const int w = threadIdx.x / each, length = tiling.run * kVector;
  const int count = tiling.loaders / tiling.run * inner;
  if (w < tiling.width)
    for (int k = threadIdx.x % each; k < count; k += each)
      sum += entries[k / inner * length + w * inner + k % inner];
  ReduceThreads(tiling, sum, totals);
}

// The sum of value(p) over the parts, for each channel of a tile. value reads what other blocks
// wrote, and so bypasses the L1 cache.
template <class Value>
__device__ __forceinline__ void ReduceParts(const Channels& shape, const ChannelTiling& tiling,
                                            int64_t tile, const Value& value, TileSums* totals) {
  const int each = kThreads / tiling.width;
  const int w = threadIdx.x / each;
  const int64_t c = tile * tiling.width + w;
  float sum = 0.f;
  if (w < tiling.width && c < shape.count) {
#pragma unroll 4
    for (int64_t p = threadIdx.x % each; p < tiling.parts; p += each) sum += value(p, c, w);
  }
  ReduceThreads(tiling, sum, totals);
}

// ---- reductions ----

// op.Partial writes the partial sums of one part of one tile, op.Totals combines those of all
// parts. With `arrived`, a counter a tile that is zero before and after, the last block to arrive
// at a tile combines them; without, TotalsKernel does.
template <int kVector, class Op>
__global__ void __launch_bounds__(kThreads, 4)
    PartialSumsKernel(const __grid_constant__ Channels shape,
                      const __grid_constant__ ChannelTiling tiling, const __grid_constant__ Op op,
                      unsigned* arrived) {
  __shared__ bool last;
  const int64_t part = blockIdx.x / tiling.tiles;
  const int64_t tile = blockIdx.x - part * tiling.tiles;
  GridDependencySynchronize();
  op.template Partial<kVector>(shape, tiling, part, tile);
  TriggerProgrammaticLaunch();
  if (!arrived) return;
  __syncthreads();
  if (threadIdx.x == 0) last = CountUp(arrived + tile) == tiling.parts - 1;
  __syncthreads();
  if (!last) return;
  op.Totals(shape, tiling, tile);
  if (threadIdx.x == 0) arrived[tile] = 0;
}

template <class Op>
__global__ void __launch_bounds__(kThreads)
    TotalsKernel(const __grid_constant__ Channels shape,
                 const __grid_constant__ ChannelTiling tiling, const __grid_constant__ Op op) {
  GridDependencySynchronize();
  op.Totals(shape, tiling, blockIdx.x);
}

template <class Op>
void RunSumsOf(const char* op, DLContext ctx, const Channels& shape, const ChannelTiling& tiling,
               const Op& body, unsigned* arrived, DLStream stream) {
  const bool pdl = ComputeMajor(ctx.device_id) >= 9;
  const auto run = [&](auto kernel) {
    LaunchClusters(op, kernel, tiling.Blocks(), 1, kThreads, 0, pdl, stream, shape, tiling, body,
                   arrived);
  };
  tiling.vectorized ? run(PartialSumsKernel<4, Op>) : run(PartialSumsKernel<1, Op>);
  if (!arrived)
    LaunchClusters(op, TotalsKernel<Op>, (unsigned)tiling.tiles, 1, kThreads, 0, pdl, stream, shape,
                   tiling, body);
}

// ---- maps ----

// op.Map writes one part of one tile.
template <int kVector, class Op>
__global__ void __launch_bounds__(kThreads, 4)
    MapKernel(const __grid_constant__ Channels shape, const __grid_constant__ ChannelTiling tiling,
              const __grid_constant__ Op op) {
  const int64_t part = blockIdx.x / tiling.tiles;
  GridDependencySynchronize();
  TileIterator<kVector> it(shape, tiling, part, blockIdx.x - part * tiling.tiles);
  op.Map(it);
}

template <class Op>
void RunMap(const char* op, DLContext ctx, const Channels& shape, bool aligned, const Op& body,
            DLStream stream) {
  const ChannelTiling tiling = ChannelTiling::OfMap(shape, aligned);
  const auto run = [&](auto kernel) {
    LaunchClusters(op, kernel, tiling.Blocks(), 1, kThreads, 0, ComputeMajor(ctx.device_id) >= 9,
                   stream, shape, tiling, body);
  };
  tiling.vectorized ? run(MapKernel<4, Op>) : run(MapKernel<1, Op>);
}

}  // namespace cuda
}  // namespace dlsys
