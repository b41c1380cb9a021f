// How kernels go over x (outer, channels, inner) channel by channel: by tiles of neighbouring
// channels, a tile by blocks, each of which has a part of it.
//
// A tile is of every n a run of width * inner neighbouring numbers, which is read in units of 16
// bytes where that can be, and is a kilobyte or so where there are enough channels. Where a tile
// has several channels a thread stays in its column of all runs, and so in the channels of its
// unit; where it has one, threads lie along the runs of all n. Either way a thread knows its
// channels before it begins, and takes one unit in `step` from there.
//
// Sums take the images from last to first and all blocks go side by side, maps take them from first
// to last: each begins with what the kernel before it has left in the cache.
#pragma once
#include "cuda/norm/norm.cuh"
#include "cuda/reduce/group.cuh"

namespace dlsys {
namespace cuda {

constexpr int kMostWidth = 128;
constexpr int64_t kBlocksAtOnce = 4 * 132;  // of a large chip

struct ChannelTiling {
  int width;      // channels of a tile
  int joiners;    // threads a channel where few are left to be joined, a power of 2
  int lanes;      // threads of a block that take units
  bool by_four;   // numbers in a unit, or else one
  int run;        // units of one n
  int64_t units;  // of a tile
  int64_t tiles, parts;
  int64_t first;             // units from the first one of a part to that of the next
  int64_t step;              // and from one of a thread to the next, which is
  int step_n, step_run;      // so many images and units of a run,
  int64_t step_at, wrap_at;  // so many numbers in memory, and so many more beyond the run's end
  int most;                  // units of a thread
  bool back;                 // from the last n to the first

  // For sums: as many parts as the chip has room for at once, each of four units a thread or more.
  static ChannelTiling OfSums(const Channels& shape, bool aligned) {
    ChannelTiling t(shape, aligned);
    const int64_t worth = CeilDiv(t.units, 4 * t.lanes);
    t.parts = std::max<int64_t>(1, std::min(worth, kBlocksAtOnce / std::max<int64_t>(t.tiles, 1)));
    t.first = t.lanes;
    t.most = (int)CeilDiv(t.units, t.parts * t.lanes);
    t.Step(shape, t.parts * t.lanes, true);
    return t;
  }
  // For maps: a part is neighbouring images, of 4 to 16 units a thread.
  static ChannelTiling OfMap(const Channels& shape, bool aligned) {
    ChannelTiling t(shape, aligned);
    const int64_t all = CeilDiv(t.units, t.lanes);
    const int64_t fair = CeilDiv(all * t.tiles, 2 * kBlocksAtOnce);
    t.most = (int)std::max<int64_t>(4, std::min<int64_t>(16, fair));
    t.parts = CeilDiv(all, t.most);
    t.first = t.most * t.lanes;
    t.Step(shape, t.lanes, false);
    return t;
  }

  unsigned Blocks() const { return (unsigned)(tiles * parts); }
  __host__ __device__ int Vector() const { return by_four ? 4 : 1; }
  // How many numbers of each channel a part of a sum has.
  __host__ __device__ int64_t PerChannel(int64_t part) const {
    const int64_t left = units % step - part * lanes;
    const int64_t own = units / step * lanes + (left < 0 ? 0 : left < lanes ? left : lanes);
    return own * Vector() / width;
  }

