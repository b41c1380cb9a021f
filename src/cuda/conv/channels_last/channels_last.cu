// Convolution as implicit GEMM on tensor cores in 16 bits: products are exact, sums float32, and a
// result is rounded once. channels_last/channels_last.cuh has the contract.
//
// Forward and data gradient: M = output positions, N = filters, K = (kernel offset, channel), both
// operands K-major, a data gradient for each phase of the stride. Filter gradient: M = filters, N =
// (kernel offset, channel), K = positions, both operands MN-major; K is split over blocks, whose
// parts are added in a fixed order. Channels lie side by side, so that a gathered operand is copies
// of 16 bytes (cp.async); sizes that are no multiple of eight are copied one by one. Memory limits
// 1 x 1 filters, the issue of mma the others.
#include <algorithm>

#include "cuda/conv/channels_last/channels_last.cuh"
#include "cuda/conv/channels_last/depthwise.cuh"
#include "cuda/conv/channels_last/groups.cuh"
#include "cuda/conv/channels_last/hopper.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace channels_last {
namespace {

constexpr int kStep = 64;   // K of a stage
constexpr int kStages = 3;  // of the ring of panels
constexpr int kOutside = -(1 << 30);

// Warps of kWarpM x 32 side by side.
template <int kM, int kN>
struct Tile {
  static constexpr int kRows = kM, kCols = kN, kWarpN = 32;
  static constexpr int kWarpsN = kN / kWarpN, kWarpM = kM / (kThreads / 32 / kWarpsN);
  static constexpr int kNbytes = kStages * (kM + kN) * kStep * 2;
};
template <class Tile>
using Sums = float[Tile::kWarpM / 16][4][4];

// Where eight elements lie in a panel of rows of kChunks times eight: swizzled, so that neither
// eight rows of a chunk nor eight chunks of a row share banks.
template <int kChunks>
__device__ __forceinline__ int InPanel(int row, int chunk) {
  return (row * kChunks + (chunk ^ (row & 7))) * 8;
}

// Copies eight elements, or those of them that value(e) gives.
template <bool kAligned, class T, class Value>
__device__ __forceinline__ void CopyEight(T* to, const T* from, bool valid, const Value& value) {
  if constexpr (kAligned) {
    CopyAsync16((float*)to, (const float*)from, valid);
  } else {
#pragma unroll
    for (int e = 0; e < 8; e++) to[e] = value(e);
  }
}

// ---- forward and data gradient ----

struct Axis {
  int first, step, kernel_step, kernel_from, kernel_by, out_from, out_by;
};
inline Axis AxisOf(const ConvAxis& a) {
  return {(int)a.first,     (int)a.step,     (int)a.kernel_step, (int)a.kernel_from,
          (int)a.kernel_by, (int)a.out_from, (int)a.out_by};
}

// A Correlation of operators/conv_geometry.h with channels last; the filter is (groups, filters,
// kernel, channels).
template <class T>
struct Correlating {
  const T *x, *filter, *bias;
  T* out;
  Axis h, w;
  int rows, filters, depth, groups, channels;  // rows are output positions, depth is K
  int in_h, in_w, out_h, out_w, kernel_w, kernel_size;
  Divisor by_channels, by_kernel_w, by_positions, by_width, by_col_tiles, by_tiles;
  bool aligned_out;

