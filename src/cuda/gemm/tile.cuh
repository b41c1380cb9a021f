// The part of a tile of C that a thread holds in registers: how it grows by the product of two
// panels in shared memory, and where it goes in the end. One class for each precision.
//
// A warp holds T::kWarpRows x T::kWarpCols of the tile, and the warps of a group all of it. The
// groups share out the depth of the panels and hold a tile each, which are added in the end.
#pragma once
#include <tuple>
#include <type_traits>

#include "cuda/gemm/gemm.cuh"
#include "cuda/gemm/panel.cuh"

namespace dlsys {
namespace cuda {

// A tile of Rows x Cols of C by Groups groups of warps whose lanes hold ThreadRows x ThreadCols.
template <int Rows, int Cols, int Groups, int ThreadRows, int ThreadCols, int Depth, int Stages>
struct Tiling {
  static constexpr int kRows = Rows, kCols = Cols, kGroups = Groups;
  static constexpr int kThreadRows = ThreadRows, kThreadCols = ThreadCols;
  static constexpr int kDepth = Depth, kGroupDepth = Depth / Groups;
  static constexpr int kStages = Stages;  // panels in shared memory
  static constexpr int kLaneCols = Cols / ThreadCols >= 8 ? 8 : 4, kLaneRows = 32 / kLaneCols;
  static constexpr int kWarpRows = ThreadRows * kLaneRows, kWarpCols = ThreadCols * kLaneCols;
  static constexpr int kWarpsAcross = Cols / kWarpCols;
  static constexpr int kGroupThreads = Rows / kWarpRows * kWarpsAcross * 32;
  static constexpr int kThreads = Groups * kGroupThreads;
  // Of a tile in shared memory, where as many lie as fit; groups beyond add to those, in rounds.
  static constexpr int kTilePitch = Cols + 8, kTileNumel = Rows * kTilePitch;
  static constexpr bool kAllFit = Groups > 4 || Groups* kTileNumel <= 12000;
  static constexpr int kTiles = kAllFit ? Groups : Groups > 2 ? 2 : 1;
  // Blocks on a multiprocessor, at least: what a thread holds of C decides.
  static constexpr int kHeld = ThreadRows * ThreadCols;
  static constexpr int kResident = (kHeld > 64 ? 256 : kHeld > 32 ? 384 : 512) / kThreads;
  static_assert(kWarpsAcross * kWarpCols == Cols && Rows % kWarpRows == 0, "warps fill the tile");
};

__device__ __forceinline__ float4 Sum(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// What every accumulator of a tiling knows of its place.
template <class T, bool kTransA, bool kTransB>
struct TilePlace {
  using PanelA = Panel<T::kRows, T::kDepth, T::kThreads, !kTransA>;
  using PanelB = Panel<T::kCols, T::kDepth, T::kThreads, kTransB>;
  int lane, row, col;  // the first row and column of the warp
  __device__ TilePlace() : lane(threadIdx.x % 32) {
    const int warp = threadIdx.x % T::kGroupThreads / 32;
    row = warp / T::kWarpsAcross * T::kWarpRows;
    col = warp % T::kWarpsAcross * T::kWarpCols;
  }
};

// An outer product for each layer of the depth. A lane's rows (and columns) are neighbours in quads
// where the panel has them side by side, else kLanes apart; both ways a warp reads what is spread
// over the banks.
template <class T, bool kTransA, bool kTransB>
class Fp32Accumulator {
  using Place = TilePlace<T, kTransA, kTransB>;

 public:
  using PanelA = typename Place::PanelA;
  using PanelB = typename Place::PanelB;

  // Neighbouring lanes share a column, and those two apart a row: what they read together is then
  // read once.
  __device__ explicit Fp32Accumulator(const Product&)
      : lane_row_(place_.lane % 2 + place_.lane / (2 * T::kLaneCols) * 2) {
    lane_col_ = place_.lane / 2 % T::kLaneCols;
  }

  // Adds the product of kGroupDepth layers from `depth` on: four layers of B are held while quads
  // of A, four layers of a row or four rows of a layer, pass by. Calls meanwhile() once.
  template <class F>
  __device__ __forceinline__ void Add(const float* a, const float* b, int depth, F&& meanwhile) {
    meanwhile();
#pragma unroll
    for (int step = 0; step < T::kGroupDepth; step += 4) {
      float right[4][T::kThreadCols];
#pragma unroll
      for (int q = 0; q < T::kThreadCols; q++) {
        const float4 v = Quad<typename Place::PanelB, kTransB, T::kLaneCols, T::kThreadCols>(
            b, place_.col, lane_col_, depth + step, q);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if constexpr (kTransB)
            right[e][q] = values[e];
          else
            right[q / (T::kThreadCols / 4)][q % (T::kThreadCols / 4) * 4 + e] = values[e];
        }
      }
#pragma unroll
      for (int q = 0; q < T::kThreadRows; q++) {
        const float4 v = Quad<typename Place::PanelA, !kTransA, T::kLaneRows, T::kThreadRows>(
            a, place_.row, lane_row_, depth + step, q);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int d = kTransA ? q / (T::kThreadRows / 4) : e;
          const int i = kTransA ? q % (T::kThreadRows / 4) * 4 + e : q;
#pragma unroll
          for (int j = 0; j < T::kThreadCols; j++)
            sums_[i][j] = fmaf(values[e], right[d][j], sums_[i][j]);
        }
      }
    }
  }

