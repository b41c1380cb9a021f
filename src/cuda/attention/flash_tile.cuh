// What the kernels of flash attention share: tiles in shared memory, in boxes of 64 columns with a
// swizzle of 128 bytes, their products on the tensor cores of sm_90a, and the order of tiles.
// flash_forward.cu and flash_backward.cu have the algorithms and what limits them.
#pragma once
#include <algorithm>

#include "cuda/attention/flash.cuh"
#include "cuda/runtime/hopper.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ring.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace dlsys {
namespace cuda {
namespace flash {

using namespace hopper;  // NOLINT: the instructions of sm_90a

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr int kAlignment = 1024;  // of tiles, for the swizzle
constexpr int kSharedNbytes = 227 << 10;

// A tile of rows of one head, and the tiles [begin, end) of the other side that it meets. `sample`
// numbers the heads of all samples.
struct Tile {
  int row, sample, begin, end;
};

// Heads of which each takes so many tiles, on so many blocks. Those of a band share k and v, or q
// and dy, in L2. Under a causal mask a block takes pairs of tiles, see Turns.
struct Grid {
  int tiles, samples, band, blocks;
  int rounds, rest;  // of pairs: each block takes so many, and so many are left
};

inline Grid GridOf(int64_t tiles, int64_t samples, int64_t nbytes_of_sample, int64_t group,
                   int multiprocessors) {
  constexpr int64_t kOfL2 = 24 << 20;
  const int64_t band = kOfL2 / std::max<int64_t>(nbytes_of_sample, 1) * group;
  const int64_t blocks = std::min<int64_t>(tiles * samples, multiprocessors);
  const int64_t pairs = CeilDiv(tiles, 2) * samples;
  const int64_t rounds = std::max<int64_t>(pairs / blocks - 1, 0);
  return {(int)tiles,  (int)samples, (int)std::clamp(band, std::min(group, samples), samples),
          (int)blocks, (int)rounds,  (int)(pairs - rounds * blocks)};
}

// A tile by its number within its head, and the head.
struct Position {
  int tile, sample;
};
// The position of `index` where each head has so many.
__device__ __forceinline__ Position PositionOf(const Grid& grid, int tiles, int index) {
  const int of_band = grid.band * tiles;
  const int band = index / of_band, in_band = index % of_band;
  const int width = min(grid.band, grid.samples - band * grid.band);
  return {in_band / width, band * grid.band + in_band % width};
}

// The tiles of a block, by a fixed order. All are of one length: every so-many-th. Under a causal
// mask a head's tile 0 is the longest and each of the next is shorter by as much, so that the first
// with the last, the second with the last but one and so on are pairs of one length: a block takes
// every so-many-th pair. What does not fill all blocks with pairs goes as single tiles, the longest
// first, to the blocks from first to last, back, and so on: blocks end within a few hundredths of
// each other, where every so-many-th tile would leave a tenth.
template <bool kCausal>
class Turns {
 public:
  __device__ __forceinline__ bool Next(const Grid& grid, Position& at) {
    if constexpr (kCausal) {
      return NextOfPairs(grid, at);
    } else {
      const int index = turn_++ * grid.blocks + (int)blockIdx.x;
      if (index >= grid.tiles * grid.samples) return false;
      at = PositionOf(grid, grid.tiles, index);
      return true;
    }
  }

 private:
  __device__ __forceinline__ bool NextOfPairs(const Grid& grid, Position& at) {
    const int block = (int)blockIdx.x, blocks = grid.blocks;
    while (true) {
      const int turn = turn_++, last = turn - 2 * grid.rounds;
      int pair = turn / 2 * blocks + block;
      bool shorter = turn % 2;
      if (last >= 0) {
        const int slot = last * blocks + (last % 2 ? blocks - 1 - block : block);
        if (last * blocks >= 2 * grid.rest) return false;
        if (slot >= 2 * grid.rest) continue;
        shorter = slot >= grid.rest;
        pair = grid.rounds * blocks + (shorter ? 2 * grid.rest - 1 - slot : slot);
      }
      at = PositionOf(grid, (grid.tiles + 1) / 2, pair);
      const int other = grid.tiles - 1 - at.tile;
      if (shorter && other == at.tile) continue;  // the middle one is no pair
      if (shorter) at.tile = other;
      return true;
    }
  }

