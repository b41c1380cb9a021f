// The kernel behind every convolution that is not depthwise: a matrix product in true float32 whose
// factors are gathered on their way to shared memory.
//
// A task says what is multiplied: the first factor is a matrix of rows `RowPitch` apart, of which a
// layer of the depth adds an offset; where an element of the second lies on a plane is the sum of
// what its column and what its layer contribute, an offset and a coordinate. What depends on the
// depth is computed once a block for kTable layers, into shared memory. Panels kDepth deep pass
// through two buffers, and a thread keeps an outer product of quads in registers.
#pragma once
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

constexpr int kDepth = 8;                      // layers of a panel
constexpr int kTable = 256;                    // layers whose places are known ahead
constexpr int kQuadRows = 16, kQuadCols = 32;  // how far a thread's quads lie apart
constexpr int kNowhere = -(1 << 30);           // a coordinate off every plane
constexpr int64_t kNoOffset = INT64_MIN / 4;

// A tile of Rows x Cols by threads that hold ThreadRows x ThreadCols of it each.
template <int Rows, int Cols, int ThreadRows, int ThreadCols, int BlocksPerMultiprocessor>
struct Tiling {
  static constexpr int kRows = Rows, kCols = Cols;
  static constexpr int kThreadRows = ThreadRows, kThreadCols = ThreadCols;
  static constexpr int kResident = BlocksPerMultiprocessor;
  static constexpr int kWarpRows = ThreadRows * 4, kWarpCols = ThreadCols * 8;
  static constexpr int kWarpsAcross = Cols / kWarpCols;
  static constexpr int kBlock = Rows / kWarpRows * kWarpsAcross * 32;
  static constexpr int kPartsA = Rows * kDepth / kBlock, kPartsB = Cols * kDepth / kBlock;
  static_assert(kPartsA * kBlock == Rows * kDepth && kPartsB * kBlock == Cols * kDepth,
                "the threads cover a panel once");
};
using Large = Tiling<128, 128, 8, 8, 2>;
using Medium = Tiling<64, 128, 8, 8, 3>;
using Low = Tiling<32, 128, 4, 8, 4>;
using Flat = Tiling<16, 128, 4, 8, 6>;
using Small = Tiling<32, 32, 4, 4, 12>;

// What a column of the second factor contributes to where its elements lie.
struct Spot {
  int64_t offset;
  int h, w;
};

// What a layer contributes, to the first factor and to the second.
struct Layer {
  int64_t a, b;
  int h, w;
};

// How a product is cut: groups and parts of the depth are further tiles.
struct Tiles {
  int rows, cols, row_tiles, col_tiles, groups;
  int64_t depth, part;
};

// kCount values as quads that lie kApart elements apart.
template <int kCount, int kApart>
__device__ __forceinline__ void ReadQuads(const float* from, float (&to)[kCount]) {
#pragma unroll
  for (int q = 0; q < kCount / 4; q++) {
    const float4 v = *(const float4*)(from + q * kApart);
    to[4 * q] = v.x;
    to[4 * q + 1] = v.y;
    to[4 * q + 2] = v.z;
    to[4 * q + 3] = v.w;
  }
}

// The panel of the first factor on its way to shared memory: depth is fastest among the threads,
// for that is how filters and dy lie.
template <class T>
class LeftPanel {
 public:
  using Buffer = float[kDepth][T::kRows + 4];

  __device__ LeftPanel(const float* a, int64_t pitch, int row, int rows)
      : a_(a + (row + Row(0)) * pitch), step_(kRowStep * pitch), room_(rows - row) {}

  __device__ __forceinline__ void Load(const Layer* layers) {
    const int64_t offset = layers[(int)threadIdx.x % kDepth].a;
#pragma unroll
    for (int q = 0; q < T::kPartsA; q++) {
      const bool valid = offset >= 0 && Row(q) < room_;
      values_[q] = valid ? a_[q * step_ + offset] : 0.f;
    }
  }

  __device__ __forceinline__ void Store(Buffer& buffer) const {
#pragma unroll
    for (int q = 0; q < T::kPartsA; q++) buffer[threadIdx.x % kDepth][Row(q)] = values_[q];
  }

 private:
  static constexpr int kRowStep = T::kBlock / kDepth;
  static __device__ __forceinline__ int Row(int q) {
    return (int)threadIdx.x / kDepth + q * kRowStep;
  }

  const float* a_;
  int64_t step_;
  int room_;
  float values_[T::kPartsA];
};

// The panel of the second factor, gathered.
template <class T, class Task>
class RightPanel {
 public:
  using Buffer = float[kDepth][T::kCols + 4];
  using Spots = Spot[T::kCols];

  __device__ RightPanel(const float* b, int height, int width, const Spots& spots)
      : b_(b), height_(height), width_(width), spots_(spots) {
    if constexpr (!Task::kDepthFastest) {
#pragma unroll
      for (int s = 0; s < kOwn; s++) own_[s] = spots[Col(s)];
    }
  }

  __device__ __forceinline__ void Load(const Layer* layers) {
#pragma unroll
    for (int q = 0; q < T::kPartsB; q++) {
      const Spot spot = Task::kDepthFastest ? spots_[Col(q)] : own_[q % kOwn];
      const Layer& layer = layers[Deep(q)];
      const int h = spot.h + layer.h, w = spot.w + layer.w;
      const bool valid = (unsigned)h < (unsigned)height_ && (unsigned)w < (unsigned)width_;
      values_[q] = valid ? b_[spot.offset + layer.b + (h * width_ + w)] : 0.f;
    }
  }