  // Writes or adds what the thread holds to the tile.
  __device__ __forceinline__ void Store(float* tile, bool add) const {
#pragma unroll
    for (int i = 0; i < T::kThreadRows; i++) {
      const int row = place_.row + Offset<!kTransA, T::kLaneRows>(lane_row_, i);
#pragma unroll
      for (int j = 0; j < T::kThreadCols; j += kTransB ? 1 : 4) {
        const int col = place_.col + Offset<kTransB, T::kLaneCols>(lane_col_, j);
        float* to = tile + row * T::kTilePitch + col;
        if constexpr (kTransB) {
          *to = add ? *to + sums_[i][j] : sums_[i][j];
        } else {
          float4 v = make_float4(sums_[i][j], sums_[i][j + 1], sums_[i][j + 2], sums_[i][j + 3]);
          if (add) v = Sum(*(const float4*)to, v);
          *(float4*)to = v;
        }
      }
    }
  }

 private:
  template <bool kDepthFastest, int kLanes>
  static __device__ __forceinline__ int Offset(int lane, int k) {
    return kDepthFastest ? lane + k * kLanes : 4 * lane + k / 4 * 4 * kLanes + k % 4;
  }

  // The quad of number q of the kCount that four layers of the lane's rows or columns make.
  template <class P, bool kDepthFastest, int kLanes, int kCount>
  static __device__ __forceinline__ float4 Quad(const float* panel, int origin, int lane, int depth,
                                                int q) {
    constexpr int kInLayer = kCount / 4;
    const int w = kDepthFastest ? q : q % kInLayer * 4, d = kDepthFastest ? 0 : q / kInLayer;
    return *(const float4*)&P::At(panel, origin + Offset<kDepthFastest, kLanes>(lane, w),
                                  depth + d);
  }