  int turn_ = 0;
};

// What all kernels know of a problem.
struct Shape {
  int rows, columns, heads, group;  // `group` heads of q share one of k and v
  Grid grid;

  // Heads of k and v of a sample.
  __device__ __forceinline__ int KvHeads() const { return heads / group; }
};

// The tiles of rows of a block. The last rows of a head come first, since under a causal mask they
// see most.
template <class T, bool kCausal>
class RowTiles {
 public:
  __device__ __forceinline__ explicit RowTiles(const Shape& shape) : shape_(shape) {}

  __device__ __forceinline__ bool Next(Tile& tile) {
    Position at;
    if (!turns_.Next(shape_.grid, at)) return false;
    const int row = (shape_.grid.tiles - 1 - at.tile) * T::kRows;
    const int seen = kCausal ? min(shape_.columns, row + T::kRows) : shape_.columns;
    tile = {row, at.sample, 0, (seen + T::kKeys - 1) / T::kKeys};
    return true;
  }

 private:
  const Shape& shape_;
  Turns<kCausal> turns_;
};

// Pairs of barriers, full and empty: of a tile, or of a stage of a ring.
__device__ __forceinline__ uint32_t Full(uint32_t barriers, int pair) {
  return barriers + pair * 16;
}
__device__ __forceinline__ uint32_t Empty(uint32_t barriers, int pair) {
  return barriers + pair * 16 + 8;
}
__device__ __forceinline__ void InitBarriers(uint32_t barriers, int pairs, int consumers) {
  for (int pair = 0; pair < pairs; pair++) {
    InitBarrier(Full(barriers, pair), 1);
    InitBarrier(Empty(barriers, pair), consumers * 4);
  }
  PublishBarriers();
}

// The number of this thread's warpgroup, known to be the same for all of a warp.
__device__ __forceinline__ int Warpgroup() {
  return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
}

// A consumer waits for a stage, and gives it back: a thread of each warp does for all.
template <int kStages>
__device__ __forceinline__ void WaitForStage(uint32_t barriers, int pair,
                                             const RingPosition<kStages>& at) {
  WaitForPhase(Full(barriers, pair + at.stage), at.parity);
}
__device__ __forceinline__ void ReleaseStage(uint32_t barriers, int pair, int stage) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ArriveAt(Empty(barriers, pair + stage), 0);
}

// Begins to copy a tile, all of it within one row of boxes. `sample` is of `heads` a batch.
template <int kRows, int kSize>
__device__ __forceinline__ void LoadTile(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int row, int sample, int heads) {
#pragma unroll
  for (int box = 0; box < kSize / 64; box++)
    LoadBox(to + box * kRows * 128, map, barrier, box * 64, row, sample % heads, sample / heads);
}

// Accumulators of 64 rows of a product, by eight columns, and as an operand of the next product.
template <int kColumns>
using Sums = float[kColumns / 8][4];
template <int kColumns>
using Operand = uint32_t[kColumns / 16][4];

// Begins d = a bᵀ over rows of kSize elements. `a` is where 64 rows begin of a tile of kRowsA.
template <class E, int kSize, int kRowsA, int kColumns>
__device__ __forceinline__ void BeginProduct(float (&d)[kColumns][4], uint32_t a, uint32_t b) {
  const uint64_t of_a = Descriptor(a, 16, 1024), of_b = Descriptor(b, 16, 1024);
#pragma unroll
  for (int step = 0; step < kSize / 16; step++) {
    const int box = step / 4, in_box = step % 4 * 32;
    MultiplyAdd<E, false, false>(d, Advanced(of_a, box * kRowsA * 128 + in_box),
                                 Advanced(of_b, box * kColumns * 8 * 128 + in_box), step > 0);
  }
  CloseProducts();
}

// Begins d += a b, b a tile of as many rows as a has columns.
template <class E, int kSteps, int kColumns>
__device__ __forceinline__ void BeginProduct(float (&d)[kColumns][4],
                                             const uint32_t (&a)[kSteps][4], uint32_t b) {
  const uint64_t of_b = Descriptor(b, kSteps * 16 * 128, 1024);
#pragma unroll
  for (int step = 0; step < kSteps; step++)
    MultiplyAdd<E, true>(d, a[step], Advanced(of_b, step * 2048), true);
  CloseProducts();
}

template <int kColumns>
__device__ __forceinline__ void SetZero(float (&d)[kColumns][4]) {
#pragma unroll
  for (int j = 0; j < kColumns; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
}

// Writes `hidden` at the keys behind the last one and, under a causal mask, at those behind a row.
// `row` and `column` are of the thread's first score.
template <bool kCausal, int kColumns>
__device__ __forceinline__ void Hide(float (&scores)[kColumns][4], int row, int column, int columns,
                                     float hidden) {
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int at = column + j * 8 + e % 2;
      if (at >= columns || (kCausal && at > row + e / 2 * 8)) scores[j][e] = hidden;
    }
  }
}

