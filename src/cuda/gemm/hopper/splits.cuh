// Tiles that several clusters compute, each a split of K: parts are written to memory, and are
// added in the order of K, in registers by the first of few or in slices by all of many. What it
// takes to wait for the last part limits how many splits are worth it.
#pragma once
#include "cuda/gemm/hopper/epilogue.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// Under ping-pong both consumers make slices of tiles that are split.
template <class T>
constexpr int kSlicesOfSplit = T::kPingPong ? T::kConsumers : 1;

// Where a part of a tile lies, as consumers hold it: quads of accumulators, by thread.
template <class T>
__device__ __forceinline__ float4* PartialOf(const Params& params, int slot, uint32_t rank,
                                             int part) {
  const int64_t at = ((int64_t)slot * T::kCluster + rank) * T::kParts + part;
  return params.partial + at * T::kQuads * 128;
}

// How a tile's splits wait for each other: a counter of those that are written, and then of those
// who have waited for that, whose last one leaves it at zero.
template <class T>
class SplitCounter {
 public:
  __device__ __forceinline__ SplitCounter(const Params& params, const Segment& segment,
                                          uint32_t rank, int part)
      : counter_(params.arrivals + (segment.tile * T::kCluster + (int)rank) * T::kParts + part) {
    // The first split waits for the others or, where each makes a slice, all consumers for all.
    const bool owned = IsOwned(params, segment);
    const int slices = segment.splits * kSlicesOfSplit<T>;
    written_ = segment.splits - owned;
    last_ = written_ + (owned ? 1 : slices) - 1;
  }
  // A thread of the consumer that wrote a split counts it, behind a barrier of that.
  __device__ __forceinline__ void Count() const { CountReleased(counter_, last_); }
  // A consumer waits until all that it adds are written.
  __device__ __forceinline__ void Wait(int consumer) const {
    if (threadIdx.x % 128 == 0)
      while (LoadAcquire(counter_) < written_) __nanosleep(64);
    SyncThreads(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) Count();
  }

 private:
  unsigned* const counter_;
  unsigned written_, last_;
};

// The quads of a thread that hold columns of a tile.
template <class T>
__device__ __forceinline__ int QuadsOf(int width) {
  return T::kFitted ? (width + 7) / 8 : T::kQuads;
}

template <class T>
__device__ __forceinline__ void WritePartial(const Accumulators<T>& d, const Params& params,
                                             const Segment& segment, int width, uint32_t rank,
                                             int part, int consumer) {
  const int thread = threadIdx.x % 128;
  float4* to = PartialOf<T>(params, segment.slot, rank, part) + thread;
  const int quads = QuadsOf<T>(width);
#pragma unroll
  for (int q = 0; q < T::kQuads; q++) {
    if (q >= quads) break;
    const float (&x)[4] = d[q / T::kBlocks][q % T::kBlocks];
    to[q * 128] = make_float4(x[0], x[1], x[2], x[3]);
  }
  SyncThreads(1 + consumer, 128);
  if (thread == 0 && segment.splits > 1) SplitCounter<T>(params, segment, rank, part).Count();
}

// Adds the other splits of a tile to the first, which accumulators hold.
template <class T>
__device__ __forceinline__ void AddPartials(Accumulators<T>& d, const Params& params,
                                            const Segment& segment, uint32_t rank, int part,
                                            int consumer) {
  constexpr int kAtOnce = 8;
  SplitCounter<T>(params, segment, rank, part).Wait(consumer);
#pragma unroll 1
  for (int split = 1; split < segment.splits; split++) {
    const float4* from = PartialOf<T>(params, segment.slot + split, rank, part) + threadIdx.x % 128;
#pragma unroll
    for (int first = 0; first < T::kQuads; first += kAtOnce) {
      float4 v[kAtOnce];
#pragma unroll
      for (int q = 0; q < kAtOnce; q++) v[q] = from[(first + q) * 128];
#pragma unroll
      for (int q = 0; q < kAtOnce; q++) {
        float (&x)[4] = d[(first + q) / T::kBlocks][(first + q) % T::kBlocks];
        x[0] += v[q].x, x[1] += v[q].y, x[2] += v[q].z, x[3] += v[q].w;
      }
    }
  }
}

