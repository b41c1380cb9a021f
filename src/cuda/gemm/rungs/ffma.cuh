// GEMM in true float32 by FFMA, fed by TMA, for large products on sm_90a; ffma.cu launches it,
// kernel.cuh has the parameters, split-K and the way out to C.
//
// A warp computes 64 x 64 of C, a thread 16 x 8 sums; a block 256 x 128, alone on a multiprocessor,
// or 128 x 128, as one of two. One thread copies panels by TMA into a ring of stages in shared
// memory; a warp waits for the next panel's mbarrier before it multiplies this one, so that its
// loop has no branch, and arrives at another behind it. B lies (k, n), so that a thread's columns
// at one k are quads, and so may A; an A that lies along K in whole quads is read four k at a time.
// Other operands are transposed before. Sums go over k in ascending order.
//
// Limited by the issue of FFMA: of about 135 instructions for each k, 128 are multiply-adds. An
// FFMA takes two cycles where it has to read operands of one register bank, the even or the odd
// registers. For this reason the products of a column of sums go down and those of the next one up,
// so that a column's operand is kept for all of its rows, and a sum is in the other bank than its
// row's operand (Begin). The loop over k is unrolled by eight alone, since the instruction cache
// does not hold much more, and panels are deep, since each costs a warp its wait.
#pragma once
#include <algorithm>

#include "cuda/gemm/kernel.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"

namespace dlsys {
namespace cuda {

// In the order of their costs in heuristic.cu.
using FfmaTilings =
    std::tuple<LargeTiling<128, 128, 16, 8, 32, 3, 2>, LargeTiling<256, 128, 16, 8, 32, 4, 1>>;
constexpr int kFfmaUnroll = 8;        // of k, an even divisor of a panel's
constexpr int kFfmaAlignment = 1024;  // of what TMA writes in its swizzle

template <class T>
constexpr int kFfmaPanelA = T::kTileM * T::kTileK;
template <class T>
constexpr int kFfmaStageNumel = kFfmaPanelA<T> + T::kTileN * T::kTileK;
// Panels, over which a tile of C lies at the end.
template <class T>
constexpr size_t kFfmaNbytes =
    std::max(T::kStages * kFfmaStageNumel<T>, T::kTileNumel) * sizeof(float) + kFfmaAlignment;

// A thread's sums, and its operands at this k and at the next. Adjacent lanes share a column, lanes
// two apart a row: shared memory broadcasts to them.
template <class T>
class FfmaAccumulator {
 public:
  __device__ FfmaAccumulator(int row, int col, int lane)
      : row_(row + 4 * (lane % 2 + lane / (2 * T::kLanesN) * 2)),
        col_(col + 4 * (lane / 2 % T::kLanesN)) {}

  // Reads the first operands of a panel. Sums begin as `zeros` in shared memory, read as quads that
  // have the rows of each pair exchanged: a quad lies in four adjacent registers, so that sums of
  // even rows come to odd registers, where operands of even rows are in even ones.
  __device__ __forceinline__ void Begin(const float4 (&zeros)[T::kAccumulators / 4],
                                        const float* panel) {
#pragma unroll
    for (int j = 0; j < T::kThreadN; j++)
#pragma unroll
      for (int i = 0; i < T::kThreadM; i += 4) {
        const float4 x = zeros[j * T::kThreadM / 4 + i / 4];
        sums_[i + 1][j] = x.x, sums_[i][j] = x.y, sums_[i + 3][j] = x.z, sums_[i + 2][j] = x.w;
      }
    from_a_ = panel + row_, from_b_ = panel + kFfmaPanelA<T> + col_;
    Read(0);
  }

  // Multiplies kFfmaUnroll of k and reads the first operands of what follows: in this panel, or
  // where it `ends`, in the next.
  __device__ __forceinline__ void Multiply(bool ends, const float* next) {
    const float* const next_a = ends ? next + row_ : from_a_ + kFfmaUnroll * T::kTileM;
    const float* const next_b =
        ends ? next + kFfmaPanelA<T> + col_ : from_b_ + kFfmaUnroll * T::kTileN;
#pragma unroll
    for (int k = 0; k < kFfmaUnroll - 1; k++) {
      Read(k + 1);
      Add(k);
    }
    from_a_ = next_a, from_b_ = next_b;
    Read(0);
    Add(kFfmaUnroll - 1);
  }

  // Stores the sums to the tile in shared memory. As quads they would have to lie in registers of
  // one row, whose banks then meet those of the operands.
  __device__ __forceinline__ void Store(volatile float* tile) const {
#pragma unroll
    for (int i = 0; i < T::kThreadM; i++) {
      const int row = row_ + i / 4 * 4 * T::kLanesM + i % 4;
#pragma unroll
      for (int j = 0; j < T::kThreadN; j++)
        tile[row * T::kTilePitch + col_ + j / 4 * 4 * T::kLanesN + j % 4] = sums_[i][j];
    }
  }

