// GEMM in true float32 by FFMA, fed by TMA, for large products on sm_90a; ffma.cu launches it,
// kernel.cuh has the parameters, split-K and the way out to C.
//
// One block a multiprocessor computes 256 x 128 of C: eight warps of 64 x 64, whose threads hold
// 16 x 8 sums. One thread copies panels by TMA into a ring of stages in shared memory; a warp waits
// for a panel's mbarrier, multiplies, and arrives at another, so that warps need not meet. Both
// operands lie (k, mn), others are transposed before, so that a thread's rows and columns at one k
// are quads, read for the next k without bank conflicts while this one's are multiplied. Sums go
// over k in ascending order.
//
// Limited by the issue of FFMA: of about 139 instructions for each k, 128 are multiply-adds. An
// FFMA takes two cycles where its operands come from one register bank, for which reason the
// products of a column of sums go down and those of the next one up, so that a column's operand is
// kept for all of its rows. The loop over k is unrolled by eight alone, since that of sixteen is 35
// KB of instructions, and panels are deep, since each costs a warp its wait: together this took 6 %
// off. Measured on an H200, a k takes 168 ns, where its instructions alone would take 141.
#pragma once
#include "cuda/gemm/kernel.cuh"
#include "cuda/runtime/hopper.cuh"
#include "cuda/runtime/ring.cuh"

namespace dlsys {
namespace cuda {

using FfmaTiling = LargeTiling<256, 128, 16, 8, 32, 4, 1>;
constexpr int kFfmaUnroll = 8;  // of k, an even divisor of a panel's
static_assert(FfmaTiling::kTileK % kFfmaUnroll == 0 && kFfmaUnroll % 2 == 0);

constexpr int kFfmaPanelA = FfmaTiling::kTileM * FfmaTiling::kTileK;
constexpr int kFfmaStageNumel = kFfmaPanelA + FfmaTiling::kTileN * FfmaTiling::kTileK;
constexpr int kFfmaPanels = FfmaTiling::kStages * kFfmaStageNumel;
constexpr int kFfmaAlignment = 128;  // of what TMA writes
// Panels, over which a tile of C lies at the end.
constexpr size_t kFfmaNbytes =
    (kFfmaPanels > FfmaTiling::kTileNumel ? kFfmaPanels : FfmaTiling::kTileNumel) * sizeof(float) +
    kFfmaAlignment;

// A thread's sums, and its operands at this k and at the next. Adjacent lanes share a column, lanes
// two apart a row: shared memory broadcasts to them.
template <class T>
class FfmaAccumulator {
 public:
  __device__ FfmaAccumulator(int row, int col, int lane)
      : row_(row + 4 * (lane % 2 + lane / (2 * T::kLanesN) * 2)),
        col_(col + 4 * (lane / 2 % T::kLanesN)) {}

  // Goes on at k of a panel.
  __device__ __forceinline__ void MoveTo(const float* panel, int k) {
    from_a_ = panel + k * T::kTileM + row_;
    from_b_ = panel + kFfmaPanelA + k * T::kTileN + col_;
  }

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
  const int row_, col_;
  const float *from_a_, *from_b_;
  float a_[2][T::kThreadM], b_[2][T::kThreadN];
  float sums_[T::kThreadM][T::kThreadN] = {};
};

template <class T>
__global__ __launch_bounds__(T::kThreads,
                             1) void FfmaKernel(const __grid_constant__ CUtensorMap map_a,
                                                const __grid_constant__ CUtensorMap map_b,
                                                const GemmParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kAhead = T::kStages - 2;  // panels in flight; warps may be one panel apart
  constexpr int kWarpsM = T::kTileM / T::kWarpM, kWarps = T::kThreads / 32;
  constexpr int kFloat = (int)sizeof(float);
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
    const uint32_t to = shared + filled.stage * kFfmaStageNumel * kFloat;
    const uint32_t barrier = full + filled.stage * 8;
    const int k = k0 + k_tile * T::kTileK;
    if (k_tile >= T::kStages) hopper::WaitForPhase(empty + filled.stage * 8, filled.parity ^ 1);
    hopper::ArriveExpecting(barrier, kFfmaStageNumel * kFloat);
    hopper::LoadBox<false>(to, &map_a, barrier, row0, k, 0);
    hopper::LoadBox<false>(to + kFfmaPanelA * kFloat, &map_b, barrier, col0, k, 0);
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
  FfmaAccumulator<T> accumulator(warp_row * T::kWarpM, warp_col * T::kWarpN, lane);
  hopper::WaitForPhase(full, 0);
  accumulator.MoveTo(memory, 0);
  accumulator.Read(0);
#pragma unroll 1
  for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
    if (copies && k_tile + kAhead < k_tiles) copy(k_tile + kAhead);
    const int stage = at.stage, depth = min(T::kTileK, k_numel - k_tile * T::kTileK);
    const float* const panel = memory + stage * kFfmaStageNumel;
    at.Advance();
#pragma unroll 1
    for (int k0_of_part = 0; k0_of_part < depth; k0_of_part += kFfmaUnroll) {
      const int next = k0_of_part + kFfmaUnroll;
      if (multiplies) {
#pragma unroll
        for (int k = 0; k < kFfmaUnroll - 1; k++) {
          accumulator.Read(k + 1);
          accumulator.Add(k);
        }
      }
      if (next < depth) {
        accumulator.MoveTo(panel, next);
      } else {  // what is read after the last panel is garbage
        if (k_tile + 1 < k_tiles) hopper::WaitForPhase(full + at.stage * 8, at.parity);
        accumulator.MoveTo(memory + at.stage * kFfmaStageNumel, 0);
      }
      if (multiplies) {
        accumulator.Read(0);
        accumulator.Add(kFfmaUnroll - 1);
      }
    }
    __syncwarp();
    if (lane == 0) hopper::Arrive(empty + stage * 8);
  }
  __syncthreads();
  TriggerProgrammaticLaunch();
  accumulator.Store(memory);
  __syncthreads();
  WriteTile<T>(params, coord, memory);
  if (params.splits > 1) LeaveCluster();  // its shared memory outlives the peers' reads
#endif
}

}  // namespace cuda
}  // namespace dlsys
