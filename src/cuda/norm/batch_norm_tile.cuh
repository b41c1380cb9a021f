// Tiling for kernels that reduce or map x (outer, channels, inner) channel by channel.
//
// A tile is a run of neighboring channels, 128 bytes or more of each image n, and is shared by
// `parts` blocks. Threads load vectors of 16 bytes where alignment and sizes allow. In a tile of
// several channels a thread keeps its position in the run for all n, and so the channels of its
// vector; in a tile of one channel, threads lie along the runs of all n. A thread knows its
// channels before its loop and advances by constant steps, without divisions.
//
// Reductions walk the images from last to first and maps from first to last: each starts with what
// the kernel before it left in the L2 cache. Parts are interleaved, so that blocks that run at a
// time read neighboring memory; those of a map with many tiles are runs of images, for the same
// reason. Memory bandwidth limits both.
#pragma once
#include <numeric>

#include "cuda/norm/norm.cuh"
#include "cuda/pointwise/vector.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

constexpr int kSumsThreads = 512;                 // of a block at most
constexpr int kMapThreads = 256, kMapBlocks = 3;  // of a block, and of a multiprocessor
constexpr int kMaxWidth = 64, kMostWidth = 256;   // channels of a tile; the most of a map

struct ChannelTiling {
  int threads;  // of a block
  int width;    // channels of a tile
  int vector;   // elements of a vector: 16 bytes or one element
  int run;      // vectors of one image
  int loaders;  // threads of a block that load
  int length;   // elements of a channel in each image of a tile
  Divisor by_length;
  int64_t vecs;  // vectors of a tile
  int tiles, parts;
  int64_t first;             // vectors from the start of a part to that of the next
  int step, most;            // vectors from one of a thread to its next; vectors of a thread
  int step_n, step_run;      // a step as images and vectors of a run,
  int64_t step_at, wrap_at;  // as elements, and how many more past the end of a run
  Divisor by_run, by_step, by_tiles;
  bool reversed;  // from the last n to the first

  // Of a reduction, or else a map. `wide` is the number of elements in 16 bytes where all arrays
  // are aligned to that, else 1; `most_width` the channels of a tile at most.
  ChannelTiling(DLContext ctx, const Channels& shape, int wide, bool reduces,
                int64_t most_width = kMaxWidth)
      : length((int)std::min<int64_t>(shape.inner, INT32_MAX)),
        by_length(std::max<int64_t>(shape.inner, 1)),
        reversed(reduces) {
    const int64_t processors = Multiprocessors(ctx.device_id);
    const bool empty = shape.Numel() == 0;
    vector = !empty && shape.count * shape.inner % wide == 0 ? wide : 1;
    width = empty ? 1 : Width(shape, most_width);
    if (width * shape.inner > (int64_t)vector * kMapThreads) {  // more vectors than threads
      if (shape.inner % vector != 0) vector = 1;
      width = 1;
    }
    tiles = (int)CeilDiv(shape.count, width);
    // One block of many threads for a tile on each multiprocessor leaves few partial sums.
    threads = reduces && tiles < processors ? kSumsThreads : kMapThreads;
    run = (int)std::max<int64_t>(1, width * shape.inner / vector);
    loaders = width > 1 ? threads / run * run : threads;
    vecs = empty ? 0 : shape.outer * run;
    const int64_t rounds = CeilDiv(vecs, loaders), all = std::max(tiles, 1);
    const int64_t resident = processors * (reduces ? kSumsThreads / threads : kMapBlocks);
    if (reduces || 8 * all <= resident) {  // interleaved, each of four vectors a thread or more
      parts = (int)std::max<int64_t>(1, std::min(CeilDiv(rounds, 4), Parts(all, resident)));
      first = loaders;
      step = parts * loaders;
      most = INT32_MAX;
    } else {  // a part is a run of images, of 4 to 16 vectors a thread
      most = (int)std::max<int64_t>(4, std::min<int64_t>(16, rounds * all / (2 * resident)));
      parts = (int)std::max<int64_t>(1, CeilDiv(rounds, most));
      first = most * loaders;
      step = loaders;
    }
    step_n = step / run;
    step_run = step % run;
    const int64_t image = (reversed ? -1 : 1) * shape.count * shape.inner;
    step_at = step_n * image + step_run * vector;
    wrap_at = image - run * vector;
    by_run = Divisor(run);
    by_step = Divisor(step);
    by_tiles = Divisor(all);
  }

