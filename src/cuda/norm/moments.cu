// Mean and variance of channels from the moments of groups of rows, which kernels that make x leave
// (Chan, Golub and LeVeque 1979): deviations of means from the first one are added in double
// precision, in a fixed order. Many groups are first combined to fewer; the latency of their loads
// is the limit.
#include "cuda/norm/norm.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kCols = 16, kLanes = kThreads / kCols;  // of a block, and threads of a column
constexpr int64_t kMostGroups = 1024;                 // that blocks of one launch combine at once

struct MomentsTask {
  const float2* from;  // (groups, channels)
  int64_t rows, of_group, groups, channels;
  int64_t fan;  // groups that become one
  int col_blocks;
};

// Combines `fan` groups of a column by the threads of a block that have it, and calls
// finish(group, c, rows, mean, squares) by one of them.
template <class Done>
__device__ __forceinline__ void Combine(const MomentsTask& task, const Done& done) {
  constexpr int kBatch = 8;
  __shared__ double sums[kLanes][kCols], squares[kLanes][kCols];
  const int chunk = (int)blockIdx.x / task.col_blocks;
  const int col = (int)threadIdx.x % kCols, lane = (int)threadIdx.x / kCols;
  const int64_t c = (int64_t)((int)blockIdx.x - chunk * task.col_blocks) * kCols + col;
  const int64_t begin = chunk * task.fan, end = min(task.groups, begin + task.fan);
  const bool exists = c < task.channels;
  const double origin = exists ? (double)task.from[begin * task.channels + c].x : 0.;
  double sum = 0, square = 0;
  for (int64_t k = begin + lane; exists && k < end; k += kBatch * kLanes) {
    float2 m[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++)
      m[j] = task.from[min(k + j * kLanes, end - 1) * task.channels + c];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int64_t group = k + j * kLanes;
      if (group >= end) break;
      const double count = (double)min(task.of_group, task.rows - group * task.of_group);
      const double d = (double)m[j].x - origin;
      sum += count * d;
      square += (double)m[j].y + count * d * d;
    }
  }
  sums[lane][col] = sum, squares[lane][col] = square;
  for (int half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      sums[lane][col] += sums[lane + half][col];
      squares[lane][col] += squares[lane + half][col];
    }
  }
  if (lane > 0 || !exists) return;
  const double count =
      (double)(min(task.rows, end * task.of_group) - begin * task.of_group);
  const double shift = sums[0][col] / count;
  done(chunk, c, count, origin + shift, squares[0][col] - sums[0][col] * shift);
}

// to (chunks, channels): the moments of chunks of groups.
__global__ void __launch_bounds__(kThreads)
    FewerMomentsKernel(const __grid_constant__ MomentsTask task, float2* to) {
  GridDependencySynchronize();
  Combine(task, [&](int chunk, int64_t c, double, double mean, double squares) {
    to[chunk * task.channels + c] = make_float2((float)mean, (float)squares);
  });
}

__global__ void __launch_bounds__(kThreads)
    StatisticsKernel(const __grid_constant__ MomentsTask task, float* mean, float* variance) {
  GridDependencySynchronize();
  Combine(task, [&](int, int64_t c, double count, double of_all, double squares) {
    mean[c] = (float)of_all;
    variance[c] = squares < 0. ? 0.f : (float)(squares / count);
  });
}

}  // namespace

void CombineMoments(const char* op, DLContext ctx, const float2* moments, int64_t rows,
                    int64_t of_group, int64_t channels, float* mean, float* variance,
                    DLStream stream) {
  const bool pdl = ComputeMajor(ctx.device_id) >= 9;
  const int64_t col_blocks = CeilDiv(channels, kCols);
  MomentsTask task{moments,  rows, of_group, CeilDiv(rows, of_group), channels, 0, (int)col_blocks};
  task.fan = task.groups > kMostGroups ? CeilDiv(task.groups, kMostGroups / 4) : task.groups;
  const int64_t chunks = CeilDiv(task.groups, task.fan);
  const Scratch fewer(ctx, chunks > 1 ? chunks * channels * (int64_t)sizeof(float2) : 0, stream);
  if (chunks > 1) {
    LaunchClusters(op, FewerMomentsKernel, (unsigned)(chunks * col_blocks), 1, kThreads, 0, pdl,
                   stream, task, (float2*)fewer.data());
    task.from = (const float2*)fewer.data();
    task.of_group *= task.fan, task.groups = task.fan = chunks;
  }
  LaunchClusters(op, StatisticsKernel, (unsigned)col_blocks, 1, kThreads, 0, pdl, stream, task,
                 mean, variance);
}

}  // namespace cuda
}  // namespace dlsys