  __device__ int64_t Input(int line, int w) const {
    return ((int64_t)line * in_w + w) * (groups * channels);
  }
  // Where the output of a row begins.
  __device__ int64_t Output(int row, int group) const {
    const int image = row / by_positions, rest = row - image * (int)by_positions.value;
    const int i = rest / by_width, j = rest - i * (int)by_width.value;
    const int64_t line = (int64_t)image * out_h + h.out_from + i * h.out_by;
    return (line * out_w + w.out_from + j * w.out_by) * (groups * filters) + group * filters;
  }
};

// What a k says: the channel, the distance from a position's corner, and its number in a filter.
struct Offset {
  int c, h, w, in_filter;
};
template <class T>
__device__ __forceinline__ Offset OffsetOf(const Correlating<T>& task, int k) {
  const int offset = k / task.by_channels, c = k - offset * (int)task.by_channels.value;
  const int i = offset / task.by_kernel_w, j = offset - i * (int)task.by_kernel_w.value;
  const int row = task.h.kernel_from + i * task.h.kernel_by;
  const int col = task.w.kernel_from + j * task.w.kernel_by;
  return {c, i * task.h.kernel_step, j * task.w.kernel_step,
          (row * task.kernel_w + col) * task.channels + c};
}

constexpr int kChunksOfStep = kStep / 8, kRowStep = kThreads / kChunksOfStep;
__device__ __forceinline__ int ChunkOfStep() { return (int)threadIdx.x % kChunksOfStep; }
__device__ __forceinline__ int RowOfPass(int q) {
  return (int)threadIdx.x / kChunksOfStep + q * kRowStep;
}

// The gathered operand, a row for each output position.
template <class T, int kRows, bool kAligned>
class Positions {
 public:
  __device__ Positions(const Correlating<T>& task, int group, int first)
      : task_(task), x_(task.x + group * task.channels) {
#pragma unroll
    for (int q = 0; q < kPasses; q++) {
      const int row = first + RowOfPass(q);
      const int image = row / task.by_positions, rest = row - image * (int)task.by_positions.value;
      const int i = rest / task.by_width, j = rest - i * (int)task.by_width.value;
      h_[q] = row < task.rows ? task.h.first + i * task.h.step : kOutside;
      w_[q] = task.w.first + j * task.w.step;
      line_[q] = image * task.in_h;
    }
  }
  __device__ __forceinline__ void Load(T* panel, int k0) const {
    const int k = k0 + ChunkOfStep() * 8;
    const Offset offset = OffsetOf(task_, k);
#pragma unroll
    for (int q = 0; q < kPasses; q++) {
      const T* from = kAligned ? At(q, offset, k) : nullptr;
      CopyEight<kAligned>(panel + InPanel<kChunksOfStep>(RowOfPass(q), ChunkOfStep()),
                          from ? from : x_, from, [&](int e) {
                            const T* one = At(q, OffsetOf(task_, k + e), k + e);
                            return one ? *one : T(0.f);
                          });
    }
  }

 private:
  static constexpr int kPasses = kRows / kRowStep;
  // Null where that is padding.
  __device__ __forceinline__ const T* At(int q, const Offset& offset, int k) const {
    const int h = h_[q] + offset.h, w = w_[q] + offset.w;
    const bool inside = (unsigned)h < (unsigned)task_.in_h && (unsigned)w < (unsigned)task_.in_w;
    return inside && k < task_.depth ? x_ + task_.Input(line_[q] + h, w) + offset.c : nullptr;
  }

  const Correlating<T>& task_;
  const T* x_;
  int h_[kPasses], w_[kPasses], line_[kPasses];
};

// The filter, a row for each.
template <class T, int kRows, bool kAligned>
class Filters {
 public:
  __device__ Filters(const Correlating<T>& task, int group, int first)
      : task_(task),
        filter_(task.filter + (int64_t)(group * task.filters + first) * Pitch()),
        valid_(task.filters - first) {}
  __device__ __forceinline__ void Load(T* panel, int k0) const {
    const int k = k0 + ChunkOfStep() * 8;
    const Offset offset = OffsetOf(task_, k);
#pragma unroll
    for (int q = 0; q < kRows / kRowStep; q++) {
      const T* row = filter_ + (int64_t)RowOfPass(q) * Pitch();
      const bool exists = RowOfPass(q) < valid_, valid = exists && k < task_.depth;
      CopyEight<kAligned>(panel + InPanel<kChunksOfStep>(RowOfPass(q), ChunkOfStep()),
                          valid ? row + offset.in_filter : task_.filter, valid, [&](int e) {
                            const bool one = exists && k + e < task_.depth;
                            return one ? row[OffsetOf(task_, k + e).in_filter] : T(0.f);
                          });
    }
  }

 private:
  __device__ __forceinline__ int Pitch() const { return task_.kernel_size * task_.channels; }

  const Correlating<T>& task_;
  const T* filter_;
  int valid_;
};

// ---- filter gradient ----

// `parts` is (splits, groups, filters, kernel, channels).
template <class T>
struct FilterGradientTask {
  const T *x, *dy;
  float* parts;
  int filters, cols, positions, slice, groups, channels;  // positions are K, slice that of a split
  int in_h, in_w, out_h, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  Divisor by_channels, by_kernel_w, by_out_h, by_out_w, by_col_tiles, by_row_tiles, by_groups;
};

// The gradient dy, a row for each position.
template <class T, int kCols, bool kAligned>
class OutputGradients {
 public:
  __device__ OutputGradients(const FilterGradientTask<T>& task, int group, int first, int end)
      : task_(task), dy_(task.dy + group * task.filters), col_(first + Chunk() * 8), end_(end) {}
  __device__ __forceinline__ void Load(T* panel, int k0) const {
#pragma unroll
    for (int q = 0; q < kStep / kPassRows; q++) {
      const int row = (int)threadIdx.x / kChunks + q * kPassRows, position = k0 + row;
      const T* from = dy_ + (int64_t)position * (task_.groups * task_.filters) + col_;
      const bool valid = position < end_ && col_ < task_.filters;
      CopyEight<kAligned>(panel + InPanel<kChunks>(row, Chunk()), valid ? from : task_.dy, valid,
                          [&](int e) {
                            const bool one = position < end_ && col_ + e < task_.filters;
                            return one ? from[e] : T(0.f);
                          });
    }
  }

