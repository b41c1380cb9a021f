// What batch normalization takes of a channel, from what kernels that make x or its gradient leave
// of groups of rows: mean and variance of moments (Chan, Golub and LeVeque 1979), dscale and dbias
// of sums. Means as deviations from the first one, and sums, are added in double precision, in a
// fixed order. The latency of loads is the limit: a block takes few columns, 32 bytes of a row, and
// what it reads comes to shared memory by asynchronous copies, for of loads to registers the
// compiler puts off each until it is needed. Very many groups first become fewer.
#include <algorithm>

#include "cuda/norm/norm.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kCols = 4, kLanes = 2 * kThreads / kCols;  // of a block, and threads of two columns
constexpr int kBatch = 8;                                // copies of a thread in flight
constexpr int64_t kMostGroups = 2048;  // that blocks of one launch combine at once

struct Groups {
  const float2* from;  // (count, channels), at 16 bytes; channels are even
  int64_t count, channels;
  int64_t fan;  // groups that become one
  int64_t rows, rows_of_group;
  int col_blocks;

  __device__ double RowsOf(int64_t begin, int64_t end) const {
    return (double)(min(rows, end * rows_of_group) - begin * rows_of_group);
  }
};

struct Two {
  double x, y;
};

// Of a kind of groups: Add adds a group of `rows` rows to two sums, around an origin; Combined
// gives what they are together.
struct MomentsGroups {
  static __device__ __forceinline__ void Add(float2 m, double rows, double origin, double& first,
                                             double& second) {
    const double d = (double)m.x - origin;
    first += rows * d;
    second += (double)m.y + rows * d * d;
  }
  static __device__ __forceinline__ Two Combined(double rows, double origin, double first,
                                                 double second) {
    const double shift = first / rows;
    return {origin + shift, second - first * shift};
  }
};
struct SumsGroups {
  static __device__ __forceinline__ void Add(float2 sums, double, double, double& first,
                                             double& second) {
    first += (double)sums.x, second += (double)sums.y;
  }
  static __device__ __forceinline__ Two Combined(double, double, double first, double second) {
    return {first, second};
  }
};

// Combines `fan` groups of each column of a block, and calls done(k, c, combined, rows) for the
// k-th result of channel c.
template <class Kind, class Done>
__device__ __forceinline__ void Combine(const Groups& of, const Done& done) {
  __shared__ float4 copies[kBatch][kThreads];
  __shared__ double firsts[kLanes][kCols], seconds[kLanes][kCols];
  const int chunk = (int)blockIdx.x / of.col_blocks;
  const int col = (int)threadIdx.x % (kCols / 2) * 2, lane = (int)threadIdx.x / (kCols / 2);
  const int64_t c = (int64_t)((int)blockIdx.x - chunk * of.col_blocks) * kCols + col;
  const int64_t begin = chunk * of.fan, end = min(of.count, begin + of.fan);
  const bool exists = c < of.channels;
  const float2* const from = of.from + (exists ? c : 0);
  const double whole = of.RowsOf(0, 1), rest = of.RowsOf(of.count - 1, of.count);
  const double origins[2] = {from[begin * of.channels].x, from[begin * of.channels + 1].x};
  double first[2] = {}, second[2] = {};
  for (int64_t k = begin + lane; k < end; k += kBatch * kLanes) {
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int64_t at = k + j * kLanes;
      CopyAsync16((float*)&copies[j][threadIdx.x],
                  (const float*)(from + min(at, end - 1) * of.channels), at < end);
    }
    CloseCopies();
    WaitForCopies<0>();
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int64_t at = k + j * kLanes;
      const float4 two = copies[j][threadIdx.x];
      if (at >= end) continue;
      const double rows = at + 1 < of.count ? whole : rest;
      Kind::Add({two.x, two.y}, rows, origins[0], first[0], second[0]);
      Kind::Add({two.z, two.w}, rows, origins[1], first[1], second[1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    firsts[lane][col + e] = first[e];
    seconds[lane][col + e] = second[e];
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        firsts[lane][col + e] += firsts[lane + half][col + e];
        seconds[lane][col + e] += seconds[lane + half][col + e];
      }
    }
  }
  if (lane > 0 || !exists) return;
  const double rows = of.RowsOf(begin, end);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const Two combined = Kind::Combined(rows, origins[e], firsts[0][col + e], seconds[0][col + e]);
    done(chunk, c + e, combined, rows);
  }
}

