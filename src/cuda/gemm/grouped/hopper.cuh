// Grouped products by wgmma and TMA, for sm_90a: the tiles and panels of hopper/kernel.cuh, whose
// persistent blocks walk over the tiles of all groups as the sizes on the device say. Two consumers
// take tiles in turn (ping-pong), so that one stores while the other multiplies.
//
// A box of A may reach into the rows of the next group, which makes rows of the tile that are not
// stored. A contraction must not: the consumer clears what panels have of other groups, in both
// operands, for infinities there would not vanish against zeros. Rows of C leave by way of shared
// memory in accesses of 16 bytes, as many as the group has. Tensor cores limit large groups,
// reading B those of few rows.
#pragma once
#include "cuda/gemm/grouped/grouped.cuh"
#include "cuda/gemm/hopper/boxes.cuh"
#include "cuda/gemm/hopper/multiply.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

using GroupedTiling = Tiling<2, 128, true, 1, 5, 128>;

struct GroupedParams {
  Grouped of;
  bool aligned;  // rows of C are at multiples of 16 bytes
};

// A tile: of which group, its first row and column there, and its panels along K, of which the
// first begins at `k`.
struct GroupedTile {
  int group, begin, end, row, col, panels, k;
};

// The tiles of a block. What is summed over begins at the rows of the group in a contraction, and
// where it lies along K at a panel of the array: TMA faults where a box begins at no multiple of 16
// bytes, and reads two lines for one where it begins within a line.
template <class E, bool kContracts, bool kAcross>
class GroupedTiles {
 public:
  __device__ __forceinline__ explicit GroupedTiles(const Grouped& of)
      : tiles_(of.sizes, of.shape, GroupedTiling::kTileM, GroupedTiling::kTileN),
        k_((int)of.shape.k),
        next_(blockIdx.x) {}

  __device__ __forceinline__ bool Next(GroupedTile& tile) {
    if (!tiles_.GoTo(next_)) return false;
    next_ += gridDim.x;
    constexpr int kTileK = 128 / (int)sizeof(E), kUnit = kAcross ? 1 : kTileK;
    const int begin = (int)tiles_.begin(), end = (int)tiles_.end();
    const int k = kContracts ? begin / kUnit * kUnit : 0;
    const int k_end = kContracts ? (begin < end ? end : k) : tiles_.IsRest() ? 0 : k_;
    tile = {(int)tiles_.group(),
            begin,
            end,
            tiles_.row() * GroupedTiling::kTileM,
            tiles_.col() * GroupedTiling::kTileN,
            CeilDiv32(k_end - k, kTileK),
            k};
    return true;
  }

 private:
  GroupTiles tiles_;
  const int k_;
  int64_t next_;
};

template <class E, bool kContracts, bool kAcrossA, bool kAcrossB>
__device__ __forceinline__ void ProduceGroups(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                              const Grouped& of, uint32_t memory, uint32_t full,
                                              uint32_t empty) {
  using T = GroupedTiling;
  constexpr int kTileK = 128 / (int)sizeof(E);
  RingPosition<T::kStages> at;
  GroupedTiles<E, kContracts, kAcrossA> tiles(of);
  for (GroupedTile tile; tiles.Next(tile);) {
    const int first_row = kContracts ? tile.row : tile.begin + tile.row;
    int k = tile.k;
    for (int panel = 0; panel < tile.panels; panel++, k += kTileK, at.Advance()) {
      const uint32_t a = memory + at.stage * T::kStageNbytes, barrier = full + at.stage * 8;
      WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      ArriveExpecting(barrier, T::kCopiedNbytes);
      LoadPanel<E, kAcrossA, false, T::kTileM>(a, map_a, barrier, first_row, k, 0);
      LoadPanel<E, kAcrossB, false, T::kTileN>(a + T::kPanelA, map_b, barrier, tile.col, k,
                                               kContracts ? 0 : tile.group);
    }
  }
}