 private:
  ChannelTiling(const Channels& shape, bool aligned) {
    const bool empty = shape.Numel() == 0;
    by_four = aligned && !empty && shape.count * shape.inner % 4 == 0;
    const int64_t even = !by_four || shape.inner % 4 == 0 ? 1 : shape.inner % 2 == 0 ? 2 : 4;
    width = empty ? 1 : (int)Width(shape, even);
    if (even > 1 && width * shape.inner > 4 * kThreads) {  // too long for a thread a unit
      by_four = false;
      width = 1;
    }
    run = (int)std::max<int64_t>(1, width * shape.inner / Vector());
    lanes = width > 1 ? kThreads / run * run : kThreads;
    units = empty ? 0 : shape.outer * run;
    tiles = CeilDiv(shape.count, width);
    joiners = 32;
    while (joiners * width > kThreads) joiners /= 2;
  }
  void Step(const Channels& shape, int64_t units_of_step, bool from_last) {
    back = from_last;
    step = units_of_step;
    step_n = (int)(step / run);
    step_run = (int)(step % run);
    const int64_t plane = (back ? -1 : 1) * shape.count * shape.inner;
    step_at = step_n * plane + step_run * Vector();
    wrap_at = plane - run * Vector();
  }
  // Channels of which 128 numbers or more are neighbours; a multiple of `even`, or all.
  static int64_t Width(const Channels& shape, int64_t even) {
    const int64_t enough = CeilDiv(kMostWidth, std::max<int64_t>(even * shape.inner, 1));
    return std::max<int64_t>(1,
                             std::min(shape.count, std::min<int64_t>(kMostWidth, even * enough)));
  }
};

// ---- units ----

// A unit's numbers.
template <int kVector>
struct Unit {
  float v[kVector];
};

template <int kVector>
__device__ __forceinline__ Unit<kVector> Read(const float* p) {
  if constexpr (kVector == 1) {
    return {*p};
  } else {
    const float4 v = *(const float4*)p;
    return {v.x, v.y, v.z, v.w};
  }
}
// What is not read again soon: others may have its place in the cache.
template <int kVector>
__device__ __forceinline__ Unit<kVector> ReadLast(const float* p) {
  if constexpr (kVector == 1) {
    return {__ldcs(p)};
  } else {
    const float4 v = __ldcs((const float4*)p);
    return {v.x, v.y, v.z, v.w};
  }
}
template <int kVector>
__device__ __forceinline__ void Write(float* p, const Unit<kVector>& u) {
  if constexpr (kVector == 1)
    *p = u.v[0];
  else
    *(float4*)p = make_float4(u.v[0], u.v[1], u.v[2], u.v[3]);
}

// The units of a thread in one part of one tile.
template <int kVector>
struct Walk {
  int count;           // of units
  int64_t n, at;       // of the next one: its image, and where in the array it begins
  int64_t c[kVector];  // the channel of each of its numbers

  __device__ Walk(const Channels& shape, const ChannelTiling& tiling, int64_t part, int64_t tile)
      : count(0), n(0), tiling_(tiling) {
    const int64_t begin = tile * tiling.width;
    const int64_t unit = part * tiling.first + threadIdx.x;
    if (threadIdx.x < tiling.lanes && unit < tiling.units) {
      count = (int)min((int64_t)tiling.most, (tiling.units - 1 - unit) / tiling.step + 1);
      n = unit / tiling.run;
      k_ = (int)(unit - n * tiling.run);
    }
    if (begin * shape.inner + (k_ + 1) * kVector > shape.count * shape.inner)
      count = k_ = 0;  // the last tile may have fewer channels
#pragma unroll
    for (int e = 0; e < kVector; e++)
      c[e] = begin + (tiling.width == 1 ? 0 : (k_ * kVector + e) / (int)shape.inner);
    if (tiling.back) n = shape.outer - 1 - n;
    at = (n * shape.count + begin) * shape.inner + k_ * kVector;
  }