// to (chunks, channels): a group of each chunk of groups.
template <class Kind>
__global__ void __launch_bounds__(kThreads)
    FewerGroupsKernel(const __grid_constant__ Groups of, float2* to) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  Combine<Kind>(of, [&](int chunk, int64_t c, Two combined, double) {
    to[chunk * of.channels + c] = make_float2((float)combined.x, (float)combined.y);
  });
}

__global__ void __launch_bounds__(kThreads)
    StatisticsKernel(const __grid_constant__ Groups of, float* mean, float* variance) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  Combine<MomentsGroups>(of, [&](int, int64_t c, Two combined, double rows) {
    mean[c] = (float)combined.x;
    variance[c] = combined.y < 0. ? 0.f : (float)(combined.y / rows);
  });
}

__global__ void __launch_bounds__(kThreads)
    GradientSumsKernel(const __grid_constant__ Groups of, BatchMoments moments, float* dscale,
                       float* dbias) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  Combine<SumsGroups>(of, [&](int, int64_t c, Two combined, double) {
    dscale[c] = (float)combined.x * moments.Of(c).inverse;
    dbias[c] = (float)combined.y;
  });
}

// Calls launch(groups, blocks) with groups that blocks can combine at once.
template <class Kind, class Last>
void WithFewGroups(const char* op, DLContext ctx, Groups of, DLStream stream, const Last& last) {
  of.col_blocks = (int)CeilDiv(of.channels, kCols);
  constexpr int64_t kFan = kLanes * kBatch;
  of.fan = of.count > kMostGroups ? std::max(kFan, CeilDiv(of.count, kMostGroups)) : of.count;
  const int64_t chunks = CeilDiv(of.count, of.fan);
  const Scratch fewer(ctx, chunks > 1 ? chunks * of.channels * (int64_t)sizeof(float2) : 0, stream);
  if (chunks > 1) {
    LaunchClusters(op, FewerGroupsKernel<Kind>, (unsigned)(chunks * of.col_blocks), 1, kThreads, 0,
                   ComputeMajor(ctx.device_id) >= 9, stream, of, (float2*)fewer.data());
    of.from = (const float2*)fewer.data();
    of.rows_of_group *= of.fan, of.count = of.fan = chunks;
  }
  last(of, (unsigned)of.col_blocks);
}

}  // namespace

void CombineMoments(const char* op, DLContext ctx, const float2* moments, int64_t rows,
                    int64_t of_group, int64_t channels, float* mean, float* variance,
                    DLStream stream) {
  const Groups all{moments, CeilDiv(rows, of_group), channels, 0, rows, of_group, 0};
  WithFewGroups<MomentsGroups>(op, ctx, all, stream, [&](const Groups& of, unsigned blocks) {
    LaunchClusters(op, StatisticsKernel, blocks, 1, kThreads, 0, ComputeMajor(ctx.device_id) >= 9,
                   stream, of, mean, variance);
  });
}

void CombineSums(const char* op, DLContext ctx, const float2* sums, int64_t groups,
                 int64_t channels, const BatchMoments& moments, float* dscale, float* dbias,
                 DLStream stream) {
  const Groups all{sums, groups, channels, 0, groups, 1, 0};
  WithFewGroups<SumsGroups>(op, ctx, all, stream, [&](const Groups& of, unsigned blocks) {
    LaunchClusters(op, GradientSumsKernel, blocks, 1, kThreads, 0, ComputeMajor(ctx.device_id) >= 9,
                   stream, of, moments, dscale, dbias);
  });
}

}  // namespace cuda
}  // namespace dlsys