  unsigned Blocks() const { return (unsigned)tiles * (unsigned)parts; }

 private:
  // Channels of a tile: 64 contiguous elements or more; a multiple of what begins at a vector, or
  // all channels. Tiles share the channels evenly.
  int Width(const Channels& shape, int64_t most_width) const {
    const int64_t even = vector / std::gcd((int64_t)vector, shape.inner);
    const int64_t enough = even * CeilDiv(most_width, even * shape.inner);
    const int64_t tiles = CeilDiv(shape.count, std::min<int64_t>(most_width, enough));
    const int64_t fair = even * CeilDiv(shape.count, tiles * even);
    return (int)std::min<int64_t>(shape.count, std::min<int64_t>(fair, most_width));
  }
  // Parts of a tile that fill one wave of resident blocks or, where a tenth of that would be idle,
  // a few.
  static int64_t Parts(int64_t tiles, int64_t resident) {
    for (int64_t waves = 1; waves < 4; waves++) {
      const int64_t parts = waves * resident / tiles;
      if (10 * parts * tiles >= 9 * waves * resident) return parts;
    }
    return 4 * resident / tiles;
  }
};

// For numbers that are rarely larger than a Divisor divides.
__device__ __forceinline__ int64_t Quotient(int64_t n, const Divisor& by) {
  return n <= INT32_MAX ? (int)n / by : n / by.value;
}

// Iterates over the vectors of a thread in one part of one tile.
template <int kVector>
struct TileIterator {
  int count;      // of vectors
  int64_t n, at;  // of the next one: its image, and its offset in the array

  __device__ TileIterator(const Channels& shape, const ChannelTiling& tiling, int part, int tile)
      : count(0), n(0), tiling_(tiling), shape_(shape), begin_((int64_t)tile * tiling.width) {
    const int64_t vec = part * tiling.first + threadIdx.x;
    if (threadIdx.x < tiling.loaders && vec < tiling.vecs) {
      count = (int)min((int64_t)tiling.most, Quotient(tiling.vecs - 1 - vec, tiling.by_step) + 1);
      n = Quotient(vec, tiling.by_run);
      k_ = (int)(vec - n * tiling.run);
    }
    if (begin_ * shape.inner + (k_ + 1) * kVector > shape.count * shape.inner)
      count = k_ = 0;  // the last tile may have fewer channels
    if (tiling.reversed) n = shape.outer - 1 - n;
    at = (n * shape.count + begin_) * shape.inner + k_ * kVector;
  }