__device__ __forceinline__ void Add(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

// Adds to the sums of `quad`, and of those 128 further on, the parts of every `step`-th split from
// `first` on, in that order. Quads from `end` on are left out.
template <class T, int kBatch>
__device__ __forceinline__ void AddSplits(float4 (&sums)[kBatch], const float4* parts, int quad,
                                          int end, int first, int step, int splits) {
  constexpr int64_t kOfSlot = (int64_t)T::kCluster * T::kParts * T::kQuads * 128;
  constexpr int kAtOnce = 24 / kBatch;  // loads that are under way
#pragma unroll 1
  for (int begin = first; begin < splits; begin += kAtOnce * step) {
    float4 v[kAtOnce][kBatch];
#pragma unroll
    for (int s = 0; s < kAtOnce; s++) {
      const int split = begin + s * step;
#pragma unroll
      for (int b = 0; b < kBatch; b++)
        v[s][b] = split < splits && quad + b * 128 < end ? parts[split * kOfSlot + quad + b * 128]
                                                         : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; s++)
#pragma unroll
      for (int b = 0; b < kBatch; b++) Add(sums[b], v[s][b]);
  }
}

// Stores a quad of a tile where there is no epilogue and rows of C allow wide accesses.
template <class E, class T, class Source>
__device__ __forceinline__ void StoreQuad(const Params& params, const TileOrigin& origin, int item,
                                          int rows, int cols, const float4& sum) {
  constexpr int kNext = kTransposed<Source> ? 1 : kBelow<Source>;
  const int q = item / 128;
  const auto [row, col] =
      PlaceOfPair<Source>(origin, item % 128, q / T::kBlocks, q % T::kBlocks, 0);
  if (col >= cols) return;
  E* const to = (E*)params.c + ((int64_t)origin.z * params.m + row) * params.n + col;
  const float left = kTransposed<Source> ? sum.z : sum.y;
  const float right = kTransposed<Source> ? sum.y : sum.z;
  if (row < rows) *(Pair<E>*)to = RoundedPair<E>(sum.x, left);
  if (row + kNext < rows)
    *(Pair<E>*)(to + (int64_t)kNext * params.n) = RoundedPair<E>(right, sum.w);
}

// Waits for all splits of a tile, adds one of as many slices of them, and stores it; whole tiles
// come here as well where rows allow no wide access.
template <class E, class T, class Source>
__device__ __forceinline__ void StoreSlice(const Params& params, const Segment& segment,
                                           const TileOrigin& origin, uint32_t rank, int part,
                                           int consumer) {
  constexpr int kBatch = 4, kMostLanes = 8;
  const int width = WidthOf<T>(params, origin, kTransposed<Source>);
  const int items = QuadsOf<T>(width) * 128;
  const int thread = threadIdx.x % 128;
  if (segment.splits > 1)
    SplitCounter<T>(params, segment, rank, part).Wait(consumer);
  else
    SyncThreads(1 + consumer, 128);
  // Of whole tiles the consumer that has multiplied one makes a slice.
  const int in_split = segment.splits > 1 ? kSlicesOfSplit<T> : 1;
  const int slice = segment.split * in_split + (in_split > 1 ? consumer : 0);
  const int begin = items * slice / (segment.splits * in_split);
  const int end = items * (slice + 1) / (segment.splits * in_split);
  const float4* const parts = PartialOf<T>(params, segment.slot - segment.split, rank, part);
  // Where its elements of C end.
  const int rows = kTransposed<Source> ? origin.col + width : params.m;
  const int cols = kTransposed<Source> ? params.n : origin.col + width;
  const bool plain = params.aligned && !params.bias && !params.before && !params.side &&
                     !params.activation && !params.gradient;
  // Adjacent lanes share the splits of a quad where the slice has few.
  int lanes = 1;
  while (lanes < kMostLanes && 2 * lanes * (end - begin) <= 128) lanes *= 2;
#pragma unroll 1
  for (int base = begin; base < end; base += kBatch * 128) {
    const int first = base + thread / lanes;
    float4 sums[kBatch] = {};
    if (end - begin <= 128) {
      float4 sum[1] = {};
      AddSplits<T>(sum, parts, first, end, thread % lanes, lanes, segment.splits);
#pragma unroll 1
      for (int distance = 1; distance < lanes; distance *= 2)
        Add(sum[0], ShuffleXor(sum[0], distance, 32));
      sums[0] = sum[0];
    } else {
      AddSplits<T>(sums, parts, first, end, 0, 1, segment.splits);
    }
    const int last = thread % lanes ? base : min(end, base + kBatch * 128);
    if (plain) {
#pragma unroll
      for (int b = 0; b < kBatch; b++)
        if (first + b * 128 < last)
          StoreQuad<E, T, Source>(params, origin, first + b * 128, rows, cols, sums[b]);
      continue;
    }
#pragma unroll 1
    for (int item = first; item < last; item += 128) {
      const float4 sum = sums[0];
#pragma unroll
      for (int b = 1; b < kBatch; b++) sums[b - 1] = sums[b];
      const int q = item / 128;
#pragma unroll 1
      for (int half = 0; half < 2; half++) {
        const auto [row, col] =
            PlaceOfPair<Source>(origin, item % 128, q / T::kBlocks, q % T::kBlocks, half);
        const int valid = cols - col;
        if (valid <= 0 || row >= rows) continue;
        const int64_t at = ((int64_t)origin.z * params.m + row) * params.n + col;
        const float left = kTransposed<Source> ? sum.y : sum.z;
        const float right = kTransposed<Source> ? sum.z : sum.y;
        float x = half ? left : sum.x, y = half ? sum.w : right;
        if (params.bias) {
          const Pair<E> bias = ReadPair((const E*)params.bias + col, params.aligned, valid);
          x += ElementOf<0, E>(bias), y += ElementOf<1, E>(bias);
        }
        const auto write = [&](void* to, float a, float b) {
          WritePair((E*)to + at, params.aligned, valid, RoundedPair<E>(a, b));
        };
        if (params.before && !params.slope) write(params.before, x, y);
        const bool quantized = sizeof(E) == 2 && params.gradient == GradientCode::kMulQuantized;
        float sides[2] = {};
        if (params.side && !quantized) {
          const Pair<E> side = ReadPair((const E*)params.side + at, params.aligned, valid);
          sides[0] = ElementOf<0, E>(side), sides[1] = ElementOf<1, E>(side);
        }
        for (int e = 0; e < min(valid, 2) && quantized; e++)
          sides[e] = (float)((const uint8_t*)params.side)[at + e];
        if constexpr (Source::kHasEpilogue)
          WithFunction(params, [&](auto&& function, auto) {
            if constexpr (kHasSlope<decltype(function)>)
              if (params.slope) {
                const uint32_t slopes =
                    QuantizedSlopes(function.Both(x).slope, function.Both(y).slope);
                for (int e = 0; e < min(valid, 2); e++)
                  ((uint8_t*)params.before)[at + e] = (uint8_t)(slopes >> 8 * e);
              }
            x = function(sides[0], x), y = function(sides[1], y);
          });
        write(params.c, x, y);
      }
    }
  }
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