// Clears what a panel of 128 rows has before `begin` and from `end` on along K, as a consumer. What
// lies across begins at its group.
template <class E, bool kAcross>
__device__ __forceinline__ void ClearOutside(unsigned char* panel, int begin, int end) {
  constexpr int kTileK = 128 / (int)sizeof(E), kRows = 128, kOfChunk = 16 / (int)sizeof(E);
  const int thread = threadIdx.x % 128;
  if constexpr (kAcross) {
    constexpr int kChunks = kRows / kOfChunk;  // of all boxes, of one of K
    for (int i = end * kChunks + thread; i < kTileK * kChunks; i += 128) {
      const int box = i % kChunks / 8, line = i / kChunks;
      *(float4*)(panel + (box * kTileK + line) * 128 + i % 8 * 16) = make_float4(0, 0, 0, 0);
    }
  } else {
    for (int k = 0; k < kTileK; k++)
      if (k < begin || k >= end)
        *(E*)(panel + thread * 128 + (k / kOfChunk ^ thread % 8) * 16 + k % kOfChunk * sizeof(E)) =
            E(0.f);
  }
}

// Adds the products of `count` panels, first into zeros, as MultiplyPanels does. With kMasks they
// count from `begin` to `end` along K alone.
template <class E, bool kAcrossA, bool kAcrossB, bool kMasks, class Release, class Issued>
__device__ __forceinline__ void MultiplyGroup(Accumulators<GroupedTiling>& d, int count, int begin,
                                              int end, unsigned char* shared, uint32_t full,
                                              RingPosition<GroupedTiling::kStages>& at,
                                              Release&& release, Issued&& issued) {
  using T = GroupedTiling;
  constexpr int kTileK = 128 / (int)sizeof(E), kAcross = kTileK * T::kRowNbytes;
  int previous = 0;
  for (int panel = 0; panel < count; panel++, at.Advance()) {
    unsigned char* const stage = shared + at.stage * T::kStageNbytes;
    const uint32_t a = SharedAddress(stage), b = a + T::kPanelA;
    WaitForPhase(full + at.stage * 8, at.parity);
    const int from = begin - panel * kTileK, to = end - panel * kTileK;
    if (kMasks && (from > 0 || to < kTileK)) {
      ClearOutside<E, kAcrossA>(stage, from, to);
      ClearOutside<E, kAcrossB>(stage + T::kPanelA, from, to);
      LetBulkFollow();  // wgmma reads by way of the same proxy
      SyncThreads(1 + threadIdx.x / 128, 128);
    }
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 bytes of K, or 16 rows of it
      const uint64_t of_b =
          kAcrossB ? Descriptor(b + k * 2048, kAcross, 1024) : Descriptor(b + k * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++) {
        const uint32_t rows = a + i * 64 * T::kRowNbytes;
        const uint64_t of_a = kAcrossA ? Descriptor(rows + k * 2048, kAcross, 1024)
                                       : Descriptor(rows + k * 32, 16, 1024);
        MultiplyAdd<E, kAcrossA, kAcrossB>(d[i], of_a, of_b, panel + k > 0);
      }
    }
    CloseProducts();
    WaitForProducts<1>();
    if (panel > 0) release(previous);
    previous = at.stage;
  }
  issued();
  WaitForProducts<0>();
  if (count > 0) release(previous);
}

// Stores a tile of C, whose first element is at `c`: of its rows and columns so many exist. Those
// of 16 bits go through `staging`, 32 rows of 256 bytes of the warp's own.
template <class E>
__device__ __forceinline__ void StoreRows(const Accumulators<GroupedTiling>& d, E* c, int rows,
                                          int cols, int64_t pitch, bool aligned,
                                          unsigned char* staging) {
  using T = GroupedTiling;
  const int lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16;
  if constexpr (sizeof(E) == 4) {
#pragma unroll
    for (int q = 0; q < 2 * T::kWarpgroupM; q++) {
      const int row = q / 2 * 64 + first_row + q % 2 * 8 + lane / 4;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < T::kBlocks; j++) {
        const int col = j * 8 + lane % 4 * 2;
        WritePair<E>(c + row * pitch + col, aligned, cols - col,
                     make_float2(d[q / 2][j][q % 2 * 2], d[q / 2][j][q % 2 * 2 + 1]));
      }
    }
  } else {
    const auto place = [&](int row, int chunk) { return row * 256 + (chunk ^ row % 8) * 16; };
    const uint32_t to = SharedAddress(staging);
#pragma unroll
    for (int i = 0; i < T::kWarpgroupM; i++) {
      const int row = i * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int j = 0; j < T::kBlocks; j += 2)
        StoreMatrices(
            to + place(row, j + lane / 16),
            {Packed<E>(d[i][j][0], d[i][j][1]), Packed<E>(d[i][j][2], d[i][j][3]),
             Packed<E>(d[i][j + 1][0], d[i][j + 1][1]), Packed<E>(d[i][j + 1][2], d[i][j + 1][3])});
    }
    __syncwarp();
    const int chunk = lane % 16, valid = cols - chunk * 8;