  __device__ __forceinline__ void Store(Buffer& buffer) const {
#pragma unroll
    for (int q = 0; q < T::kPartsB; q++) buffer[Deep(q)][Col(q)] = values_[q];
  }

 private:
  // Columns that a thread meets when columns are fastest.
  static constexpr int kOwn = T::kCols > T::kBlock ? T::kCols / T::kBlock : 1;

  static __device__ __forceinline__ int Col(int q) {
    const int t = (int)threadIdx.x;
    return Task::kDepthFastest ? t / kDepth + q * (T::kBlock / kDepth)
                               : (t + q * T::kBlock) % T::kCols;
  }
  static __device__ __forceinline__ int Deep(int q) {
    const int t = (int)threadIdx.x;
    return Task::kDepthFastest ? t % kDepth : (t + q * T::kBlock) / T::kCols;
  }

  const float* b_;
  int height_, width_;
  const Spots& spots_;
  Spot own_[kOwn];
  float values_[T::kPartsB];
};

// Where kTable layers from `depth` on lie; those from `end` on are nowhere.
template <class T, class Task>
__device__ __forceinline__ void FillTable(const Task& task, int64_t depth, int64_t end,
                                          Layer* layers) {
  for (int k = threadIdx.x; k < kTable; k += T::kBlock)
    layers[k] = depth + k < end ? task.LayerAt(depth + k) : Layer{kNoOffset, 0, kNowhere, kNowhere};
}

// What this block computes, counting tiles.
struct Share {
  int row, col, group, part;
};

__device__ __forceinline__ Share FindShare(const Tiles& tiles) {
  int rest = (int)blockIdx.x;
  Share share;
  share.row = rest % tiles.row_tiles;
  rest /= tiles.row_tiles;
  share.col = rest % tiles.col_tiles;
  rest /= tiles.col_tiles;
  share.group = rest % tiles.groups;
  share.part = rest / tiles.groups;
  return share;
}

template <class T>
using Sums = float[T::kThreadRows][T::kThreadCols];

template <class T>
__device__ __forceinline__ void MultiplyPanel(const float (&a)[kDepth][T::kRows + 4],
                                              const float (&b)[kDepth][T::kCols + 4], int row,
                                              int col, Sums<T>& sums) {
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    float left[T::kThreadRows], right[T::kThreadCols];
    ReadQuads<T::kThreadRows, kQuadRows>(&a[d][row], left);
    ReadQuads<T::kThreadCols, kQuadCols>(&b[d][col], right);
#pragma unroll
    for (int i = 0; i < T::kThreadRows; i++) {
#pragma unroll
      for (int j = 0; j < T::kThreadCols; j++) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
    }
  }
}

template <class T, class Task>
__global__ __launch_bounds__(T::kBlock, T::kResident) void TileKernel(const Task task) {
  using Left = LeftPanel<T>;
  using Right = RightPanel<T, Task>;
  __shared__ __align__(16) typename Left::Buffer buffers_a[2];
  __shared__ __align__(16) typename Right::Buffer buffers_b[2];
  __shared__ __align__(16) Layer layers[kTable];
  __shared__ __align__(16) typename Right::Spots spots;
  const Tiles& tiles = task.tiles;
  const Share share = FindShare(tiles);
  const int first_row = share.row * T::kRows, first_col = share.col * T::kCols;
  const int64_t begin = share.part * tiles.part;
  const int64_t end = min(begin + tiles.part, tiles.depth);
  for (int k = threadIdx.x; k < T::kCols; k += T::kBlock)
    spots[k] =
        first_col + k < tiles.cols ? task.SpotAt(first_col + k) : Spot{0, kNowhere, kNowhere};
  FillTable<T>(task, begin, end, layers);
  __syncthreads();
  Left a(task.A(share.group), task.RowPitch(), first_row, tiles.rows);
  Right b(task.B(share.group), task.Height(), task.Width(), spots);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / T::kWarpsAcross * T::kWarpRows + lane / 8 * 4;
  const int col = warp % T::kWarpsAcross * T::kWarpCols + lane % 8 * 4;
  float sums[T::kThreadRows][T::kThreadCols] = {};

  a.Load(layers);
  b.Load(layers);
  a.Store(buffers_a[0]);
  b.Store(buffers_b[0]);
  __syncthreads();
  int current = 0, next = kDepth;  // the next panel's place in the table
  for (int64_t depth = begin; depth < end; depth += kDepth) {
    const bool more = depth + kDepth < end;
    if (more) {
      if (next == kTable) {  // all threads have read the last panel's layers
        FillTable<T>(task, depth + kDepth, end, layers);
        __syncthreads();
        next = 0;
      }
      a.Load(layers + next);
      b.Load(layers + next);
      next += kDepth;
    }
    MultiplyPanel<T>(buffers_a[current], buffers_b[current], row, col, sums);
    if (more) {
      a.Store(buffers_a[current ^ 1]);
      b.Store(buffers_b[current ^ 1]);
    }
    __syncthreads();
    current ^= 1;
  }
#pragma unroll
  for (int i = 0; i < T::kThreadRows; i++) {
    const int r = first_row + row + i / 4 * kQuadRows + i % 4;
#pragma unroll
    for (int j = 0; j < T::kThreadCols; j += 4) {
      const int c = first_col + col + j / 4 * kQuadCols;
      if (r < tiles.rows && c < tiles.cols)
        task.Store(share.group, share.part, r, c,
                   make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
    }
  }
}

}  // namespace cuda
}  // namespace dlsys