 private:
  static constexpr int kChunks = kCols / 8, kPassRows = kThreads / kChunks;
  static __device__ __forceinline__ int Chunk() { return (int)threadIdx.x % kChunks; }

  const FilterGradientTask<T>& task_;
  const T* dy_;
  int col_, end_;
};

// What the filter meets, a row for each position, a column for each (kernel offset, channel).
template <class T, int kCols, bool kAligned>
class Neighbors {
 public:
  __device__ Neighbors(const FilterGradientTask<T>& task, int group, int first, int end)
      : task_(task),
        x_(task.x + group * task.channels),
        col_(first + Chunk() * 8),
        end_(end),
        own_(ColumnOf(col_)) {}
  __device__ __forceinline__ void Load(T* panel, int k0) const {
#pragma unroll
    for (int q = 0; q < kStep / kPassRows; q++) {
      const int row = (int)threadIdx.x / kChunks + q * kPassRows, position = k0 + row;
      const int line = position / task_.by_out_w, image = line / task_.by_out_h;
      const int i = line - image * task_.out_h;
      const int j = position - line * (int)task_.by_out_w.value;
      const Corner corner{image * task_.in_h, i * task_.stride_h - task_.pad_h,
                          j * task_.stride_w - task_.pad_w, position < end_};
      const T* from = kAligned ? At(corner, own_, col_) : nullptr;
      CopyEight<kAligned>(panel + InPanel<kChunks>(row, Chunk()), from ? from : task_.x, from,
                          [&](int e) {
                            const T* one = At(corner, ColumnOf(col_ + e), col_ + e);
                            return one ? *one : T(0.f);
                          });
    }
  }

 private:
  static constexpr int kChunks = kCols / 8, kPassRows = kThreads / kChunks;
  static __device__ __forceinline__ int Chunk() { return (int)threadIdx.x % kChunks; }
  struct Column {
    int c, h, w;
  };
  struct Corner {
    int line, h, w;
    bool exists;
  };
  __device__ __forceinline__ Column ColumnOf(int col) const {
    const int offset = col / task_.by_channels, c = col - offset * (int)task_.by_channels.value;
    const int i = offset / task_.by_kernel_w, j = offset - i * (int)task_.by_kernel_w.value;
    return {c, i * task_.dilation_h, j * task_.dilation_w};
  }
  // Null where that is padding.
  __device__ __forceinline__ const T* At(const Corner& at, const Column& of, int col) const {
    const int h = at.h + of.h, w = at.w + of.w;
    const bool inside = (unsigned)h < (unsigned)task_.in_h && (unsigned)w < (unsigned)task_.in_w;
    if (!inside || !at.exists || col >= task_.cols) return nullptr;
    const int64_t pixel = (int64_t)(at.line + h) * task_.in_w + w;
    return x_ + pixel * (task_.groups * task_.channels) + of.c;
  }

  const FilterGradientTask<T>& task_;
  const T* x_;
  int col_, end_;
  Column own_;
};

// ---- the product of panels ----

// sums += left right over K in [begin, end). kTransposed: the panels are MN-major.
template <class T, class Tile, bool kTransposed, class Left, class Right>
__device__ __forceinline__ void Multiply(const Left& left, const Right& right, int begin, int end,
                                         T* shared, Sums<Tile>& sums) {
  constexpr int kStageNumel = (Tile::kRows + Tile::kCols) * kStep;
  constexpr int kLeftChunks = (kTransposed ? Tile::kRows : kStep) / 8;
  constexpr int kRightChunks = (kTransposed ? Tile::kCols : kStep) / 8;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int row = warp / Tile::kWarpsN * Tile::kWarpM, col = warp % Tile::kWarpsN * Tile::kWarpN;
  const int steps = end > begin ? CeilDiv32(end - begin, kStep) : 0;
  const auto load = [&](int step) {
    T* stage = shared + step % kStages * kStageNumel;
    if (step < steps) {
      left.Load(stage, begin + step * kStep);
      right.Load(stage + Tile::kRows * kStep, begin + step * kStep);
    }
    CloseCopies();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; step++) load(step);
  for (int step = 0; step < steps; step++) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);
    const T* a = shared + step % kStages * kStageNumel;
    const T* b = a + Tile::kRows * kStep;
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t from_a[Tile::kWarpM / 16][4], from_b[2][4];
      // The rows and chunks of eight that a lane names, of K and of M or N.
      const int far = lane / 16, near = lane / 8 % 2, in_eight = lane % 8;
#pragma unroll
      for (int i = 0; i < Tile::kWarpM / 16; i++) {
        const int m = row + i * 16;
        const int at = kTransposed ? InPanel<kLeftChunks>(k + far * 8 + in_eight, m / 8 + near)
                                   : InPanel<kLeftChunks>(m + near * 8 + in_eight, k / 8 + far);
        LoadMatrices<kTransposed>(a + at, from_a[i]);
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int n = col + j * 16;
        const int at = kTransposed ? InPanel<kRightChunks>(k + near * 8 + in_eight, n / 8 + far)
                                   : InPanel<kRightChunks>(n + far * 8 + in_eight, k / 8 + near);
        LoadMatrices<kTransposed>(b + at, from_b[j]);
      }
#pragma unroll
      for (int i = 0; i < Tile::kWarpM / 16; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const uint32_t of_b[2] = {from_b[j / 2][j % 2 * 2], from_b[j / 2][j % 2 * 2 + 1]};
          MultiplyAdd16Bit<T>(from_a[i], of_b, sums[i][j]);
        }
      }
    }
  }
  WaitForCopies<0>();
  __syncthreads();
}

