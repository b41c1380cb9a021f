// GEMM in true float32 by FFMA, fed by TMA, for large products on sm_90a; ffma.cu launches it and
// says how tiles are shared, kernel.cuh has the parameters.
//
// A warp computes 64 x 64 of C, a thread 16 x 8 sums; a block 256 x 128, alone on a multiprocessor,
// or 128 x 128, as one of two. TMA copies panels into a ring of stages in shared memory; a warp
// waits for the next panel's mbarrier before it multiplies this one, so that its loop has no
// branch, and arrives at another behind it. Operands lie (k, mn), so that a thread's rows and
// columns at one k are quads. Blocks are persistent, and share what would not fill a wave
// (FfmaShares). Of a block of 256 x 128, a warpgroup of its own copies; it also packs operands that
// lie along K ahead of the products (FfmaPacking), or transposes their panels. Sums go over k in
// ascending order within a block, then over blocks.
//
// Limited by the issue of FFMA: 128 of 135 instructions for each k are multiply-adds, and each of
// the six loads takes some three cycles from them, since it writes four registers: 86 % of FFMA's
// rate at most, of which the loop reaches 82 to 84 (FfmaAccumulator).
#pragma once
#include <algorithm>

#include "cuda/gemm/kernel.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"

namespace dlsys {
namespace cuda {

// In the order of their costs in ffma.cu.
using FfmaTilings =
    std::tuple<LargeTiling<128, 128, 16, 8, 32, 3, 2>, LargeTiling<256, 128, 16, 8, 32, 4, 1>>;
constexpr int kFfmaUnroll = 8;  // of k, an even divisor of a panel's
template <class T>
constexpr int kFfmaSteps = T::kTileK / kFfmaUnroll;  // of a panel
constexpr int kFfmaAlignment = 1024;                 // of what TMA writes in its swizzle

template <class T>
constexpr int kFfmaPanelA = T::kTileM * T::kTileK;
template <class T>
constexpr int kFfmaStageNumel = kFfmaPanelA<T> + T::kTileN * T::kTileK;
// Of a warp, through which its sums leave: two rows of each lane.
template <class T>
constexpr int kFfmaStaging = 2 * T::kLanesM * T::kWarpN;

// Shared memory and threads of a block: a ring of stages, what warps store through, and the next
// panels of operands that lie along K. Registers are by thread, of 168 that each begins with; with
// fewer, warps that multiply would load too late.
template <class T, bool kAlongA, bool kAlongB>
struct FfmaMemory {
  static constexpr bool kTransposes = kAlongA || kAlongB, kProduces = T::kResident == 1;
  static constexpr int kStages = T::kStages - kTransposes;
  static_assert(kProduces || !kTransposes);
  static constexpr int kStagingAt = kStages * kFfmaStageNumel<T>;
  static constexpr int kRawAt = kStagingAt + T::kThreads / 32 * kFfmaStaging<T>;
  static constexpr int kRawOfA = kAlongA ? kFfmaPanelA<T> : 0;
  static constexpr int kRaw = kRawOfA + (kAlongB ? T::kTileN * T::kTileK : 0);
  static constexpr size_t kNbytes = (kRawAt + kRaw) * sizeof(float) + kFfmaAlignment;
  static constexpr int kThreads = T::kThreads + (kProduces ? 128 : 0);
  static constexpr int kRegisters = kTransposes ? 216 : 224;
  static constexpr int kProducerRegisters = kTransposes ? 72 : 56;
};

// The row and column of a lane among those of its warp. Adjacent lanes share a column, lanes two
// apart a row: shared memory broadcasts to them.
template <class T>
__device__ __forceinline__ int LaneRow(int lane) {
  return lane % 2 + lane / (2 * T::kLanesN) * 2;
}
template <class T>
__device__ __forceinline__ int LaneCol(int lane) {
  return lane / 2 % T::kLanesN;
}

// A thread's sums, and its operands at this k and at the next. An FFMA that reads three registers
// takes two cycles, and some more time where it reads two of one bank, the even or the odd ones. So
// the products of a column of sums go down and those of the next one up, such that a column's
// operand is kept for all of its rows, and a sum is in the other bank than its row's operand
// (Begin). A load has to stand 40 instructions before its use, and apart from other loads, which
// the order of Read and Add and enough registers make the compiler do: the loop is otherwise 4 %
// slower. It is unrolled by eight of k, for instructions of 16 do not fit the cache, and panels are
// deep, since each costs a warp its wait.
template <class T>
class FfmaAccumulator {
 public:
  __device__ FfmaAccumulator(int row, int col, int lane)
      : row_(row + 4 * LaneRow<T>(lane)), col_(col + 4 * LaneCol<T>(lane)) {}

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