 private:
  // Reads the operands k further on; the parity of k says which they replace.
  __device__ __forceinline__ void Read(int k) {
    ReadQuads<T::kLanesM>(from_a_ + k * T::kTileM, a_[k % 2]);
    ReadQuads<T::kLanesN>(from_b_ + k * T::kTileN, b_[k % 2]);
  }

  // Adds the products of operands that were read.
  __device__ __forceinline__ void Add(int k) {
#pragma unroll
    for (int j = 0; j < T::kThreadN; j++)
#pragma unroll
      for (int q = 0; q < T::kThreadM; q++) {
        const int i = j % 2 ? T::kThreadM - 1 - q : q;
        sums_[i][j] = fmaf(a_[k % 2][i], b_[k % 2][j], sums_[i][j]);
      }
  }

  const int row_, col_;
  const float *from_a_, *from_b_;
  float a_[2][T::kThreadM], b_[2][T::kThreadN];
  float sums_[T::kThreadM][T::kThreadN];
};

// The same where A lies along K, in rows of 128 bytes with their quads exchanged (swizzle): a
// thread has every fourth of a warp's rows, and reads four k of a row by one load. Four rows are
// multiplied at a time, while the next ones are read.
template <class T>
class FfmaAccumulatorAlongK {
  static constexpr int kDepth = 4, kGroup = 4, kGroups = T::kThreadM / kGroup;
  static constexpr int kRow = 32;  // floats of a row
  static_assert(T::kTileK == kRow && T::kLanesM == kGroup && kFfmaUnroll == 2 * kDepth);

 public:
  __device__ FfmaAccumulatorAlongK(int row, int col, int lane)
      : lane_row_(lane % 2 + lane / (2 * T::kLanesN) * 2),
        row_(row + lane_row_),
        col_(col + 4 * (lane / 2 % T::kLanesN)) {}

  __device__ __forceinline__ void Begin(const float4 (&)[T::kAccumulators / 4],
                                        const float* panel) {
    MoveTo(panel);
    ReadB(0, 0);
    ReadA(0, 0, 0);
  }
  __device__ __forceinline__ void Multiply(bool ends, const float* next) {
#pragma unroll
    for (int step = 0; step < 2 * kGroups; step++) {
      const int half = step / kGroups, group = step % kGroups;
      if (group + 1 < kGroups) {
        ReadA(half, group + 1, (group + 1) % 2);
      } else {
        if (half == 1) ends ? MoveTo(next) : Advance();
        ReadB(1 - half, 1 - half);
        ReadA(1 - half, 0, 0);
      }
      Add(half, group);
    }
  }

  __device__ __forceinline__ void Store(volatile float* tile) const {
#pragma unroll
    for (int i = 0; i < T::kThreadM; i++)
#pragma unroll
      for (int j = 0; j < T::kThreadN; j++)
        tile[(row_ + i * T::kLanesM) * T::kTilePitch + col_ + j / 4 * 4 * T::kLanesN + j % 4] =
            sums_[i][j];
  }

 private:
  __device__ __forceinline__ void MoveTo(const float* panel) {
    from_a_ = panel + row_ * kRow, from_b_ = panel + kFfmaPanelA<T> + col_;
    quad_ = 0;
  }
  __device__ __forceinline__ void Advance() {
    from_b_ += kFfmaUnroll * T::kTileN;
    quad_ += 2;
  }

  // Rows of a group at the four k of a half. Rows four apart differ in one bit of the swizzle.
  __device__ __forceinline__ void ReadA(int half, int group, int to) {
    const int even = ((quad_ + half) ^ lane_row_) * kDepth;
#pragma unroll
    for (int r = 0; r < kGroup; r++)
      ReadQuads<1>(from_a_ + (group * kGroup + r) * T::kLanesM * kRow + (even ^ r % 2 * 16),
                   a_[to][r]);
  }
  __device__ __forceinline__ void ReadB(int half, int to) {
#pragma unroll
    for (int e = 0; e < kDepth; e++)
      ReadQuads<T::kLanesN>(from_b_ + (half * kDepth + e) * T::kTileN, b_[to][e]);
  }
  __device__ __forceinline__ void Add(int half, int group) {
#pragma unroll
    for (int e = 0; e < kDepth; e++)
#pragma unroll
      for (int j = 0; j < T::kThreadN; j++)
#pragma unroll
        for (int q = 0; q < kGroup; q++) {
          const int r = j % 2 ? kGroup - 1 - q : q, i = group * kGroup + r;
          sums_[i][j] = fmaf(a_[group % 2][r][e], b_[half][e][j], sums_[i][j]);
        }
  }