// Calls put(row, col, value, value of the next column) for the sums of this thread.
template <class Tile, class Put>
__device__ __forceinline__ void ForEachPair(const Sums<Tile>& sums, const Put& put) {
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int row = warp / Tile::kWarpsN * Tile::kWarpM + lane / 4;
  const int col = warp % Tile::kWarpsN * Tile::kWarpN + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < Tile::kWarpM / 16; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      put(row + i * 16, col + j * 8, sums[i][j][0], sums[i][j][1]);
      put(row + i * 16 + 8, col + j * 8, sums[i][j][2], sums[i][j][3]);
    }
  }
}

// ---- kernels ----

template <class T, class Tile, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    CorrelateKernel(const __grid_constant__ Correlating<T> task) {
  T* shared = DynamicShared<T>();
  const int group = (int)blockIdx.x / task.by_tiles;
  const int tile = (int)blockIdx.x - group * (int)task.by_tiles.value;
  const int row_tile = tile / task.by_col_tiles;
  const int first_row = row_tile * Tile::kRows;
  const int first_col = (tile - row_tile * (int)task.by_col_tiles.value) * Tile::kCols;
  const Positions<T, Tile::kRows, kAligned> positions(task, group, first_row);
  const Filters<T, Tile::kCols, kAligned> filters(task, group, first_col);
  Sums<Tile> sums = {};
  Multiply<T, Tile, false>(positions, filters, 0, task.depth, shared, sums);

  constexpr int kChunks = Tile::kCols / 8;
  ForEachPair<Tile>(sums, [&](int row, int col, float low, float high) {
    if (task.bias) {
      const T* bias = task.bias + group * task.filters;
      low += first_col + col < task.filters ? (float)bias[first_col + col] : 0.f;
      high += first_col + col + 1 < task.filters ? (float)bias[first_col + col + 1] : 0.f;
    }
    *(uint32_t*)(shared + InPanel<kChunks>(row, col / 8) + col % 8) =
        T(low).bits | (uint32_t)T(high).bits << 16;
  });
  __syncthreads();
  for (int k = (int)threadIdx.x; k < Tile::kRows * kChunks; k += kThreads) {
    const int row = first_row + k / kChunks, col = first_col + k % kChunks * 8;
    if (row >= task.rows || col >= task.filters) continue;
    T* to = task.out + task.Output(row, group) + col;
    const T* from = shared + InPanel<kChunks>(k / kChunks, k % kChunks);
    if (task.aligned_out) {
      *(float4*)to = *(const float4*)from;
      continue;
    }
    for (int e = 0; e < min(8, task.filters - col); e++) to[e] = from[e];
  }
}

template <class T, class Tile, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    FilterGradientKernel(const __grid_constant__ FilterGradientTask<T> task) {
  T* shared = DynamicShared<T>();
  int rest = (int)blockIdx.x / task.by_col_tiles;
  const int first_col = ((int)blockIdx.x - rest * (int)task.by_col_tiles.value) * Tile::kCols;
  const int above = rest / task.by_row_tiles;
  const int first_row = (rest - above * (int)task.by_row_tiles.value) * Tile::kRows;
  const int split = above / task.by_groups, group = above - split * task.groups;
  const int begin = split * task.slice, end = min(begin + task.slice, task.positions);
  const OutputGradients<T, Tile::kRows, kAligned> gradients(task, group, first_row, end);
  const Neighbors<T, Tile::kCols, kAligned> neighbors(task, group, first_col, end);
  Sums<Tile> sums = {};
  Multiply<T, Tile, true>(gradients, neighbors, begin, end, shared, sums);

  float* parts = task.parts + (int64_t)above * task.filters * task.cols;
  ForEachPair<Tile>(sums, [&](int row, int col, float low, float high) {
    row += first_row, col += first_col;
    if (row >= task.filters || col >= task.cols) return;
    float* to = parts + (int64_t)row * task.cols + col;
    if (kAligned) {
      *(float2*)to = make_float2(low, high);
      return;
    }
    to[0] = low;
    if (col + 1 < task.cols) to[1] = high;
  });
}