// Accumulators of a product are laid out as two operands of the next one, side by side.
template <class E, int kSteps>
__device__ __forceinline__ void Round(const float (&d)[kSteps * 2][4], uint32_t (&to)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const float (&x)[4] = d[step * 2 + part / 2];
      to[step][part] = Packed<E>(x[part % 2 * 2], x[part % 2 * 2 + 1]);
    }
  }
}

// Stores a warpgroup's 64 rows by way of shared memory; rows behind the last one are not written.
// `number` is of the warpgroup's barrier.
template <class E, int kColumns>
__device__ __forceinline__ void StoreRows(const float (&d)[kColumns][4], const CUtensorMap* map,
                                          uint32_t staging, int row, int sample, int heads,
                                          int number) {
  const int thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const int r = thread / 32 * 16 + l % 16;  // of the row whose address this lane gives
  if (thread == 0) WaitForStoresReads();
  SyncThreads(number, 128);
#pragma unroll
  for (int j = 0; j < kColumns; j += 2) {
    const float (&x)[4] = d[j], (&y)[4] = d[j + 1];
    const int chunk = j + l / 16;
    StoreMatrices(staging + chunk / 8 * 64 * 128 + r * 128 + ((chunk % 8 ^ r % 8) * 16),
                  {Packed<E>(x[0], x[1]), Packed<E>(x[2], x[3]), Packed<E>(y[0], y[1]),
                   Packed<E>(y[2], y[3])});
  }
  LetBulkFollow();
  SyncThreads(number, 128);
  if (thread == 0) {
#pragma unroll
    for (int box = 0; box < kColumns / 8; box++)
      StoreBox(map, staging + box * 64 * 128, box * 64, row, sample % heads, sample / heads);
    CloseStores();
  }
}

// Maps of arrays of rows and of keys, in boxes of `rows` positions of a head.
template <class E>
CUtensorMap MapOfRows(const char* op, const FlashProblem& p, const AttentionLayout& layout,
                      const void* data, int rows) {
  return HeadMap(op, kDtype<E>, data, {p.size, p.rows, p.heads, p.batch},
                 {layout.position, layout.head, layout.batch}, rows);
}
template <class E>
CUtensorMap MapOfKeys(const char* op, const FlashProblem& p, const AttentionLayout& layout,
                      const void* data, int rows) {
  return HeadMap(op, kDtype<E>, data, {p.size, p.columns, p.kv_heads, p.batch},
                 {layout.position, layout.head, layout.batch}, rows);
}

}  // namespace flash
}  // namespace cuda
}  // namespace dlsys