  Place place_;
  int lane_row_, lane_col_;
  float sums_[T::kThreadRows][T::kThreadCols] = {};
};

// By the numbers that WithTiling takes: large, square, narrow, small, thin, flat.
using Fp32Tilings = std::tuple<Tiling<128, 64, 2, 8, 8, 32, 3>, Tiling<64, 64, 4, 8, 8, 32, 3>,
                               Tiling<64, 32, 4, 8, 4, 32, 4>, Tiling<32, 32, 4, 4, 4, 32, 5>,
                               Tiling<32, 16, 8, 4, 4, 64, 3>, Tiling<16, 32, 8, 4, 4, 64, 3>>;
template <class Narrow>
using TensorTilings = std::tuple<Tiling<128, 64, 2, 8, 8, 64, 3>, Tiling<64, 64, 4, 8, 8, 64, 4>,
                                 Narrow, Tiling<32, 32, 8, 4, 8, 64, 3>,
                                 Tiling<32, 16, 8, 4, 4, 64, 3>, Tiling<16, 32, 8, 4, 4, 64, 3>>;
using Tf32Tilings = TensorTilings<Tiling<64, 32, 4, 8, 8, 32, 4>>;
// Where A is bytes: panels of it are small, and deep ones have room.
using BytesTilings = TensorTilings<Tiling<64, 32, 8, 8, 8, 128, 4>>;

// Tensor cores, 16 x 8 of C by 8 layers at a time: factors of 10 bits of mantissa, rounded to
// nearest, and sums in float32.
template <class T, bool kTransA, bool kTransB>
class Tf32Accumulator {
  using Place = TilePlace<T, kTransA, kTransB>;
  static constexpr int kDown = T::kWarpRows / 16, kAcross = T::kWarpCols / 8;

 public:
  using PanelA = typename Place::PanelA;
  using PanelB = typename Place::PanelB;

  __device__ explicit Tf32Accumulator(const Product&) {}

  // Calls meanwhile() once, when the first factors are on their way.
  template <class F>
  __device__ __forceinline__ void Add(const float* a, const float* b, int depth, F&& meanwhile) {
#pragma unroll
    for (int step = 0; step < T::kGroupDepth; step += 8) {
      float left[kDown][4], right[kAcross][2];
      Read(a, b, depth + step, left, right);
      if (step == 0) meanwhile();
#pragma unroll
      for (int i = 0; i < kDown; i++)
#pragma unroll
        for (int j = 0; j < kAcross; j++) MultiplyAddTf32(left[i], right[j], sums_[i][j]);
    }
  }

  // Writes or adds what the thread holds to the tile.
  __device__ __forceinline__ void Store(float* tile, bool add) const {
#pragma unroll
    for (int i = 0; i < kDown; i++) {
      const int row = place_.row + 16 * i + place_.lane / 4;
#pragma unroll
      for (int j = 0; j < kAcross; j++) {
        const float* sum = sums_[i][j];
        float* to = tile + row * T::kTilePitch + place_.col + 8 * j + place_.lane % 4 * 2;
        Put(to, sum[0], sum[1], add);
        Put(to + 8 * T::kTilePitch, sum[2], sum[3], add);
      }
    }
  }

 private:
  __device__ __forceinline__ void Read(const float* a, const float* b, int depth,
                                       float (&left)[kDown][4], float (&right)[kAcross][2]) const {
    const int d = depth + place_.lane % 4;
#pragma unroll
    for (int i = 0; i < kDown; i++) {
      const int w = place_.row + 16 * i + place_.lane / 4;
      left[i][0] = RoundedToTf32(Place::PanelA::At(a, w, d));
      left[i][1] = RoundedToTf32(Place::PanelA::At(a, w + 8, d));
      left[i][2] = RoundedToTf32(Place::PanelA::At(a, w, d + 4));
      left[i][3] = RoundedToTf32(Place::PanelA::At(a, w + 8, d + 4));
    }
#pragma unroll
    for (int j = 0; j < kAcross; j++) {
      const int w = place_.col + 8 * j + place_.lane / 4;
      right[j][0] = RoundedToTf32(Place::PanelB::At(b, w, d));
      right[j][1] = RoundedToTf32(Place::PanelB::At(b, w, d + 4));
    }
  }

  static __device__ __forceinline__ void Put(float* to, float x, float y, bool add) {
    const float2 old = add ? *(const float2*)to : make_float2(0.f, 0.f);
    *(float2*)to = make_float2(old.x + x, old.y + y);
  }

  Place place_;
  float sums_[kDown][kAcross][4] = {};
};

}  // namespace cuda
}  // namespace dlsys