// df (filters, channels, kernel) = the sum of parts (splits, filters, kernel, channels): 32
// elements a block, each by eight threads.
template <class T>
__global__ void AddPartsKernel(const float* parts, T* df, int splits, int numel,
                               Divisor by_channels, Divisor by_kernel_size) {
  __shared__ float sums[kThreads / 32][32];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  const int k = (int)blockIdx.x * 32 + lane;
  float sum = 0.f;
  if (k < numel) {
#pragma unroll 4
    for (int split = warp; split < splits; split += kThreads / 32)
      sum += parts[(int64_t)split * numel + k];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || k >= numel) return;
  for (int other = 1; other < kThreads / 32; other++) sum += sums[other][lane];
  const int rest = k / by_channels, c = k - rest * (int)by_channels.value;
  const int filter = rest / by_kernel_size, offset = rest - filter * (int)by_kernel_size.value;
  df[(int64_t)(filter * (int)by_channels.value + c) * by_kernel_size.value + offset] = T(sum);
}

// y (n, cols, rows) from x (n, rows, cols), in tiles of 64 x 64, whose rows begin at other banks. A
// thread loads all of its elements before it stores one. Memory bandwidth limits it.
template <class T>
__global__ void __launch_bounds__(kThreads)
    SwapAxesKernel(const T* x, T* y, int rows, int cols, int row_tiles, int col_tiles,
                   int64_t tiles) {
  constexpr int kSide = 64, kLines = kThreads / kSide, kAtOnce = kSide / kLines;
  __shared__ T tile[kSide][kSide + 4 / sizeof(T)];
  const int fast = (int)threadIdx.x % kSide, line = (int)threadIdx.x / kSide;
  GridDependencySynchronize();
  for (int64_t k = blockIdx.x; k < tiles; k += gridDim.x) {
    const int64_t n = k / (row_tiles * col_tiles);
    const int rest = (int)(k - n * (row_tiles * col_tiles));
    const int row = rest / col_tiles * kSide, col = rest % col_tiles * kSide;
    const T* const from = x + n * rows * cols + (int64_t)row * cols + col;
    T* const to = y + n * rows * cols + (int64_t)col * rows + row;
    T v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int i = line + u * kLines;
      v[u] = row + i < rows && col + fast < cols ? from[(int64_t)i * cols + fast] : T(0.f);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) tile[line + u * kLines][fast] = v[u];
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int j = line + u * kLines;
      if (col + j < cols && row + fast < rows) to[(int64_t)j * rows + fast] = tile[fast][j];
    }
    __syncthreads();
  }
}

// ---- launchers ----

template <class T, class Tile>
void LaunchCorrelate(const Call& at, const Correlating<T>& task, unsigned blocks, bool aligned) {
  const auto kernel = aligned ? CorrelateKernel<T, Tile, true> : CorrelateKernel<T, Tile, false>;
  AllowShared(at.op, (const void*)kernel, Tile::kNbytes);
  Launch(at.op, kernel, blocks, kThreads, Tile::kNbytes, at.stream, task);
}

// `filter` is (groups, filters, kernel, channels).
template <class T>
void Correlate(const Call& at, const Correlation& c, HW kernel, const T* x, const T* filter,
               const T* bias, T* out) {
  if (c.Positions() == 0) return;
  Correlating<T> task{};
  task.x = x, task.filter = filter, task.bias = bias, task.out = out;
  task.h = AxisOf(c.h), task.w = AxisOf(c.w);
  task.rows = (int)(c.images * c.Positions()), task.filters = (int)c.out_channels;
  task.depth = (int)c.K(), task.groups = (int)c.groups, task.channels = (int)c.in_channels;
  task.in_h = (int)c.in.h, task.in_w = (int)c.in.w;
  task.out_h = (int)c.out_hw.h, task.out_w = (int)c.out_hw.w;
  task.kernel_w = (int)kernel.w, task.kernel_size = (int)Size(kernel);
  task.by_channels = Divisor(c.in_channels);
  task.by_kernel_w = Divisor(std::max<int64_t>(c.w.kernel_size, 1));
  task.by_positions = Divisor(c.Positions()), task.by_width = Divisor(c.w.count);
  task.aligned_out = c.out_channels % 8 == 0 && Aligned16(out);
  const bool aligned = c.in_channels % 8 == 0 && Aligned16(x) && Aligned16(filter);
  const int64_t width = c.out_channels <= 64 ? 64 : 128;
  const int64_t cols = CeilDiv(c.out_channels, width), tiles = CeilDiv(task.rows, 128) * cols;
  task.by_col_tiles = Divisor(cols), task.by_tiles = Divisor(tiles);
  const auto launch =
      width == 64 ? LaunchCorrelate<T, Tile<128, 64>> : LaunchCorrelate<T, Tile<128, 128>>;
  launch(at, task, (unsigned)(tiles * c.groups), aligned);
}