  // Calls add(load(n, at), at) for every unit, kBatch loads under way at once.
  template <int kBatch, class Load, class Add>
  __device__ __forceinline__ void Each(const Load& load, const Add& add) {
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
    n += tiling_.back ? -tiling_.step_n : tiling_.step_n;
    at += tiling_.step_at;
    k_ += tiling_.step_run;
    if (k_ < tiling_.run) return;
    k_ -= tiling_.run;
    n += tiling_.back ? -1 : 1;
    at += tiling_.wrap_at;
  }
};

// ---- what threads have, joined; whole blocks call these ----

struct TileTotals {
  float of[kMostWidth];  // by the channels of the tile
};

// The sums of what threads have for channels, kThreads / width neighbours for each.
__device__ __forceinline__ void JoinThreads(const ChannelTiling& tiling, float value,
                                            TileTotals* totals) {
  if (tiling.width == 1) {
    value = Join<SumOf, kThreads>(value);
    if (threadIdx.x == 0) totals->of[0] = value;
    __syncthreads();
    return;
  }
  __shared__ float of_thread[kThreads];
  const int w = threadIdx.x / tiling.joiners, each = kThreads / tiling.width;
  __syncthreads();  // the previous call's readers are done
  of_thread[threadIdx.x] = value;
  __syncthreads();
  float sum = 0.f;
  if (w < tiling.width)
    for (int k = threadIdx.x % tiling.joiners; k < each; k += tiling.joiners)
      sum += of_thread[w * each + k];
  for (int distance = tiling.joiners / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (w < tiling.width && threadIdx.x % tiling.joiners == 0) totals->of[w] = sum;
  __syncthreads();
}

// The sums over a tile's channels of what each thread has for each number of its units.
template <int kVector>
__device__ __forceinline__ void JoinUnits(const Channels& shape, const ChannelTiling& tiling,
                                          const float (&of)[kVector], TileTotals* totals) {
  float sum = 0.f;
  if (tiling.width == 1) {
#pragma unroll
    for (int e = 0; e < kVector; e++) sum += of[e];
    return JoinThreads(tiling, sum, totals);
  }
  __shared__ __align__(16) float entries[kThreads * kVector];
  __syncthreads();  // the previous call's readers are done
  Unit<kVector> own;
#pragma unroll
  for (int e = 0; e < kVector; e++) own.v[e] = of[e];
  Write(entries + threadIdx.x * kVector, own);
  __syncthreads();
  const int each = kThreads / tiling.width, inner = (int)shape.inner;
  const int w = threadIdx.x / each, length = tiling.run * kVector;
  const int count = tiling.lanes / tiling.run * inner;
  if (w < tiling.width)
    for (int k = threadIdx.x % each; k < count; k += each)
      sum += entries[k / inner * length + w * inner + k % inner];
  JoinThreads(tiling, sum, totals);
}

// sum of value(p) over the parts, for each channel of a tile. Where the parts are to be seen by
// others, value has to read what other blocks wrote.
template <class Value>
__device__ __forceinline__ void JoinParts(const Channels& shape, const ChannelTiling& tiling,
                                          int64_t tile, const Value& value, TileTotals* totals) {
  const int each = kThreads / tiling.width;
  const int w = threadIdx.x / each;
  const int64_t c = tile * tiling.width + w;
  float sum = 0.f;
  if (w < tiling.width && c < shape.count) {
#pragma unroll 4
    for (int64_t p = threadIdx.x % each; p < tiling.parts; p += each) sum += value(p, c, w);
  }
  JoinThreads(tiling, sum, totals);
}

// ---- kernels of sums ----

// op.Part has the sums of one part of one tile and keeps them, op.All those of all parts. With
// `arrived`, zero for each tile before and after, the last block of a tile to arrive finds those of
// all; else JoinKernel does.
template <int kVector, class Op>
__global__ void __launch_bounds__(kThreads, 4)
    PartsKernel(const __grid_constant__ Channels shape,
                const __grid_constant__ ChannelTiling tiling, const __grid_constant__ Op op,
                unsigned* arrived) {
  __shared__ bool last;
  const int64_t part = blockIdx.x / tiling.tiles;
  const int64_t tile = blockIdx.x - part * tiling.tiles;
  GridDependencySynchronize();
  op.template Part<kVector>(shape, tiling, part, tile);
  TriggerProgrammaticLaunch();
  if (!arrived) return;
  __syncthreads();
  if (threadIdx.x == 0) last = CountUp(arrived + tile) == tiling.parts - 1;
  __syncthreads();
  if (!last) return;
  op.All(shape, tiling, tile);
  if (threadIdx.x == 0) arrived[tile] = 0;
}

template <class Op>
__global__ void __launch_bounds__(kThreads)
    JoinKernel(const __grid_constant__ Channels shape, const __grid_constant__ ChannelTiling tiling,
               const __grid_constant__ Op op) {
  GridDependencySynchronize();
  op.All(shape, tiling, blockIdx.x);
}

template <class Op>
void RunParts(const char* op, DLContext ctx, const Channels& shape, const ChannelTiling& tiling,
              const Op& body, unsigned* arrived, DLStream stream) {
  const bool early = ComputeMajor(ctx.device_id) >= 9;
  const auto run = [&](auto kernel) {
    LaunchClusters(op, kernel, tiling.Blocks(), 1, kThreads, 0, early, stream, shape, tiling, body,
                   arrived);
  };
  tiling.by_four ? run(PartsKernel<4, Op>) : run(PartsKernel<1, Op>);
  if (!arrived)
    LaunchClusters(op, JoinKernel<Op>, (unsigned)tiling.tiles, 1, kThreads, 0, early, stream, shape,
                   tiling, body);
}

// ---- kernels of maps ----

// op.Map makes one part of one tile.
template <int kVector, class Op>
__global__ void __launch_bounds__(kThreads, 4)
    MapKernel(const __grid_constant__ Channels shape, const __grid_constant__ ChannelTiling tiling,
              const __grid_constant__ Op op) {
  const int64_t part = blockIdx.x / tiling.tiles;
  GridDependencySynchronize();
  Walk<kVector> walk(shape, tiling, part, blockIdx.x - part * tiling.tiles);
  op.Map(walk);
}

template <class Op>
void RunMap(const char* op, DLContext ctx, const Channels& shape, bool aligned, const Op& body,
            DLStream stream) {
  const ChannelTiling tiling = ChannelTiling::OfMap(shape, aligned);
  const auto run = [&](auto kernel) {
    LaunchClusters(op, kernel, tiling.Blocks(), 1, kThreads, 0, ComputeMajor(ctx.device_id) >= 9,
                   stream, shape, tiling, body);
  };
  tiling.by_four ? run(MapKernel<4, Op>) : run(MapKernel<1, Op>);
}

}  // namespace cuda
}  // namespace dlsys
