// Register-level GEMM: the accumulators of a thread, one class per precision (FFMA and mma.sync at
// tf32), and the tilings that are compiled.
//
// A block computes kTileM x kTileN of C from kTileK-deep operand panels in shared memory. K is
// sliced within the block ("sliced-K"): each of kSlices warp groups multiplies kSliceK of every
// panel into accumulators of its own, which are added through shared memory at the end. A warp
// holds kWarpM x kWarpN of the tile, a thread kThreadM x kThreadN.
#pragma once
#include <tuple>
#include <type_traits>

#include "cuda/gemm/gemm.cuh"
#include "cuda/gemm/panel.cuh"

namespace dlsys {
namespace cuda {

// TileM x TileN of C by Slices warp groups whose threads hold ThreadM x ThreadN each.
template <int TileM, int TileN, int Slices, int ThreadM, int ThreadN, int TileK, int Stages>
struct Tiling {
  static constexpr int kTileM = TileM, kTileN = TileN, kSlices = Slices;
  static constexpr int kThreadM = ThreadM, kThreadN = ThreadN;
  static constexpr int kTileK = TileK, kSliceK = TileK / Slices;
  static constexpr int kStages = Stages;  // operand panels in flight in shared memory
  static constexpr int kLanesN = TileN / ThreadN >= 8 ? 8 : 4, kLanesM = 32 / kLanesN;
  static constexpr int kWarpM = ThreadM * kLanesM, kWarpN = ThreadN * kLanesN;
  static constexpr int kWarpsN = TileN / kWarpN;
  static constexpr int kSliceThreads = TileM / kWarpM * kWarpsN * 32;
  static constexpr int kThreads = Slices * kSliceThreads;
  // The slices' tiles in shared memory: kSliceTiles of them fit, further slices add to those.
  static constexpr int kTilePitch = TileN + 8, kTileNumel = TileM * kTilePitch;
  static constexpr bool kAllFit = Slices > 4 || Slices* kTileNumel <= 12000;
  static constexpr int kSliceTiles = kAllFit ? Slices : Slices > 2 ? 2 : 1;
  // Of so many slices each copies its own part of every panel, and waits for no other.
  static constexpr int kApart = 1;
  // Resident blocks per multiprocessor, at least: limited by accumulator registers.
  static constexpr int kAccumulators = ThreadM * ThreadN;
  static constexpr int kResidentThreads = kAccumulators > 64 ? 256 : kAccumulators > 32 ? 384 : 512;
  static constexpr int kResident = kResidentThreads / kThreads;
  static_assert(kWarpsN * kWarpN == TileN && TileM % kWarpM == 0, "warps fill the tile");
};

__device__ __forceinline__ float4 Sum(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The part of the block's tile that this thread's warp computes.
template <class T, bool kTransA, bool kTransB>
struct WarpTile {
  using PanelA =
      Panel<T::kTileM, T::kTileK, T::kThreads, !kTransA, PanelPadding(!kTransA), T::kApart>;
  using PanelB =
      Panel<T::kTileN, T::kTileK, T::kThreads, kTransB, PanelPadding(kTransB), T::kApart>;
  static_assert(T::kApart == 1 || (kTransA && !kTransB), "slices are of rows of panels");
  int lane, row, col;  // the first row and column of the warp
  __device__ WarpTile() : lane(threadIdx.x % 32) {
    const int warp = threadIdx.x % T::kSliceThreads / 32;
    row = warp / T::kWarpsN * T::kWarpM;
    col = warp % T::kWarpsN * T::kWarpN;
  }
};

// FFMA outer products, one per k. A lane's rows (and columns) come in contiguous quads where M (or
// N) is contiguous in the panel, else kLanes apart; either way reads are free of bank conflicts.
template <class T, bool kTransA, bool kTransB>
class Fp32Accumulator {
  using Warp = WarpTile<T, kTransA, kTransB>;

 public:
  using PanelA = typename Warp::PanelA;
  using PanelB = typename Warp::PanelB;

  // Adjacent lanes share a column, lanes two apart a row: shared memory broadcasts to them.
  __device__ explicit Fp32Accumulator(const Gemm&)
      : lane_row_(warp_.lane % 2 + warp_.lane / (2 * T::kLanesN) * 2) {
    lane_col_ = warp_.lane / 2 % T::kLanesN;
  }

  // Multiplies k in [k, k + kSliceK) of the panels: four k of B stay in registers while quads of A
  // (four k of a row, or four rows of a k) stream by. Calls overlap() once.
  template <class F>
  __device__ __forceinline__ void Add(const float* a, const float* b, int k, F&& overlap) {
    overlap();
#pragma unroll
    for (int step = 0; step < T::kSliceK; step += 4) {
      float frag_b[4][T::kThreadN];
#pragma unroll
      for (int q = 0; q < T::kThreadN; q++) {
        const float4 v = Quad<typename Warp::PanelB, kTransB, T::kLanesN, T::kThreadN>(
            b, warp_.col, lane_col_, k + step, q);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if constexpr (kTransB)
            frag_b[e][q] = values[e];
          else
            frag_b[q / (T::kThreadN / 4)][q % (T::kThreadN / 4) * 4 + e] = values[e];
        }
      }
#pragma unroll
      for (int q = 0; q < T::kThreadM; q++) {
        const float4 v = Quad<typename Warp::PanelA, !kTransA, T::kLanesM, T::kThreadM>(
            a, warp_.row, lane_row_, k + step, q);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int d = kTransA ? q / (T::kThreadM / 4) : e;
          const int i = kTransA ? q % (T::kThreadM / 4) * 4 + e : q;
#pragma unroll
          for (int j = 0; j < T::kThreadN; j++)
            sums_[i][j] = fmaf(values[e], frag_b[d][j], sums_[i][j]);
        }
      }
    }
  }