#pragma unroll 4
    for (int line = lane / 16; line < T::kWarpgroupM * 16; line += 2) {
      const int row = line / 16 * 64 + first_row + line % 16;
      if (row >= rows || valid <= 0) continue;
      const E* const from = (const E*)(staging + place(line, chunk));
      E* const at = c + row * pitch + chunk * 8;
      if (aligned)
        *(float4*)at = *(const float4*)from;
      else
        for (int e = 0; e < min(valid, 8); e++) at[e] = from[e];
    }
    __syncwarp();  // before the next tile is staged
  }
}

template <class E, bool kContracts, bool kAcrossA, bool kAcrossB>
__device__ __forceinline__ void ConsumeGroups(const GroupedParams& params, unsigned char* shared,
                                              uint32_t full, uint32_t empty) {
  using T = GroupedTiling;
  constexpr int kTurn = 1 + T::kConsumers;
  const GroupedShape& shape = params.of.shape;
  const int consumer = threadIdx.x / 128;
  unsigned char* const staging =
      shared + T::kStages * T::kStageNbytes + threadIdx.x / 32 * (T::kStagingNbytes / 4);
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 == 0) Arrive(empty + stage * 8);
  };
  GroupedTiles<E, kContracts, kAcrossA> tiles(params.of);
  GroupedTile tile, next;
  bool more = tiles.Next(next);
  if (more && consumer == 1) ArriveThreads(kTurn, 256);
  Accumulators<T> d;
  RingPosition<T::kStages> at;
  for (int turn = 0; more; turn++) {
    tile = next;
    more = tiles.Next(next);
    if (turn % 2 != consumer) {
      at.Advance(tile.panels);
      continue;
    }
    SyncThreads(kTurn + consumer, 256);
    if (tile.panels == 0) {
#pragma unroll
      for (int q = 0; q < 4 * T::kQuads; q++) d[q / 4 / T::kBlocks][q / 4 % T::kBlocks][q % 4] = 0;
    }
    MultiplyGroup<E, kAcrossA, kAcrossB, kContracts>(
        d, tile.panels, tile.begin - tile.k, tile.end - tile.k, shared, full, at, release, [&] {
          if (more) ArriveThreads(kTurn + 1 - consumer, 256);
        });
    const int64_t row = kContracts ? tile.group * shape.k + tile.row : tile.begin + tile.row;
    const int rows = kContracts ? (int)shape.k - tile.row : tile.end - tile.begin - tile.row;
    StoreRows<E>(d, (E*)params.of.c + row * shape.n + tile.col, rows, (int)shape.n - tile.col,
                 shape.n, params.aligned, staging);
  }
}

template <class E, bool kContracts, bool kAcrossA, bool kAcrossB>
__global__ __launch_bounds__(GroupedTiling::kThreads,
                             1) void GroupedKernel(const __grid_constant__ CUtensorMap map_a,
                                                   const __grid_constant__ CUtensorMap map_b,
                                                   const GroupedParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = GroupedTiling;
  __shared__ __align__(8) uint64_t barriers[2 * T::kStages];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (T::kAlignment - 1);
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * T::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      InitBarrier(full + stage * 8, 1);
      InitBarrier(empty + stage * 8, 1);
    }
    PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<40>();
    const int thread = threadIdx.x % 128;
    if (thread == 0)
      ProduceGroups<E, kContracts, kAcrossA, kAcrossB>(&map_a, &map_b, params.of,
                                                       SharedAddress(shared), full, empty);
    if (thread == 32 && blockIdx.x == 0) TellOfSizes(params.of);
  } else {
    RaiseRegisters<232>();
    ConsumeGroups<E, kContracts, kAcrossA, kAcrossB>(params, shared, full, empty);
  }
  TriggerProgrammaticLaunch();
#endif
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