template <class T, class Tile>
void LaunchFilterGradient(const Call& at, const FilterGradientTask<T>& task, unsigned blocks,
                          bool aligned) {
  const auto kernel =
      aligned ? FilterGradientKernel<T, Tile, true> : FilterGradientKernel<T, Tile, false>;
  AllowShared(at.op, (const void*)kernel, Tile::kNbytes);
  Launch(at.op, kernel, blocks, kThreads, Tile::kNbytes, at.stream, task);
}

// False where it runs here, by mma. A kernel that is named and cannot fails.
template <class T>
bool OnHopper(const Call& at, const Conv& c, Pass pass, const T* x, const T* f, const T* y) {
  if (at.kernel == Kernel::kMma && at.tiling >= 0)
    FailWith(DL_NOT_APPLICABLE, "%s: this tiling of implicit mma is of float32; use implicit mma",
             at.op);
  const char* refusal = HopperRefusal(at, c, pass, x, f, y);
  if (refusal && at.kernel != Kernel::kHeuristic && at.kernel != Kernel::kMma)
    FailWith(DL_NOT_APPLICABLE, "%s: this algorithm cannot compute this: %s; use implicit mma",
             at.op, refusal);
  return !refusal && at.kernel != Kernel::kMma;
}

// The kernel for groups of few channels by which it runs, or kHeuristic where none does. One that
// is named and cannot fails.
template <class T>
Kernel KernelOfGroups(const Call& at, const Conv& c, const T* x, const T* f, const T* y) {
  const bool any = at.kernel == Kernel::kHeuristic;
  if (!any && at.kernel != Kernel::kGroups && at.kernel != Kernel::kDepthwise)
    return Kernel::kHeuristic;
  if (IsDepthwise(c) && at.kernel != Kernel::kGroups) return Kernel::kDepthwise;
  const char* refusal = at.kernel == Kernel::kDepthwise ? "it is for one channel a group"
                                                        : GroupsRefusal(at, c, x, f, y);
  if (refusal && !any)
    FailWith(DL_NOT_APPLICABLE, "%s: this algorithm cannot compute this: %s; use implicit", at.op,
             refusal);
  return refusal ? Kernel::kHeuristic : Kernel::kGroups;
}

// These return false where no such kernel runs; bias and statistics may be null.
template <class T>
bool ForwardByGroups(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y,
                     const Statistics* statistics) {
  const Kernel by = KernelOfGroups(at, c, x, f, y);
  if (by == Kernel::kHeuristic) return false;
  if (by == Kernel::kDepthwise) {
    DepthwiseForward(at, c, x, f, bias, y, statistics);
    return true;
  }
  ForwardOfGroups(at, c, x, f, bias, y);
  if (statistics)
    ChannelStatistics(at.op, at.ctx, y, Channels(c.n * Size(c.out), c.o, 1), statistics->mean,
                      statistics->variance, at.stream);
  return true;
}
template <class T>
bool DataGradientByGroups(const Call& at, const Conv& c, const T* f, const T* dy, T* dx) {
  const Kernel by = KernelOfGroups<T>(at, c, dx, f, dy);
  if (by == Kernel::kHeuristic) return false;
  (by == Kernel::kDepthwise ? DepthwiseDataGradient<T> : DataGradientOfGroups<T>)(at, c, f, dy, dx);
  return true;
}
template <class T>
bool FilterGradientByGroups(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  const Kernel by = KernelOfGroups<T>(at, c, x, df, dy);
  if (by == Kernel::kHeuristic) return false;
  (by == Kernel::kDepthwise ? DepthwiseFilterGradient<T> : FilterGradientOfGroups<T>)(at, c, x, dy,
                                                                                      df);
  return true;
}

// So many splits of K that every multiprocessor has two blocks, of four stages or more.
int64_t SplitsOf(const Call& at, int64_t tiles, int64_t positions) {
  const int64_t wanted = 2 * Multiprocessors(at.ctx.device_id) / tiles;
  return std::max<int64_t>(1, std::min(wanted, positions / (4 * kStep)));
}

}  // namespace

