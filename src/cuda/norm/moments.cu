// What batch normalization takes of a channel, from what kernels that make x or its gradient leave
// of groups of rows: mean and variance of moments (Chan, Golub and LeVeque 1979), dscale and dbias
// of sums. Means as deviations from the first one, and sums, are added in double precision, in a
// fixed order. The blocks of a cluster share the groups of 64 bytes of columns and read each
// other's sums. Limited by the number of loads and their latency: they are asynchronous copies to
// shared memory, since the compiler puts off loads to registers until each is needed.
#include "cuda/norm/norm.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kCols = 8, kLanes = 2 * kThreads / kCols;  // of a block, and threads of two columns
constexpr int kBatch = 8;                                // copies of a thread in flight
constexpr int kWarps = kThreads / 32;
constexpr int64_t kLeastShare = 64;  // groups of a block in a cluster

struct Groups {
  const float2* from;  // (count, channels), at 16 bytes; channels are even
  int64_t count, channels;
  int64_t rows, rows_of_group;
  int blocks;                   // of a cluster
  const int* counts = nullptr;  // of each group's rows, in place of rows_of_group

  double RowsOfLast() const { return (double)(rows - (count - 1) * rows_of_group); }
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

// Combines the groups of each column of a cluster, and calls done(c, combined) for channel c in its
// first block. Groups that there are not are zeros of no rows, so that no branch keeps additions
// apart.
template <class Kind, class Done>
__device__ __forceinline__ void Combine(const Groups& of, double rows_of_last, const Done& done) {
  constexpr int kSums = 2 * kCols;  // the first of all columns, then the second
  __shared__ float4 copies[kBatch][kThreads];
  __shared__ double of_warps[kWarps][kSums], of_block[kSums], of_peers[kPortableCluster][kSums];
  const int cluster = (int)blockIdx.x / of.blocks, rank = (int)blockIdx.x % of.blocks;
  const int col = (int)threadIdx.x % (kCols / 2) * 2, lane = (int)threadIdx.x / (kCols / 2);
  const int64_t c = (int64_t)cluster * kCols + col;
  const int64_t own = (int64_t)cluster * kCols + (int)threadIdx.x % kCols;
  const int64_t begin = of.count * rank / of.blocks, end = of.count * (rank + 1) / of.blocks;
  const float2* const from = of.from + (c < of.channels ? c : 0);
  const double origins[2] = {from[0].x, from[1].x};
  const double own_origin = of.from[own < of.channels ? own : 0].x;
  const double rows_of_group = (double)of.rows_of_group;
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
      const double of_group = at + 1 < of.count ? rows_of_group : rows_of_last;
      const double rows = at >= end ? 0. : of.counts ? (double)of.counts[at] : of_group;
      Kind::Add({two.x, two.y}, rows, origins[0], first[0], second[0]);
      Kind::Add({two.z, two.w}, rows, origins[1], first[1], second[1]);
    }
  }
#pragma unroll
  for (int distance = kCols / 2; distance < 32; distance *= 2) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      first[e] += __shfl_xor_sync(0xffffffffu, first[e], distance);
      second[e] += __shfl_xor_sync(0xffffffffu, second[e], distance);
    }
  }
  if (threadIdx.x % 32 < kCols / 2) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      of_warps[threadIdx.x / 32][col + e] = first[e];
      of_warps[threadIdx.x / 32][kCols + col + e] = second[e];
    }
  }
  __syncthreads();
  if (threadIdx.x < kSums) {
    double sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) sum += of_warps[warp][threadIdx.x];
    of_block[threadIdx.x] = sum;
  }
  of.blocks > 1 ? MeetCluster() : __syncthreads();
  const int peer = (int)threadIdx.x / kSums, sum_of_peer = (int)threadIdx.x % kSums;
  if (rank == 0 && peer < kPortableCluster) {
    const double* const sum = &of_block[sum_of_peer];
    of_peers[peer][sum_of_peer] = peer >= of.blocks ? 0.
                                  : of.blocks > 1 ? *(const double*)OfPeer((const float*)sum, peer)
                                                  : *sum;
  }
  __syncthreads();
  if (rank == 0 && threadIdx.x < kCols && own < of.channels) {
    double sums[2] = {};
#pragma unroll
    for (int k = 0; k < kPortableCluster; k++)
      sums[0] += of_peers[k][threadIdx.x], sums[1] += of_peers[k][kCols + threadIdx.x];
    done(own, Kind::Combined((double)of.rows, own_origin, sums[0], sums[1]));
  }
  if (of.blocks > 1) LeaveCluster();
}

__global__ void __launch_bounds__(kThreads)
    StatisticsKernel(const __grid_constant__ Groups of, double rows_of_last, float* mean,
                     float* variance) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  Combine<MomentsGroups>(of, rows_of_last, [&](int64_t c, Two combined) {
    mean[c] = (float)combined.x;
    variance[c] = combined.y < 0. ? 0.f : (float)(combined.y / (double)of.rows);
  });
}

__global__ void __launch_bounds__(kThreads)
    GradientSumsKernel(const __grid_constant__ Groups of, BatchMoments moments, float* dscale,
                       float* dbias) {
  GridDependencySynchronize();
  TriggerProgrammaticLaunch();
  Combine<SumsGroups>(of, 1., [&](int64_t c, Two combined) {
    dscale[c] = (float)combined.x * moments.Of(c).inverse;
    dbias[c] = (float)combined.y;
  });
}

template <class Kernel, class... Args>
void LaunchCombine(const char* op, DLContext ctx, const Kernel& kernel, Groups of, DLStream stream,
                   Args... args) {
  of.blocks = kPortableCluster;
  while (of.blocks > 1 && of.count < of.blocks * kLeastShare) of.blocks /= 2;
  LaunchClusters(op, kernel, (unsigned)(CeilDiv(of.channels, kCols) * of.blocks),
                 (unsigned)of.blocks, kThreads, 0, ComputeMajor(ctx.device_id) >= 9, stream, of,
                 args...);
}

}  // namespace

void CombineMoments(const char* op, DLContext ctx, const float2* moments, int64_t rows,
                    int64_t of_group, int64_t channels, float* mean, float* variance,
                    DLStream stream) {
  const Groups of{moments, CeilDiv(rows, of_group), channels, rows, of_group, 1};
  LaunchCombine(op, ctx, StatisticsKernel, of, stream, of.RowsOfLast(), mean, variance);
}

void CombineMoments(const char* op, DLContext ctx, const float2* moments, const int* counts,
                    int64_t rows, int64_t groups, int64_t channels, float* mean, float* variance,
                    DLStream stream) {
  const Groups of{moments, groups, channels, rows, 1, 1, counts};
  LaunchCombine(op, ctx, StatisticsKernel, of, stream, 1., mean, variance);
}

void CombineSums(const char* op, DLContext ctx, const float2* sums, int64_t groups,
                 int64_t channels, const BatchMoments& moments, float* dscale, float* dbias,
                 DLStream stream) {
  const Groups of{sums, groups, channels, groups, 1, 1};
  LaunchCombine(op, ctx, GradientSumsKernel, of, stream, moments, dscale, dbias);
}

}  // namespace cuda
}  // namespace dlsys