  // Stores the sums as a part of a tile, in the quads of a column that Begin made.
  __device__ __forceinline__ void StorePart(float4* part) const {
#pragma unroll
    for (int j = 0; j < T::kThreadN; j++)
#pragma unroll
      for (int i = 0; i < T::kThreadM; i += 4)
        part[(j * T::kThreadM / 4 + i / 4) * T::kThreads + threadIdx.x] =
            make_float4(sums_[i + 1][j], sums_[i][j], sums_[i + 3][j], sums_[i + 2][j]);
  }

  // Stores the sums to C, from `c` on, of which `rows` by `cols` exist, in rows of aligned quads. A
  // `zero` that only run time knows is added: quads that lie in registers of one row would meet the
  // operands' banks in the loop.
  __device__ __forceinline__ void StoreAligned(float* c, int64_t n, int rows, int cols,
                                               float zero) const {
    const int row0 = row_ % T::kWarpM, col0 = col_ % T::kWarpN;
#pragma unroll
    for (int i = 0; i < T::kThreadM; i++) {
      const int row = row0 + i / 4 * 4 * T::kLanesM + i % 4;
      if (row >= rows) break;
#pragma unroll
      for (int j = 0; j < T::kThreadN; j += 4) {
        const int col = col0 + j * T::kLanesN;
        if (col < cols)
          *(float4*)(c + row * n + col) =
              make_float4(sums_[i][j] + zero, sums_[i][j + 1] + zero, sums_[i][j + 2] + zero,
                          sums_[i][j + 3] + zero);
      }
    }
  }

  // Calls f(row, col, quad) for the quads of the warp's sums, by way of `staging`. They are stored
  // there one by one: as quads they would have to lie in registers of one row, whose banks then
  // meet those of the operands.
  template <class F>
  __device__ __forceinline__ void ForQuads(volatile float* staging, F&& f) const {
    constexpr int kInRow = T::kWarpN / 4;
    const int lane_row = row_ % T::kWarpM / 4, lane_col = col_ % T::kWarpN;
#pragma unroll
    for (int first = 0; first < T::kThreadM; first += 2) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < T::kThreadN; j++)
          staging[(lane_row * 2 + i) * T::kWarpN + lane_col + j / 4 * 4 * T::kLanesN + j % 4] =
              sums_[first + i][j];
      __syncwarp();
#pragma unroll 1
      for (int q = (int)threadIdx.x % 32; q < kFfmaStaging<T> / 4; q += 32) {
        const int row = q / kInRow;  // staged
        f((first / 4 * T::kLanesM + row / 2) * 4 + first % 4 + row % 2, q % kInRow * 4,
          *(const float4*)((float*)staging + q * 4));
      }
      __syncwarp();
    }
  }