bool Serves(DLContext ctx, const Conv& c) {
  constexpr int64_t kMost = int64_t(1) << 30, kLeastChannels = 16;
  if (ComputeMajor(ctx.device_id) < 8) return false;
  const Call at{"conv2d_channels_last", ctx, nullptr};
  const bfloat16* const none = nullptr;
  if (IsDepthwise(c) || !GroupsRefusal(at, c, none, none, none)) return true;
  if (c.groups > 1 && std::min(c.GroupChannels(), c.GroupFilters()) < kLeastChannels) return false;
  const int64_t filter = c.o * c.GroupChannels() * Size(c.kernel);
  return c.n * Size(c.in) < kMost && c.n * Size(c.out) < kMost && filter < kMost && c.c < kMost &&
         c.o < kMost && filter > 0;
}

static void CheckIsOnHopper(const Call& at, const Conv& c, Pass pass, const float* x,
                            const float* f, const float* y) {
  const char* refusal = at.kernel == Kernel::kMma && pass != Pass::kFilterGradient
                            ? "it is for 16 bits or the gradient of a filter"
                            : HopperRefusal(at, c, pass, x, f, y);
  if (refusal)
    FailWith(DL_NOT_APPLICABLE,
             "%s: this algorithm cannot compute this in float32: %s; use implicit", at.op, refusal);
}

template <class T>
void Forward(const Call& at, const Conv& c, const T* x, const T* f, const T* bias, T* y) {
  if (ForwardByGroups<T>(at, c, x, f, bias, y, nullptr)) return;
  if (OnHopper(at, c, Pass::kForward, x, f, y))
    return ForwardOnHopper(at, c, x, f, bias, y, nullptr);
  const Correlation correlation = dlsys::Forward(c, nullptr, nullptr, nullptr, nullptr);
  const int64_t kernel = Size(c.kernel), numel = c.o * c.GroupChannels() * kernel;
  if (kernel == 1) return Correlate(at, correlation, c.kernel, x, f, bias, y);
  const Scratch filter(at.ctx, numel * (int64_t)sizeof(T), at.stream);
  SwapAxes(at, f, c.o, c.GroupChannels(), kernel, (T*)filter.data());
  Correlate(at, correlation, c.kernel, x, (const T*)filter.data(), bias, y);
}

template <class T>
void ForwardWithStatistics(const Call& at, const Conv& c, const T* x, const T* f, T* y,
                           const Statistics& statistics) {
  if (ForwardByGroups<T>(at, c, x, f, nullptr, y, &statistics)) return;
  if (OnHopper(at, c, Pass::kForward, x, f, y))
    return ForwardOnHopper<T>(at, c, x, f, nullptr, y, &statistics);
  Forward<T>(at, c, x, f, nullptr, y);
  ChannelStatistics(at.op, at.ctx, y, Channels(c.n * Size(c.out), c.o, 1), statistics.mean,
                    statistics.variance, at.stream);
}

template <class T>
void DataGradient(const Call& at, const Conv& c, const T* f, const T* dy, T* dx) {
  if (DataGradientByGroups(at, c, f, dy, dx)) return;
  if (OnHopper(at, c, Pass::kDataGradient, dx, f, dy))
    return DataGradientOnHopper(at, c, f, dy, dx, nullptr);
  const int64_t numel = c.o * c.GroupChannels() * Size(c.kernel);
  const Scratch filter(at.ctx, numel * (int64_t)sizeof(T), at.stream);
  // To (groups, channels, kernel, filters).
  SwapAxes(at, f, c.groups, c.GroupFilters(), c.GroupChannels() * Size(c.kernel),
           (T*)filter.data());
  for (int64_t phase = 0; phase < Size(c.stride); phase++)
    Correlate<T>(at, dlsys::DataGradient(c, nullptr, nullptr, nullptr, phase), c.kernel, dy,
                 (const T*)filter.data(), nullptr, dx);
}