  const int lane_row_, row_, col_;
  const float *from_a_, *from_b_;
  int quad_;  // of k in the panel
  float a_[2][kGroup][kDepth], b_[2][kDepth][T::kThreadN];
  float sums_[T::kThreadM][T::kThreadN] = {};
};

template <class T, bool kAlongK>
__global__ __launch_bounds__(T::kThreads, T::kResident) void FfmaKernel(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const GemmParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kAhead = T::kStages - 1;  // panels in flight
  constexpr int kWarpsM = T::kTileM / T::kWarpM, kWarps = T::kThreads / 32;
  constexpr int kFloat = (int)sizeof(float), kZeros = T::kAccumulators / 4;
  static_assert(T::kTileK % kFfmaUnroll == 0 && kFfmaUnroll % 2 == 0 && kZeros <= T::kThreads);
  __shared__ float4 zeros[kZeros];
  __shared__ __align__(8) uint64_t barriers[2 * T::kStages];
  unsigned char* const dynamic = DynamicShared<unsigned char>();
  auto* const memory = (float*)(dynamic + (-hopper::SharedAddress(dynamic) & (kFfmaAlignment - 1)));
  const uint32_t shared = hopper::SharedAddress(memory);
  const uint32_t full = hopper::SharedAddress(barriers), empty = full + 8 * T::kStages;
  const TileCoord coord = TileCoordOf(params, blockIdx.x);
  const int row0 = coord.row * T::kTileM, col0 = coord.col * T::kTileN;
  const int k0 = (int)(coord.split * params.k_slice);
  const int k_numel = (int)min(params.k_slice, params.gemm.k - k0);
  const int k_tiles = CeilDiv32(k_numel, T::kTileK);
  if (threadIdx.x < kZeros) zeros[threadIdx.x] = make_float4(0, 0, 0, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      hopper::InitBarrier(full + stage * 8, 1);
      hopper::InitBarrier(empty + stage * 8, kWarps);
    }
    hopper::PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();

  RingPosition<T::kStages> filled, at;  // what is copied next, and multiplied
  const auto copy = [&](int k_tile) {
    const uint32_t to = shared + filled.stage * kFfmaStageNumel<T> * kFloat;
    const uint32_t barrier = full + filled.stage * 8;
    const int k = k0 + k_tile * T::kTileK;
    if (k_tile >= T::kStages) hopper::WaitForPhase(empty + filled.stage * 8, filled.parity ^ 1);
    hopper::ArriveExpecting(barrier, kFfmaStageNumel<T> * kFloat);
    if (kAlongK)
      hopper::LoadBox<false>(to, &map_a, barrier, k, row0, 0);
    else
      hopper::LoadBox<false>(to, &map_a, barrier, row0, k, 0);
    hopper::LoadBox<false>(to + kFfmaPanelA<T> * kFloat, &map_b, barrier, col0, k, 0);
    filled.Advance();
  };
  const bool copies = threadIdx.x == 0;
  if (copies)
    for (int k_tile = 0; k_tile < kAhead && k_tile < k_tiles; k_tile++) copy(k_tile);

  // The warps of a column are of all four schedulers, and so are those of two rows: at C's edge,
  // warps without elements of it leave their issue slots to the others.
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int warp_col = warp / kWarpsM, warp_row = (warp + warp_col * 2) % kWarpsM;
  const bool multiplies =
      row0 + warp_row * T::kWarpM < params.gemm.m && col0 + warp_col * T::kWarpN < params.gemm.n;
  std::conditional_t<kAlongK, FfmaAccumulatorAlongK<T>, FfmaAccumulator<T>> accumulator(
      warp_row * T::kWarpM, warp_col * T::kWarpN, lane);
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) hopper::Arrive(empty + stage * 8);
  };
  if (multiplies) {  // as thread 0, which copies, always does
    hopper::WaitForPhase(full, 0);
    accumulator.Begin(zeros, memory);
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
      if (copies && k_tile + kAhead < k_tiles) copy(k_tile + kAhead);
      const int stage = at.stage, depth = min(T::kTileK, k_numel - k_tile * T::kTileK);
      at.Advance();
      if (k_tile + 1 < k_tiles) hopper::WaitForPhase(full + at.stage * 8, at.parity);
      const float* const next = memory + at.stage * kFfmaStageNumel<T>;
#pragma unroll 1
      for (int k = 0; k < depth; k += kFfmaUnroll)
        accumulator.Multiply(k + kFfmaUnroll >= depth, next);  // garbage after the last panel
      release(stage);
    }
  } else {
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; k_tile++, at.Advance()) {
      hopper::WaitForPhase(full + at.stage * 8, at.parity);
      release(at.stage);
    }
  }
  __syncthreads();
  TriggerProgrammaticLaunch();
  accumulator.Store(memory);
  __syncthreads();
  WriteTile<T>(params, coord, memory);
  if (params.splits > 1 && !params.partial)
    LeaveCluster();  // its shared memory outlives the peers' reads
#endif
}

}  // namespace cuda
}  // namespace dlsys