  // of(c) for the channel c of each element of this thread's vectors. All threads call it, once.
  template <class Of, class Channel>
  __device__ __forceinline__ void OfChannels(const Of& of, Channel (&channel)[kVector]) const {
    __shared__ Channel of_tile[kMostWidth];
    if (OwnChannel() >= 0) of_tile[threadIdx.x] = of(OwnChannel());
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kVector; e++)
      channel[e] = of_tile[tiling_.width == 1 ? 0 : (k_ * kVector + e) / tiling_.by_length];
  }

  // The channel of the tile that this thread takes care of, or -1.
  __device__ __forceinline__ int64_t OwnChannel() const {
    const int64_t c = begin_ + threadIdx.x;
    return threadIdx.x < tiling_.width && c < shape_.count ? c : -1;
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
  const Channels& shape_;
  const int64_t begin_;  // the first channel of the tile
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

// sums[w] = the sum of `value` over the threads w, w + width, w + 2 width, ...
template <class Sum>
__device__ __forceinline__ void ReduceThreads(const ChannelTiling& tiling, Sum value,
                                              Sum (&sums)[kSumsThreads]) {
  const int width = tiling.width;
  __syncthreads();  // the previous call's readers are done
  sums[threadIdx.x] = value;
  __syncthreads();
  for (int left = tiling.threads / width; left > 1;) {
    const int half = (left + 1) / 2;
    if (threadIdx.x < (left - half) * width) sums[threadIdx.x] += sums[threadIdx.x + half * width];
    __syncthreads();
    left = half;
  }
}

// The sums by channel of what each thread has for each element of its vectors.
template <int kVector, class Sum>
__device__ __forceinline__ void ReduceVecs(const ChannelTiling& tiling, const Sum (&of)[kVector],
                                           Sum (&sums)[kSumsThreads]) {
  Sum sum = 0;
  if (tiling.width == 1) {
#pragma unroll
    for (int e = 0; e < kVector; e++) sum += of[e];
    return ReduceThreads(tiling, sum, sums);
  }
  __shared__ Sum entries[kSumsThreads * kVector];
  __syncthreads();  // the previous call's readers are done
#pragma unroll
  for (int e = 0; e < kVector; e++) entries[threadIdx.x * kVector + e] = of[e];
  __syncthreads();
  const int each = tiling.threads / tiling.width, first = threadIdx.x / tiling.width;
  const int w = threadIdx.x - first * tiling.width;
  const int row = tiling.run * kVector, count = tiling.loaders / tiling.run * tiling.length;
  if (first < each)
    for (int k = first; k < count; k += each) {
      const int n = k / tiling.by_length;
      sum += entries[n * row + w * tiling.length + k - n * tiling.length];
    }
  ReduceThreads(tiling, sum, sums);
}

// ---- reductions ----

// Two sums of each channel. Of op: Add gives those of this thread for each element of its vectors,
// Finish writes what becomes of those of a channel.
template <class Sum>
struct Partials {
  Sum* first;   // (parts, channels)
  Sum* second;  // (parts, channels)
};
template <class Sum>
struct TileSums {
  Sum first[kSumsThreads], second[kSumsThreads];
};

// The sums over the parts of a tile. Other blocks wrote them, so this bypasses the L1 cache.
template <class Sum>
__device__ __forceinline__ void ReduceParts(const Channels& shape, const ChannelTiling& tiling,
                                            int tile, const Partials<Sum>& partials,
                                            TileSums<Sum>& sums) {
  constexpr int kBatch = 8;  // loads of each in flight
  const int each = tiling.threads / tiling.width, begin = threadIdx.x / tiling.width;
  const int64_t c = (int64_t)tile * tiling.width + threadIdx.x - begin * tiling.width;
  Sum first = 0, second = 0;
  if (begin < each && c < shape.count) {
    for (int64_t part = begin; part < tiling.parts; part += kBatch * each) {
      Sum of_first[kBatch], of_second[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; j++) {
        const bool any = part + j * each < tiling.parts;
        const int64_t at = (part + j * each) * shape.count + c;
        of_first[j] = any ? __ldcg(partials.first + at) : Sum(0);
        of_second[j] = any ? __ldcg(partials.second + at) : Sum(0);
      }
#pragma unroll
      for (int j = 0; j < kBatch; j++) first += of_first[j], second += of_second[j];
    }
  }
  ReduceThreads(tiling, first, sums.first);
  ReduceThreads(tiling, second, sums.second);
}

template <class Op>
__device__ __forceinline__ void Finish(const Channels& shape, const ChannelTiling& tiling, int tile,
                                       const Op& op, const TileSums<typename Op::Sum>& sums) {
  const int64_t c = (int64_t)tile * tiling.width + threadIdx.x;
  if (threadIdx.x < tiling.width && c < shape.count)
    op.Finish(shape, c, sums.first[threadIdx.x], sums.second[threadIdx.x]);
}

// The blocks of a tile write partial sums. With `arrived`, a counter a tile that is zero before and
// after, the last block to arrive combines them; without, TotalsKernel does.
template <int kVector, class Op>
__global__ void __launch_bounds__(kSumsThreads)
    PartialSumsKernel(const __grid_constant__ Channels shape,
                      const __grid_constant__ ChannelTiling tiling, const __grid_constant__ Op op,
                      Partials<typename Op::Sum> partials, unsigned* arrived) {
  __shared__ TileSums<typename Op::Sum> sums;
  __shared__ bool last;
  const int part = (int)blockIdx.x / tiling.by_tiles;
  const int tile = (int)blockIdx.x - part * tiling.tiles;
  TileIterator<kVector> it(shape, tiling, part, tile);
  GridDependencySynchronize();
  typename Op::Sum first[kVector], second[kVector];
  op.Add(shape, it, first, second);
  TriggerProgrammaticLaunch();
  ReduceVecs(tiling, first, sums.first);
  ReduceVecs(tiling, second, sums.second);
  if (tiling.parts > 1) {
    const int64_t c = it.OwnChannel();
    if (c >= 0) {
      partials.first[part * shape.count + c] = sums.first[threadIdx.x];
      partials.second[part * shape.count + c] = sums.second[threadIdx.x];
    }
    if (!arrived) return;
    __syncthreads();
    if (threadIdx.x == 0) last = CountUp(arrived + tile) == tiling.parts - 1;
    __syncthreads();
    if (!last) return;
    ReduceParts(shape, tiling, tile, partials, sums);
    if (threadIdx.x == 0) arrived[tile] = 0;
  }
  Finish(shape, tiling, tile, op, sums);
}

template <class Op>
__global__ void __launch_bounds__(kSumsThreads)
    TotalsKernel(const __grid_constant__ Channels shape,
                 const __grid_constant__ ChannelTiling tiling, const __grid_constant__ Op op,
                 Partials<typename Op::Sum> partials) {
  __shared__ TileSums<typename Op::Sum> sums;
  GridDependencySynchronize();
  ReduceParts(shape, tiling, (int)blockIdx.x, partials, sums);
  Finish(shape, tiling, (int)blockIdx.x, op, sums);
}

// The sums of op over elements T, all arrays of which lie at multiples of 16 bytes if `aligned`.
template <class T, class Op>
void RunSums(const char* name, DLContext ctx, const Channels& shape, bool aligned, const Op& op,
             unsigned* arrived, DLStream stream) {
  using Sum = typename Op::Sum;
  const ChannelTiling tiling(ctx, shape, aligned ? kWide<T> : 1, true);
  const int64_t count = tiling.parts * shape.count;
  const Scratch scratch(ctx, 2 * count * (int64_t)sizeof(Sum), stream);
  const Partials<Sum> partials{(Sum*)scratch.data(), (Sum*)scratch.data() + count};
  const bool pdl = ComputeMajor(ctx.device_id) >= 9;
  const auto run = [&](auto kernel) {
    LaunchClusters(name, kernel, tiling.Blocks(), 1, tiling.threads, 0, pdl, stream, shape, tiling,
                   op, partials, arrived);
  };
  tiling.vector > 1 ? run(PartialSumsKernel<kWide<T>, Op>) : run(PartialSumsKernel<1, Op>);
  if (!arrived && tiling.parts > 1)
    LaunchClusters(name, TotalsKernel<Op>, (unsigned)tiling.tiles, 1, tiling.threads, 0, pdl,
                   stream, shape, tiling, op, partials);
}

// ---- maps ----

// op.Map writes one part of one tile.
template <int kVector, class Op>
__global__ void __launch_bounds__(kMapThreads, kMapBlocks)
    MapKernel(const __grid_constant__ Channels shape, const __grid_constant__ ChannelTiling tiling,
              const __grid_constant__ Op op) {
  const int part = (int)blockIdx.x / tiling.by_tiles;
  TileIterator<kVector> it(shape, tiling, part, (int)blockIdx.x - part * tiling.tiles);
  GridDependencySynchronize();
  op.Map(it);
}

template <class T, class Op>
void RunMap(const char* name, DLContext ctx, const Channels& shape, bool aligned, const Op& op,
            DLStream stream, int64_t most_width = kMaxWidth) {
  const ChannelTiling tiling(ctx, shape, aligned ? kWide<T> : 1, false, most_width);
  const auto run = [&](auto kernel) {
    LaunchClusters(name, kernel, tiling.Blocks(), 1, kMapThreads, 0,
                   ComputeMajor(ctx.device_id) >= 9, stream, shape, tiling, op);
  };
  tiling.vector > 1 ? run(MapKernel<kWide<T>, Op>) : run(MapKernel<1, Op>);
}

}  // namespace cuda
}  // namespace dlsys