 private:
  // Reads the operands k further on; the parity of k says which they replace. Their order decides
  // where the compiler puts loads: with that of their use the large tile is 0.3 % faster.
  __device__ __forceinline__ void Read(int k) {
    ReadQuads<T::kLanesN>(from_b_ + k * T::kTileN, b_[k % 2]);
    const float* const a = from_a_ + k * T::kTileM;
#pragma unroll
    for (int q = 0; q < T::kThreadM; q += 4) {
      const int i = T::kResident == 1 ? T::kThreadM - 4 - q : q;
      const float4 v = *(const float4*)(a + i * T::kLanesM);
      float (&x)[T::kThreadM] = a_[k % 2];
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  }

  // Adds the products of operands that were read, from the last column to the first.
  __device__ __forceinline__ void Add(int k) {
#pragma unroll
    for (int j = T::kThreadN - 1; j >= 0; j--)
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

// The first row and column of a warp in its tile. The warps of a column are of all four schedulers,
// and so are those of two rows: at C's edge, warps without elements of it leave their issue slots
// to the others.
struct WarpOrigin {
  int row, col;
};
template <class T>
__device__ __forceinline__ WarpOrigin FfmaWarpOrigin(int warp) {
  constexpr int kWarpsM = T::kTileM / T::kWarpM;
  const int col = warp / kWarpsM, row = (warp + col * 2) % kWarpsM;
  return {row * T::kWarpM, col * T::kWarpN};
}

// The time of a panel of a full tile and of a half one, of which C has at most half the rows or
// half the columns: each scheduler then has one warp to issue instead of two. Measured on an H200:
// 0.53.
constexpr int kFfmaFull = 17, kFfmaHalf = 9;

// How a product is shared among the blocks that run together. Tiles that fill a wave of blocks come
// first, full ones and then half ones, and the blocks take them in turn. The tiles that are left
// lie one behind the other along K, cut into shares of equal time (stream-K) at any step of
// kFfmaUnroll of k. A tile that a block finishes goes to C; of others, blocks write their parts of
// the sums, which FfmaSumKernel adds in the order of K.
struct FfmaShares {
  int rows, cols;  // of C that tiles compute; the others are strips (slim.cu)
  int steps;       // along K
  int whole_full, whole_half, split_full, split_half;  // tiles
  int half_in_row;                                     // half tiles that are of the last row
  int blocks;
  int sharers, share, longer;  // blocks with a share, its time, and how many are longer by one
  bool plain;                  // there is no epilogue, and rows of C are of aligned quads
  float4* parts;

  __host__ __device__ int Whole() const { return whole_full + whole_half; }
  __host__ __device__ int Split() const { return split_full + split_half; }
  // The time of the first `count` steps of those that are shared.
  __host__ __device__ int TimeOf(int count) const {
    const int full = min(count, split_full * steps);
    return full * kFfmaFull + (count - full) * kFfmaHalf;
  }
  __host__ __device__ int BeginOf(int block) const {
    const int full = split_full * steps, at = share * min(block, sharers) + min(block, longer);
    return at < full * kFfmaFull ? at / kFfmaFull : full + (at - full * kFfmaFull) / kFfmaHalf;
  }
  // The block that multiplies a step of those that are shared.
  __host__ __device__ int BlockAt(int step) const {
    const int last = TimeOf(step + 1) - 1, of_longer = longer * (share + 1);
    return last < of_longer ? last / (share + 1) : longer + (last - of_longer) / share;
  }
};

// Where a tile lies: full ones in the order of TileCoordOf, half ones in C's last row, then in its
// last column.
__device__ __forceinline__ TileCoord FfmaTileCoord(const GemmParams& params,
                                                   const FfmaShares& shares, int tile) {
  const int split = tile - shares.Whole();
  const int of_full = split < 0 ? tile : shares.whole_full + split;
  const int of_half =
      split < 0 ? tile - shares.whole_full : shares.whole_half + split - shares.split_full;
  const bool full = split < 0 ? tile < shares.whole_full : split < shares.split_full;
  if (full) return TileCoordOf(params, of_full);
  if (of_half < shares.half_in_row) return {params.row_tiles, of_half, 0};
  return {of_half - shares.half_in_row, params.col_tiles, 0};
}

// Transposes a panel of kRows rows of 128 bytes, their quads exchanged, as a warpgroup: a thread
// takes four rows at four k at a time, so that neither reads nor stores meet in a bank.
template <int kRows>
__device__ __forceinline__ void TransposePanel(const float* raw, float* panel) {
  constexpr int kRow = 32, kQuads = kRow / 4, kOfWarp = 32 * 4;  // rows
  static_assert(kRows % kOfWarp == 0);
  const int lane = (int)threadIdx.x % 32, eighth = lane % 8;
  const int quad0 = (eighth / 2 + (int)threadIdx.x % 128 / 32) % kQuads;
#pragma unroll
  for (int at = 0; at < kRows / kOfWarp * 2; at++) {
    const int row = at / 2 * kOfWarp + lane * 4, quad = quad0 ^ at % 2 * 4;
    const float* const from = raw + row * kRow;
    float4 v[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
      v[e] = *(const float4*)(from + e * kRow + (quad ^ eighth % 2 * 4 ^ e) * 4);
    float* const to = panel + quad * 4 * kRows + row;
    *(float4*)to = make_float4(v[0].x, v[1].x, v[2].x, v[3].x);
    *(float4*)(to + kRows) = make_float4(v[0].y, v[1].y, v[2].y, v[3].y);
    *(float4*)(to + 2 * kRows) = make_float4(v[0].z, v[1].z, v[2].z, v[3].z);
    *(float4*)(to + 3 * kRows) = make_float4(v[0].w, v[1].w, v[2].w, v[3].w);
  }
}

// An operand that lies along K in whole quads, and that the kernel packs to (k, pitch) while it
// multiplies: the three warps of the copying warpgroup that have nothing to do go ahead of it, in
// items of 32 rows or columns of C at 32 k. `ready` counts those that are in place, by tile and
// kFfmaReady items along K. They are packed in the order of K for a group of tiles at once, which
// are those that blocks multiply together. There is nothing to pack where there are no items.
struct FfmaPacking {
  const float* from;
  float* to;
  int extent, pitch;
  int panels, items;
  int log_tile, log_group;  // of the items of a panel, of a tile and of such a group
  unsigned* ready;
};
constexpr int kFfmaItem = 32, kFfmaReady = 4;

// Packs an item as a warp. A lane takes four rows at four k at a time: four lanes read 64 bytes of
// a row, eight write a line.
__device__ __forceinline__ void FfmaPack(const FfmaPacking& x, int k_extent, int item) {
  const int lane = (int)threadIdx.x % 32, group = (item >> x.log_group) / x.panels;
  const int panel = (item >> x.log_group) - group * x.panels;
  const int at = (group << x.log_group) + (item & ((1 << x.log_group) - 1));
  if (at * kFfmaItem >= x.extent) return;
  const int row = at * kFfmaItem + lane % 8 * 4, first = panel * kFfmaItem + lane / 8 * 4;
  const float* from = x.from + (int64_t)row * k_extent + first;
  float* to = x.to + (int64_t)first * x.pitch + row;
  int left = min(kFfmaItem, k_extent - panel * kFfmaItem) - lane / 8 * 4;
  if (row >= x.extent) left = 0;
#pragma unroll 1
  for (; left > 0; left -= 16, from += 16, to += 16 * (int64_t)x.pitch) {
    float4 v[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
      v[e] = row + e < x.extent ? *(const float4*)(from + e * (int64_t)k_extent)
                                : make_float4(0, 0, 0, 0);
    *(float4*)to = make_float4(v[0].x, v[1].x, v[2].x, v[3].x);
    *(float4*)(to + x.pitch) = make_float4(v[0].y, v[1].y, v[2].y, v[3].y);
    *(float4*)(to + 2 * (int64_t)x.pitch) = make_float4(v[0].z, v[1].z, v[2].z, v[3].z);
    *(float4*)(to + 3 * (int64_t)x.pitch) = make_float4(v[0].w, v[1].w, v[2].w, v[3].w);
  }
  __syncwarp();
  if (lane == 0)
    hopper::CountReleased(x.ready + (at >> x.log_tile) * CeilDiv32(x.panels, kFfmaReady) +
                          panel / kFfmaReady);
}

// Waits until the panel of a tile at (mn, k) is in place, which may be within two of `ready`;
// `seen` is the last one that was.
__device__ __forceinline__ void FfmaWaitForPanel(const FfmaPacking& x, int mn, int k, int* seen) {
  if (x.items == 0) return;
  constexpr int kSpan = kFfmaItem * kFfmaReady;
  const int at = mn / kFfmaItem, all = 1 << x.log_tile;
  const int of_tile = min(all, CeilDiv32(x.extent, kFfmaItem) - at);
  const int tile = (at >> x.log_tile) * CeilDiv32(x.panels, kFfmaReady);
  const int end = min(k + kFfmaItem, x.panels * kFfmaItem);
#pragma unroll 1
  for (int i = k / kSpan; i * kSpan < end; i++) {
    if (tile + i == *seen) continue;
    const unsigned items = (unsigned)(of_tile * min(kFfmaReady, x.panels - i * kFfmaReady));
    while (hopper::LoadAcquire(x.ready + tile + i) < items) __nanosleep(64);
    hopper::FenceGlobalForCopies();
    *seen = tile + i;
  }
}

// The operands A and B. Warps take the next items by a counter, so that nothing waits for a block
// that does not run yet.
struct FfmaPackings {
  FfmaPacking of[2];
  unsigned* next;
};

__device__ __forceinline__ void FfmaPackAhead(const FfmaPackings& packings, int k_extent) {
  const int count = max(packings.of[0].items, packings.of[1].items);
  if (count == 0) return;
  const auto take = [&] { return threadIdx.x % 32 == 0 ? (int)atomicAdd(packings.next, 1u) : 0; };
#pragma unroll 1
  while (true) {
    const int item = __shfl_sync(~0u, take(), 0);
    if (item >= count) return;
#pragma unroll 1
    for (int x = 0; x < 2; x++)
      if (item < packings.of[x].items) FfmaPack(packings.of[x], k_extent, item);
  }
}

// Steps of a tile that a block multiplies, at (row, col) of C. Where they are not all, the sums are
// a part, in a slot: those of a tile are adjacent, in the order of K. Otherwise the slot is
// negative.
struct __align__(16) FfmaSegment {
  int row, col, steps, slot;
};
// The thread that copies panels says what they are in a ring of segments, before the first panel of
// each is full; it is never so far ahead that one is still read.
constexpr int kFfmaSegments = 8;

// The whole tiles of a block, and all of its segments.
__device__ __forceinline__ int FfmaWholeOf(const FfmaShares& shares, int block) {
  return (shares.Whole() - block + shares.blocks - 1) / shares.blocks;
}
__device__ __forceinline__ int FfmaSegmentsOf(const FfmaShares& shares, int block) {
  const int begin = shares.BeginOf(block), end = shares.BeginOf(block + 1);
  const int shared = begin < end ? (end - 1) / shares.steps - begin / shares.steps + 1 : 0;
  return FfmaWholeOf(shares, block) + shared;
}

// The panels that a block multiplies, one after the other, of all of its segments. A thread with a
// ring says there what these are.
template <class T>
class FfmaPanels {
 public:
  __device__ FfmaPanels(const GemmParams& params, const FfmaShares& shares, FfmaSegment* ring)
      : params_(params),
        shares_(shares),
        ring_(ring),
        count_(FfmaSegmentsOf(shares, (int)blockIdx.x)) {
    Begin();
  }
  __device__ __forceinline__ bool More() const { return number_ < count_; }
  __device__ __forceinline__ void Next() {
    step_ += kFfmaSteps<T>;
    if (step_ < end_) return;
    number_++;
    if (More()) Begin();
  }
  __device__ __forceinline__ int K() const { return step_ * kFfmaUnroll; }
  __device__ __forceinline__ int Row() const { return row_; }
  __device__ __forceinline__ int Col() const { return col_; }

 private:
  // Begins the segment of this number.
  __device__ __forceinline__ void Begin() {
    const int block = (int)blockIdx.x, steps = shares_.steps;
    int tile = block + number_ * shares_.blocks, slot = -1;
    step_ = 0, end_ = steps;
    if (tile >= shares_.Whole()) {
      const int first = shares_.BeginOf(block), last = shares_.BeginOf(block + 1);
      const int split = first / steps + number_ - FfmaWholeOf(shares_, block);
      tile = shares_.Whole() + split;
      step_ = max(0, first - split * steps), end_ = min(steps, last - split * steps);
      if (end_ - step_ < steps) slot = block + split;
    }
    const TileCoord coord = FfmaTileCoord(params_, shares_, tile);
    row_ = coord.row * T::kTileM, col_ = coord.col * T::kTileN;
    if (ring_) ring_[number_ % kFfmaSegments] = {row_, col_, end_ - step_, slot};
  }
  const GemmParams& params_;
  const FfmaShares& shares_;
  FfmaSegment* const ring_;
  const int count_;
  int number_ = 0, step_, end_, row_, col_;
};

template <class T, bool kAlongA, bool kAlongB>
__global__ __launch_bounds__(
    FfmaMemory<T, kAlongA, kAlongB>::kThreads,
    T::kResident) void FfmaKernel(const __grid_constant__ CUtensorMap map_a,
                                  const __grid_constant__ CUtensorMap map_b,
                                  const __grid_constant__ GemmParams params,
                                  const __grid_constant__ FfmaShares shares,
                                  const __grid_constant__ FfmaPackings packings) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = FfmaMemory<T, kAlongA, kAlongB>;
  constexpr int kStages = Memory::kStages, kAhead = kStages - 1;  // panels in flight
  constexpr int kWarps = T::kThreads / 32;
  constexpr int kFloat = (int)sizeof(float), kZeros = T::kAccumulators / 4;
  constexpr int kDirect = kFfmaStageNumel<T> - Memory::kRaw;  // floats that are copied as they lie
  static_assert(T::kTileK % kFfmaUnroll == 0 && kFfmaUnroll % 2 == 0 && kZeros <= T::kThreads);
  __shared__ float4 zeros[kZeros];
  __shared__ __align__(8) uint64_t barriers[2 * kStages + 1];
  __shared__ FfmaSegment segments[kFfmaSegments];
  static_assert(kStages + 1 < kFfmaSegments);
  unsigned char* const dynamic = DynamicShared<unsigned char>();
  auto* const memory = (float*)(dynamic + (-hopper::SharedAddress(dynamic) & (kFfmaAlignment - 1)));
  const uint32_t shared = hopper::SharedAddress(memory);
  const uint32_t full = hopper::SharedAddress(barriers), empty = full + 8 * kStages;
  const uint32_t raw_full = empty + 8 * kStages;
  if (threadIdx.x < kZeros) zeros[threadIdx.x] = make_float4(0, 0, 0, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; stage++) {
      hopper::InitBarrier(full + stage * 8, (kDirect > 0) + 128 * Memory::kTransposes);
      hopper::InitBarrier(empty + stage * 8, kWarps * (Memory::kTransposes ? 32 : 1));
    }
    hopper::InitBarrier(raw_full, 1);
    hopper::PublishBarriers();
  }
  __syncthreads();

  RingPosition<kStages> filled, at;  // what is copied next, and multiplied
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  int copied = 0;
  const auto wait_for_room = [&] {
    if (copied++ >= kStages) hopper::WaitForPhase(empty + filled.stage * 8, filled.parity ^ 1);
  };
  constexpr bool kPacks = Memory::kProduces && !Memory::kTransposes;
  int seen_a = -1, seen_b = -1;
  // Copies what lies (k, mn).
  const auto copy = [&](const FfmaPanels<T>& ahead) {
    if (kPacks) {
      FfmaWaitForPanel(packings.of[0], ahead.Row(), ahead.K(), &seen_a);
      FfmaWaitForPanel(packings.of[1], ahead.Col(), ahead.K(), &seen_b);
    }
    const uint32_t to = shared + filled.stage * kFfmaStageNumel<T> * kFloat;
    const uint32_t barrier = full + filled.stage * 8;
    hopper::ArriveExpecting(barrier, kDirect * kFloat);
    if (!kAlongA) hopper::LoadBox<false>(to, &map_a, barrier, ahead.Row(), ahead.K(), 0);
    if (!kAlongB)
      hopper::LoadBox<false>(to + kFfmaPanelA<T> * kFloat, &map_b, barrier, ahead.Col(), ahead.K(),
                             0);
  };
  if constexpr (Memory::kProduces) {
    if (warp >= kWarps) {
      hopper::ReduceRegisters<Memory::kProducerRegisters>();
      const bool copies = threadIdx.x == T::kThreads;
      if (kPacks && warp > kWarps) {
        GridDependencySynchronize();
        FfmaPackAhead(packings, (int)params.gemm.k);
        return;
      }
      if (!Memory::kTransposes && !copies) return;
      FfmaPanels<T> ahead(params, shares, copies ? segments : nullptr);
      GridDependencySynchronize();
      const auto copy_raw = [&] {
        const uint32_t to = shared + Memory::kRawAt * kFloat;
        if (Memory::kTransposes) hopper::ArriveExpecting(raw_full, Memory::kRaw * kFloat);
        if (kAlongA) hopper::LoadBox<false>(to, &map_a, raw_full, ahead.K(), ahead.Row(), 0);
        if (kAlongB)
          hopper::LoadBox<false>(to + Memory::kRawOfA * kFloat, &map_b, raw_full, ahead.K(),
                                 ahead.Col(), 0);
      };
      uint32_t parity = 0;
      if (copies && ahead.More()) copy_raw();
      while (ahead.More()) {
        wait_for_room();
        if (copies && kDirect > 0) copy(ahead);
        const float* const raw = memory + Memory::kRawAt;
        float* const panel = memory + filled.stage * kFfmaStageNumel<T>;
        if (Memory::kTransposes) hopper::WaitForPhase(raw_full, parity);
        parity ^= 1;
        if (kAlongA) TransposePanel<T::kTileM>(raw, panel);
        if (kAlongB) TransposePanel<T::kTileN>(raw + Memory::kRawOfA, panel + kFfmaPanelA<T>);
        if (Memory::kTransposes) {
          hopper::Arrive(full + filled.stage * 8);
          hopper::SyncThreads(1, 128);  // all have read
        }
        filled.Advance();
        ahead.Next();
        if (copies && ahead.More()) copy_raw();
      }
      return;
    }
    hopper::RaiseRegisters<Memory::kRegisters>();
  }
  const bool copies = !Memory::kProduces && threadIdx.x == 0;
  auto ahead = [&] {
    if constexpr (Memory::kProduces)
      return 0;
    else
      return FfmaPanels<T>(params, shares, copies ? segments : nullptr);
  }();
  const auto copy_next = [&] {
    if constexpr (!Memory::kProduces) {
      if (!copies || !ahead.More()) return;
      wait_for_room();
      copy(ahead);
      filled.Advance();
      ahead.Next();
    }
  };
  GridDependencySynchronize();
  for (int k = 0; k < kAhead; k++) copy_next();

  const WarpOrigin origin = FfmaWarpOrigin<T>(warp);
  FfmaAccumulator<T> accumulator(origin.row, origin.col, lane);
  // All lanes arrive for warps that wait for what threads stored: racecheck takes the arrival of
  // one for the order of its own accesses alone.
  const auto release = [&](int stage) {
    __syncwarp();
    if (Memory::kTransposes || lane == 0) hopper::Arrive(empty + stage * 8);
  };
  const int count = FfmaSegmentsOf(shares, (int)blockIdx.x);
#pragma unroll 1
  for (int number = 0; number < count; number++) {
    hopper::WaitForPhase(full + at.stage * 8, at.parity);
    // One lane reads for all, as one arrives for all.
    FfmaSegment segment;
    if (lane == 0) segment = segments[number % kFfmaSegments];
    segment.row = __shfl_sync(~0u, segment.row, 0), segment.col = __shfl_sync(~0u, segment.col, 0);
    segment.steps = __shfl_sync(~0u, segment.steps, 0);
    segment.slot = __shfl_sync(~0u, segment.slot, 0);
    const int row0 = segment.row + origin.row, col0 = segment.col + origin.col;
    if (row0 < shares.rows && col0 < shares.cols) {
      accumulator.Begin(zeros, memory + at.stage * kFfmaStageNumel<T>);
#pragma unroll 1
      for (int steps = segment.steps; steps > 0; steps -= kFfmaSteps<T>) {
        copy_next();
        const int stage = at.stage;
        at.Advance();
        const bool more = steps > kFfmaSteps<T>;
        if (more) hopper::WaitForPhase(full + at.stage * 8, at.parity);
        // After the last panel it reads what nobody needs.
        const float* const next = memory + (more ? at.stage : stage) * kFfmaStageNumel<T>;
#pragma unroll 1
        for (int left = min(kFfmaSteps<T>, steps); left > 0; left--)
          accumulator.Multiply(left == 1, next);
        release(stage);
      }
      if (segment.slot >= 0) {
        accumulator.StorePart(shares.parts + (int64_t)segment.slot * T::kTileM * T::kTileN / 4);
        continue;
      }
      if (!Memory::kTransposes && shares.plain) {
        const int64_t n = params.gemm.n;
        accumulator.StoreAligned(params.gemm.c + row0 * n + col0, n,
                                 (int)min((int64_t)T::kWarpM, params.gemm.m - row0),
                                 (int)min((int64_t)T::kWarpN, n - col0), zeros[0].x);
        continue;
      }
      accumulator.ForQuads(
          memory + Memory::kStagingAt + warp * kFfmaStaging<T>, [&](int row, int col, float4 x) {
            Quad quad = {row0 + row, col0 + col, {x.x, x.y, x.z, x.w}, {}};
            ReadSide(params.gemm, params.aligned_out, quad);
            const float4 bias = ReadBias(params.gemm, quad.col, params.aligned_out);
            WriteQuad(params.gemm, params.aligned_out, bias, quad);
          });
    } else {
#pragma unroll 1
      for (int steps = segment.steps; steps > 0; steps -= kFfmaSteps<T>, at.Advance()) {
        copy_next();
        hopper::WaitForPhase(full + at.stage * 8, at.parity);
        release(at.stage);
      }
    }
  }
  TriggerProgrammaticLaunch();
#endif
}

}  // namespace cuda
}  // namespace dlsys