template <class T>
void FilterGradient(const Call& at, const Conv& c, const T* x, const T* dy, T* df) {
  if (FilterGradientByGroups(at, c, x, dy, df)) return;
  if (OnHopper(at, c, Pass::kFilterGradient, x, df, dy))
    return FilterGradientOnHopper(at, c, x, dy, df);
  const int64_t channels = c.GroupChannels(), kernel = Size(c.kernel), filters = c.GroupFilters();
  const int64_t cols = channels * kernel, positions = c.n * Size(c.out);
  const int64_t height = filters <= 64 ? 64 : 128, width = height == 128 && cols <= 64 ? 64 : 128;
  const int64_t row_tiles = CeilDiv(filters, height), col_tiles = CeilDiv(cols, width);
  const int64_t splits = SplitsOf(at, row_tiles * col_tiles * c.groups, positions);
  const int64_t slice = RoundUp(CeilDiv(positions, splits), kStep), numel = c.o * cols;
  const Scratch parts(at.ctx, splits * numel * (int64_t)sizeof(float), at.stream);
  FilterGradientTask<T> task{};
  task.x = x, task.dy = dy, task.parts = parts.floats();
  task.filters = (int)filters, task.cols = (int)cols, task.positions = (int)positions;
  task.slice = (int)slice, task.groups = (int)c.groups, task.channels = (int)channels;
  task.in_h = (int)c.in.h, task.in_w = (int)c.in.w, task.out_h = (int)c.out.h;
  task.stride_h = (int)c.stride.h, task.stride_w = (int)c.stride.w;
  task.pad_h = (int)c.pad.h, task.pad_w = (int)c.pad.w;
  task.dilation_h = (int)c.dilation.h, task.dilation_w = (int)c.dilation.w;
  task.by_channels = Divisor(channels), task.by_kernel_w = Divisor(c.kernel.w);
  task.by_out_h = Divisor(c.out.h), task.by_out_w = Divisor(c.out.w);
  task.by_col_tiles = Divisor(col_tiles), task.by_row_tiles = Divisor(row_tiles);
  task.by_groups = Divisor(c.groups);
  const bool aligned = channels % 8 == 0 && filters % 8 == 0 && Aligned16(x) && Aligned16(dy);
  const auto launch = height == 64  ? LaunchFilterGradient<T, Tile<64, 128>>
                      : width == 64 ? LaunchFilterGradient<T, Tile<128, 64>>
                                    : LaunchFilterGradient<T, Tile<128, 128>>;
  launch(at, task, (unsigned)(row_tiles * col_tiles * c.groups * splits), aligned);
  Launch(at.op, AddPartsKernel<T>, (unsigned)CeilDiv(numel, 32), kThreads, 0, at.stream,
         parts.floats(), df, (int)splits, (int)numel, Divisor(channels), Divisor(kernel));
}

template <class T>
void SwapAxes(const Call& at, const T* x, int64_t n, int64_t rows, int64_t cols, T* y) {
  const int64_t row_tiles = CeilDiv(rows, 64), col_tiles = CeilDiv(cols, 64);
  const int64_t tiles = n * row_tiles * col_tiles;
  LaunchClusters(at.op, SwapAxesKernel<T>, Blocks(tiles, 1), 1, kThreads, 0,
                 ComputeMajor(at.ctx.device_id) >= 9, at.stream, x, y, (int)rows, (int)cols,
                 (int)row_tiles, (int)col_tiles, tiles);
}

template <>
void Forward(const Call& at, const Conv& c, const float* x, const float* f, const float* bias,
             float* y) {
  if (ForwardByGroups(at, c, x, f, bias, y, nullptr)) return;
  CheckIsOnHopper(at, c, Pass::kForward, x, f, y);
  ForwardOnHopper(at, c, x, f, bias, y, nullptr);
}
template <>
void ForwardWithStatistics(const Call& at, const Conv& c, const float* x, const float* f, float* y,
                           const Statistics& statistics) {
  if (ForwardByGroups<float>(at, c, x, f, nullptr, y, &statistics)) return;
  CheckIsOnHopper(at, c, Pass::kForward, x, f, y);
  ForwardOnHopper<float>(at, c, x, f, nullptr, y, &statistics);
}
template <>
void DataGradient(const Call& at, const Conv& c, const float* f, const float* dy, float* dx) {
  if (DataGradientByGroups(at, c, f, dy, dx)) return;
  CheckIsOnHopper(at, c, Pass::kDataGradient, dx, f, dy);
  DataGradientOnHopper(at, c, f, dy, dx, nullptr);
}
template <>
void FilterGradient(const Call& at, const Conv& c, const float* x, const float* dy, float* df) {
  if (FilterGradientByGroups(at, c, x, dy, df)) return;
  CheckIsOnHopper(at, c, Pass::kFilterGradient, x, df, dy);
  FilterGradientOnHopper(at, c, x, dy, df);
}

#define DLSYS_CHANNELS_LAST(T)                                                          \
  template void Forward(const Call&, const Conv&, const T*, const T*, const T*, T*);    \
  template void ForwardWithStatistics(const Call&, const Conv&, const T*, const T*, T*, \
                                      const Statistics&);                               \
  template void DataGradient(const Call&, const Conv&, const T*, const T*, T*);         \
  template void FilterGradient(const Call&, const Conv&, const T*, const T*, T*);       \
  template void SwapAxes(const Call&, const T*, int64_t, int64_t, int64_t, T*)
DLSYS_CHANNELS_LAST(bfloat16);
DLSYS_CHANNELS_LAST(float16);
#undef DLSYS_CHANNELS_LAST
template void SwapAxes(const Call&, const float*, int64_t, int64_t, int64_t, float*);

}  // namespace channels_last
}  // namespace cuda
}  // namespace dlsys
