// What batch normalization takes of a channel, from what kernels that make x or its gradient leave
// of groups of rows: mean and variance of moments (Chan, Golub and LeVeque 1979), dscale and dbias
// of sums. Means as deviations from the first one, and sums, are added in double precision, in a
// fixed order. The latency of loads is the limit, so that a block takes few columns, the 32 bytes
// that memory gives at once, and has many loads in flight. Very many groups first become fewer.
#include <algorithm>

#include "cuda/norm/norm.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kCols = 4, kLanes = kThreads / kCols;  // of a block, and threads of a column
constexpr int kBatch = 16;                           // loads of a thread in flight
constexpr int64_t kMostGroups = 8192;                // that blocks of one launch combine at once

struct Groups {
  const float2* from;  // (count, channels)
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
  __shared__ double firsts[kLanes][kCols], seconds[kLanes][kCols];
  const int chunk = (int)blockIdx.x / of.col_blocks;
  const int col = (int)threadIdx.x % kCols, lane = (int)threadIdx.x / kCols;
  const int64_t c = (int64_t)((int)blockIdx.x - chunk * of.col_blocks) * kCols + col;
  const int64_t begin = chunk * of.fan, end = min(of.count, begin + of.fan);
  const bool exists = c < of.channels;
  const double origin = exists ? (double)of.from[begin * of.channels + c].x : 0.;
  const double whole = of.RowsOf(0, 1), rest = of.RowsOf(of.count - 1, of.count);
  double first = 0, second = 0;
  for (int64_t k = begin + lane; exists && k < end; k += kBatch * kLanes) {
    float2 m[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++) m[j] = of.from[min(k + j * kLanes, end - 1) * of.channels + c];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int64_t at = k + j * kLanes;
      if (at < end) Kind::Add(m[j], at + 1 < of.count ? whole : rest, origin, first, second);
    }
  }
  firsts[lane][col] = first, seconds[lane][col] = second;
  for (int half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      firsts[lane][col] += firsts[lane + half][col];
      seconds[lane][col] += seconds[lane + half][col];
    }
  }
  if (lane > 0 || !exists) return;
  const double rows = of.RowsOf(begin, end);
  done(chunk, c, Kind::Combined(rows, origin, firsts[0][col], seconds[0][col]), rows);
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