  // Stores the accumulators to the tile in shared memory, or adds them to it.
  __device__ __forceinline__ void Store(float* tile, bool add) const {
#pragma unroll
    for (int i = 0; i < T::kThreadM; i++) {
      const int row = warp_.row + Offset<!kTransA, T::kLanesM>(lane_row_, i);
#pragma unroll
      for (int j = 0; j < T::kThreadN; j += kTransB ? 1 : 4) {
        const int col = warp_.col + Offset<kTransB, T::kLanesN>(lane_col_, j);
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
  template <bool kKMajor, int kLanes>
  static __device__ __forceinline__ int Offset(int lane, int k) {
    return kKMajor ? lane + k * kLanes : 4 * lane + k / 4 * 4 * kLanes + k % 4;
  }

  // Quad q of the kCount that hold the lane's rows or columns at four k.
  template <class P, bool kKMajor, int kLanes, int kCount>
  static __device__ __forceinline__ float4 Quad(const float* panel, int origin, int lane, int k,
                                                int q) {
    constexpr int kQuadsPerK = kCount / 4;
    const int w = kKMajor ? q : q % kQuadsPerK * 4, d = kKMajor ? 0 : q / kQuadsPerK;
    return *(const float4*)&P::At(panel, origin + Offset<kKMajor, kLanes>(lane, w), k + d);
  }

  Warp warp_;
  int lane_row_, lane_col_;
  float sums_[T::kThreadM][T::kThreadN] = {};
};

// A thread's rows or columns, quads that are 4 * kLanes apart.
template <int kLanes, int kCount>
__device__ __forceinline__ void ReadQuads(const float* from, float (&x)[kCount]) {
#pragma unroll
  for (int q = 0; q < kCount; q += 4) {
    const float4 v = *(const float4*)(from + q * kLanes);
    x[q] = v.x, x[q + 1] = v.y, x[q + 2] = v.z, x[q + 3] = v.w;
  }
}

// FFMA outer products for large tiles: both panels lie (k, mn), so that a thread's rows and columns
// at one k are quads, read for the next k while this one's are multiplied.
template <class T, bool kTransA, bool kTransB>
class OuterAccumulator {
  template <int kExtent, bool kKMajor>
  using PanelOf = std::conditional_t<kKMajor, TransposedPanel<kExtent, T::kTileK, T::kThreads>,
                                     Panel<kExtent, T::kTileK, T::kThreads, false, 4>>;

 public:
  using PanelA = PanelOf<T::kTileM, !kTransA>;
  using PanelB = PanelOf<T::kTileN, kTransB>;

  // Adjacent lanes share a column, lanes two apart a row: shared memory broadcasts to them.
  __device__ explicit OuterAccumulator(const Gemm&) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    row_ = warp / T::kWarpsN * T::kWarpM + 4 * (lane % 2 + lane / (2 * T::kLanesN) * 2);
    col_ = warp % T::kWarpsN * T::kWarpN + 4 * (lane / 2 % T::kLanesN);
  }

  // Multiplies the panels, k in [0, kTileK). Calls overlap() once.
  template <class F>
  __device__ __forceinline__ void Add(const float* a, const float* b, int, F&& overlap) {
    float frag_a[2][T::kThreadM], frag_b[2][T::kThreadN];
    ReadQuads<T::kLanesM>(a + row_, frag_a[0]);
    ReadQuads<T::kLanesN>(b + col_, frag_b[0]);
    overlap();
#pragma unroll
    for (int k = 0; k < T::kTileK; k++) {
      if (k + 1 < T::kTileK) {
        ReadQuads<T::kLanesM>(a + (k + 1) * PanelA::kPitch + row_, frag_a[(k + 1) % 2]);
        ReadQuads<T::kLanesN>(b + (k + 1) * PanelB::kPitch + col_, frag_b[(k + 1) % 2]);
      }
#pragma unroll
      for (int i = 0; i < T::kThreadM; i++)
#pragma unroll
        for (int j = 0; j < T::kThreadN; j++)
          sums_[i][j] = fmaf(frag_a[k % 2][i], frag_b[k % 2][j], sums_[i][j]);
    }
  }

  // Stores the accumulators to the tile in shared memory.
  __device__ __forceinline__ void Store(float* tile, bool) const {
#pragma unroll
    for (int i = 0; i < T::kThreadM; i++) {
      const int row = row_ + i / 4 * 4 * T::kLanesM + i % 4;
#pragma unroll
      for (int j = 0; j < T::kThreadN; j += 4)
        *(float4*)(tile + row * T::kTilePitch + col_ + j * T::kLanesN) =
            make_float4(sums_[i][j], sums_[i][j + 1], sums_[i][j + 2], sums_[i][j + 3]);
    }
  }

 private:
  int row_, col_;
  float sums_[T::kThreadM][T::kThreadN] = {};
};

// Tilings whose panels fit twice, or whose accumulators leave room for one block.
template <int TileM, int TileN, int ThreadM, int ThreadN, int TileK, int Stages, int Resident>
struct LargeTiling : Tiling<TileM, TileN, 1, ThreadM, ThreadN, TileK, Stages> {
  static constexpr int kResident = Resident;
};
using LargeTilings =
    std::tuple<LargeTiling<128, 128, 8, 8, 16, 4, 2>, LargeTiling<256, 128, 16, 8, 16, 4, 1>>;

// In the order of WithTiling's index: large, square, narrow, small, thin, flat.
using Fp32Tilings = std::tuple<Tiling<128, 64, 2, 8, 8, 32, 3>, Tiling<64, 64, 4, 8, 8, 32, 3>,
                               Tiling<64, 32, 4, 8, 4, 32, 4>, Tiling<32, 32, 4, 4, 4, 32, 5>,
                               Tiling<32, 16, 8, 4, 4, 64, 3>, Tiling<16, 32, 8, 4, 4, 64, 3>>;
template <class Narrow>
using TensorTilings = std::tuple<Tiling<128, 64, 2, 8, 8, 64, 3>, Tiling<64, 64, 4, 8, 8, 64, 4>,
                                 Narrow, Tiling<32, 32, 8, 4, 8, 64, 3>,
                                 Tiling<32, 16, 8, 4, 4, 64, 3>, Tiling<16, 32, 8, 4, 4, 64, 3>>;
using Tf32Tilings = TensorTilings<Tiling<64, 32, 4, 8, 8, 32, 4>>;
// Warps of 64 x 64: fewer words from shared memory for each mma, and fewer to split.
using LargeTensorTilings =
    std::tuple<LargeTiling<128, 128, 16, 8, 32, 3, 2>, LargeTiling<256, 128, 16, 8, 32, 3, 1>>;
// A of uint8: its panels take a quarter of the space, so a deeper kTileK fits.
using U8Tilings = TensorTilings<Tiling<64, 32, 8, 8, 8, 128, 4>>;

// mma.sync m16n8k8: tf32 operands (10 bits of mantissa, rounded to nearest), float32 accumulation.
//
// kSplit is 3xtf32: an operand x is high + low, high = x rounded to tf32 and low = x - high, of
// which the tensor core reads all bits but one. Their product is low * high + high * low + high *
// high, in this order, smallest first; what is left out, low * low, is below 2^-22 |a b|.
template <class T, bool kTransA, bool kTransB, bool kSplit>
class TensorAccumulator {
  using Warp = WarpTile<T, kTransA, kTransB>;
  static constexpr int kMmaM = T::kWarpM / 16, kMmaN = T::kWarpN / 8;

 public:
  using PanelA = typename Warp::PanelA;
  using PanelB = typename Warp::PanelB;

  __device__ explicit TensorAccumulator(const Gemm&) {}

  // Calls overlap() once, when the first fragments are being loaded.
  template <class F>
  __device__ __forceinline__ void Add(const float* a, const float* b, int k, F&& overlap) {
#pragma unroll
    for (int step = 0; step < T::kSliceK; step += 8) {
      float frag_a[kMmaM][4], frag_b[kMmaN][2];
      Read(a, b, k + step, frag_a, frag_b);
      if (step == 0) overlap();
      if constexpr (kSplit) {
        float low_a[kMmaM][4], low_b[kMmaN][2];
        Split(frag_a, low_a);
        Split(frag_b, low_b);
        Multiply(low_a, frag_b);
        Multiply(frag_a, low_b);
      }
      Multiply(frag_a, frag_b);
    }
  }

  // Stores the accumulators to the tile in shared memory, or adds them to it.
  __device__ __forceinline__ void Store(float* tile, bool add) const {
#pragma unroll
    for (int i = 0; i < kMmaM; i++) {
      const int row = warp_.row + 16 * i + warp_.lane / 4;
#pragma unroll
      for (int j = 0; j < kMmaN; j++) {
        const float* sum = sums_[i][j];
        float* to = tile + row * T::kTilePitch + warp_.col + 8 * j + warp_.lane % 4 * 2;
        Put(to, sum[0], sum[1], add);
        Put(to + 8 * T::kTilePitch, sum[2], sum[3], add);
      }
    }
  }

 private:
  __device__ __forceinline__ void Multiply(const float (&frag_a)[kMmaM][4],
                                           const float (&frag_b)[kMmaN][2]) {
#pragma unroll
    for (int i = 0; i < kMmaM; i++)
#pragma unroll
      for (int j = 0; j < kMmaN; j++) MultiplyAddTf32(frag_a[i], frag_b[j], sums_[i][j]);
  }

  // Makes of each operand its high part, and the low part of it.
  template <int kCount, int kEach>
  static __device__ __forceinline__ void Split(float (&x)[kCount][kEach],
                                               float (&low)[kCount][kEach]) {
#pragma unroll
    for (int i = 0; i < kCount; i++)
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const float high = __uint_as_float(__float_as_uint(RoundedToTf32(x[i][e])) & ~0x1fffu);
        low[i][e] = fabsf(high) < INFINITY ? x[i][e] - high : 0.f;
        x[i][e] = high;
      }
  }

  static __device__ __forceinline__ float Loaded(float x) { return kSplit ? x : RoundedToTf32(x); }

  __device__ __forceinline__ void Read(const float* a, const float* b, int k,
                                       float (&frag_a)[kMmaM][4], float (&frag_b)[kMmaN][2]) const {
    const int k_lane = k + warp_.lane % 4;
#pragma unroll
    for (int i = 0; i < kMmaM; i++) {
      const int mn = warp_.row + 16 * i + warp_.lane / 4;
      frag_a[i][0] = Loaded(Warp::PanelA::At(a, mn, k_lane));
      frag_a[i][1] = Loaded(Warp::PanelA::At(a, mn + 8, k_lane));
      frag_a[i][2] = Loaded(Warp::PanelA::At(a, mn, k_lane + 4));
      frag_a[i][3] = Loaded(Warp::PanelA::At(a, mn + 8, k_lane + 4));
    }
#pragma unroll
    for (int j = 0; j < kMmaN; j++) {
      const int mn = warp_.col + 8 * j + warp_.lane / 4;
      frag_b[j][0] = Loaded(Warp::PanelB::At(b, mn, k_lane));
      frag_b[j][1] = Loaded(Warp::PanelB::At(b, mn, k_lane + 4));
    }
  }

  static __device__ __forceinline__ void Put(float* to, float x, float y, bool add) {
    const float2 old = add ? *(const float2*)to : make_float2(0.f, 0.f);
    *(float2*)to = make_float2(old.x + x, old.y + y);
  }

  Warp warp_;
  float sums_[kMmaM][kMmaN][4] = {};
};

template <class T, bool kTransA, bool kTransB>
using Tf32Accumulator = TensorAccumulator<T, kTransA, kTransB, false>;
template <class T, bool kTransA, bool kTransB>
using SplitTf32Accumulator = TensorAccumulator<T, kTransA, kTransB, true>;

}  // namespace cuda
}  // namespace dlsys
