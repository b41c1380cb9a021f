// How a consumer's part of a tile gets to memory: in boxes by way of shared memory and TMA, or
// straight from registers, with what is asked about its columns: moments, sums of a gradient. Where
// a tile is short, this limits it more than its products do.
#pragma once
#include "cuda/gemm/hopper/panels.cuh"
#include "cuda/pointwise/vector.cuh"
#include "cuda/reduce/group.cuh"
#include "operators/epilogue.h"

namespace dlsys {
namespace cuda {
namespace hopper {

// Which of four accumulators is element e of a pair, two of C that lie side by side.
template <class Source>
__host__ __device__ constexpr int OfPair(int half, int e) {
  return kTransposed<Source> ? half + 2 * e : 2 * half + e;
}

// The first of a pair of elements of C.
struct PlaceInC {
  int row, col;
};
// That of pair `half` of the accumulators [i][j] of a thread of a consumer, whose part of a tile
// begins at `origin`.
template <class Source>
__device__ __forceinline__ PlaceInC PlaceOfPair(const TileOrigin& origin, int thread, int i, int j,
                                                int half) {
  const int of_blocks = j * 8 + thread % 4 * 2;
  const int row = origin.row + i * 64 + RowOfThread<Source>(thread);
  if constexpr (kTransposed<Source>) return {origin.col + of_blocks + half, row};
  return {row + half * kBelow<Source>, origin.col + of_blocks};
}

template <int kCode>
using Code = std::integral_constant<int, kCode>;

// Two elements of a row, in one register where they are of 16 bits.
template <class E>
using Pair = std::conditional_t<sizeof(E) == 2, uint32_t, float2>;

template <class E>
__device__ __forceinline__ Pair<E> RoundedPair(float x, float y) {
  if constexpr (sizeof(E) == 2)
    return Packed<E>(x, y);
  else
    return make_float2(x, y);
}
template <int kIndex, class E>
__device__ __forceinline__ float ElementOf(const Pair<E>& pair) {
  if constexpr (sizeof(E) == 2) {
    E x;
    x.bits = (uint16_t)(pair >> 16 * kIndex);
    return (float)x;
  } else {
    return kIndex ? pair.y : pair.x;
  }
}

// `valid` elements of a pair exist; `aligned` where it is one access.
template <class E>
__device__ __forceinline__ Pair<E> ReadPair(const E* from, bool aligned, int valid) {
  if (aligned && valid >= 2) return *(const Pair<E>*)from;
  return RoundedPair<E>(valid > 0 ? (float)from[0] : 0.f, valid > 1 ? (float)from[1] : 0.f);
}
template <class E>
__device__ __forceinline__ void WritePair(E* to, bool aligned, int valid, const Pair<E>& pair) {
  if (aligned && valid >= 2) {
    *(Pair<E>*)to = pair;
    return;
  }
  if (valid > 0) to[0] = (E)ElementOf<0, E>(pair);
  if (valid > 1) to[1] = (E)ElementOf<1, E>(pair);
}

// Each warp makes the epilogue of its own rows, in boxes of 128 bytes of 16 rows: `side` comes into
// the warp's buffers by TMA while the tile is multiplied, and results leave them by TMA. Float32
// has fewer buffers than boxes: beside a side its results are stored from registers or, where their
// columns are asked about, the side comes by way of the L2 cache. Rows of RowAcross go both ways
// without buffers.
constexpr int kRowsOfBox = 16;
template <class E, class T, class Source>
class Boxes {
 public:
  static constexpr int kBlocks = 16 / (int)sizeof(E);  // of eight columns, of a box
  static constexpr int kCount = T::kBlocks / kBlocks;  // of a tile
  static constexpr int kRowGroups = T::kWarpgroupM;    // of 16 rows of a warp
  using Pairs = Pair<E>[kRowGroups][kBlocks][2];       // a box as a thread holds accumulators
  static constexpr bool kGradientSums = Source::kOfColumns == OfColumns::kGradientSums;
  static constexpr bool kStages = sizeof(E) == 2 || Source::kOfColumns != OfColumns::kNothing;
  static constexpr bool kStagesSide = sizeof(E) == 2 || (!kStages && !kHasRowsAcross<Source>);
  static constexpr bool kHasSlopes = sizeof(E) == 2 && T::kHasSlopes;
  // Results of float32 where there is no side.
  static constexpr bool kMayStage = kStages || (Source::kHasEpilogue && !kHasRowsAcross<Source>);

  // `buffers` are those of this warp, with a barrier for each: its side is there.
  __device__ __forceinline__ Boxes(const Params& params, const typename Source::Layout& layout,
                                   unsigned char* buffers, uint32_t barriers,
                                   const AuxTiles<E, T>& aux)
      : params_(params), layout_(layout), buffers_(buffers), barriers_(barriers), aux_(aux) {}

  // Goes on to a tile, and asks for as much of its side as there are buffers.
  __device__ __forceinline__ void Begin(const TileOrigin& origin, const CUtensorMap* map_side) {
    origin_ = of_warp_ = origin;
    of_warp_.row += threadIdx.x % 128 / 32 * 16;
    if constexpr (kGradientSums) ReadBits(0);
    if constexpr (kHasRowsAcross<Source> || (kGradientSums && !kStagesSide))
      if (params_.side) PrefetchSide();
    if (!SideIsStaged()) return;
    if (threadIdx.x % 32 == 0) {
      WaitForStoresReads();
      const int boxes = SideIsQuantized() ? 1 : min(kCount, T::kBuffers);
#pragma unroll 1
      for (int index = 0; index < boxes; index++) Load(map_side, index);
    }
    __syncwarp();
  }

  // Goes past a tile that the other consumer stores.
  __device__ __forceinline__ void Skip() {
    if constexpr (kGradientSums) aux_.Skip();
  }

  // Reads the side of box `index`, and asks for that of the box that takes its buffer.
  __device__ __forceinline__ void ReadSide(const CUtensorMap* map_side, int index, Pairs& side) {
    static_assert(sizeof(E) == 4 || kCount <= T::kBuffers, "results lie where the side was");
    if constexpr (!kStagesSide) return ReadSideOfColumns(index, side);
    WaitForPhase(BarrierOf(loaded_.stage), loaded_.parity);
    ForPairs([&](int i, int j, int half, int at) {
      side[i][j][half] = *(const Pair<E>*)(BufferOf(loaded_.stage) + at);
    });
    __syncwarp();
    if (index + T::kBuffers < kCount && threadIdx.x % 32 == 0) Load(map_side, index + T::kBuffers);
    loaded_.Advance();
  }

  // Stores box `index` of C or of another array of its shape; staged where its side was, or in the
  // next buffer, or else from registers.
  template <bool kSide>
  __device__ __forceinline__ void Store(const Pairs& x, const CUtensorMap* map, void* array,
                                        int index) {
    if constexpr (kStages || (!kSide && kMayStage)) {
      unsigned char* const to = NextBuffer(index);
      Stage(x, to);
      StoreStaged(to, map, index);
    } else {
      ForPlaces(index, [&](int i, int j, int half, bool exists, int64_t at) {
        if (exists) *(Pair<E>*)((E*)array + at) = x[i][j][half];
      });
    }
  }

  // The same in pieces, staged where a side was, of which it asks for the box that takes the buffer
  // then: make(i, j, half, side) is a pair of them, by that of the side, if there is one. A whole
  // box of both would leave so few registers that each element would wait for the one before.
  template <bool kSide, class Make>
  __device__ __forceinline__ void StorePieces(const CUtensorMap* map, const CUtensorMap* map_side,
                                              int index, Make&& make) {
    constexpr int kPiece = 4;  // blocks
    if (kSide) WaitForPhase(BarrierOf(loaded_.stage), loaded_.parity);
    unsigned char* const to = kSide ? BufferOf(loaded_.stage) : NextBuffer(index);
    if (kSide) loaded_.Advance();
#pragma unroll
    for (int i = 0; i < kRowGroups; i++) {
#pragma unroll
      for (int first = 0; first < kBlocks; first += kPiece) {
        Pair<E> x[kPiece][2] = {};
#pragma unroll
        for (int k = 0; kSide && k < 2 * kPiece; k++)
          x[k / 2][k % 2] = *(const Pair<E>*)(to + PlaceOf(i, first + k / 2, k % 2));
#pragma unroll
        for (int k = 0; k < 2 * kPiece; k++)
          x[k / 2][k % 2] = make(i, first + k / 2, k % 2, x[k / 2][k % 2]);
        if constexpr (sizeof(E) == 2) {
          if (kSide) __syncwarp();  // all have read the side
#pragma unroll
          for (int j = 0; j < kPiece; j += 2)
            StageBlocks(to, i, first + j, {x[j][0], x[j][1], x[j + 1][0], x[j + 1][1]});
        } else {
#pragma unroll
          for (int k = 0; k < 2 * kPiece; k++)
            *(Pair<E>*)(to + PlaceOf(i, first + k / 2, k % 2)) = x[k / 2][k % 2];
        }
      }
    }
    StoreStaged(to, map, index);
    if (kSide && index + T::kBuffers < kCount && threadIdx.x % 32 == 0) {
      WaitForStoresReads();
      Load(map_side, index + T::kBuffers);
    }
  }

  // Stores box `index` of C and, behind the second one, the box of slopes: make(i, j, half, slopes)
  // is a pair of C and sets that of quantized slopes.
  template <class Make>
  __device__ __forceinline__ void StoreWithSlopes(const CUtensorMap* map,
                                                  const CUtensorMap* map_slopes, int index,
                                                  Make&& make) {
    StoreBesideSlopes(map, index, make);
    if (index == 1) StoreStaged(BufferOf(0), map_slopes, 0);
  }

  // Stores box `index` of C: make(i, j, half, slopes) is a pair of it by those of the side.
  template <class Make>
  __device__ __forceinline__ void StoreBySlopes(const CUtensorMap* map, int index, Make&& make) {
    if (index == 0) WaitForPhase(BarrierOf(0), loaded_.parity);
    StoreBesideSlopes(map, index, make);
    if (index == 1) loaded_.Advance(kCount);
  }

  // Stores the moments of the columns of those boxes that are in the buffers, from `first` on. A
  // thread goes down a column; deviations are from its first element, which keeps the digits for
  // any mean.
  __device__ __forceinline__ void StoreMoments(int first) const {
    constexpr int kAtOnce = 16, kRows = T::template kMomentsRows<E>,
                  kCols = T::template kStagedN<E>;
    const int thread = threadIdx.x % 128, part = thread / kCols;
    const Staged at(*this, thread % kCols, part * kRows);
    const int col = origin_.col + first * kBlocks * 8 + thread % kCols;
    const int row = FirstRow() + part * kRows;
    const int count = min(kRows, params_.m - row);
    SyncConsumer();
    if (count > 0 && col < params_.n) {
      const float shift = (float)*(const E*)at.Row(0);
      float sums[2] = {}, squares[2] = {};
#pragma unroll 1
      for (int k = 0; k < count; k += kAtOnce) {
        float d[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; e++) d[e] = (float)*(const E*)at.Row(k, e) - shift;
        if (count - k < kAtOnce) {
#pragma unroll
          for (int e = 0; e < kAtOnce; e++)
            if (k + e >= count) d[e] = 0.f;
        }
#pragma unroll
        for (int e = 0; e < kAtOnce; e++)
          sums[e % 2] += d[e], squares[e % 2] = fmaf(d[e], d[e], squares[e % 2]);
      }
      const float sum = sums[0] + sums[1];
      const float mean = count == kRows ? sum * (1.f / kRows) : sum / (float)count;
      layout_.moments[(int64_t)(row / kRows) * params_.n + col] =
          make_float2(shift + mean, fmaf(-sum, mean, squares[0] + squares[1]));
    }
    SyncConsumer();  // before others write to the buffers
  }

  // Makes relu's gradient of box `index`, and asks for the bits of the next one.
  __device__ __forceinline__ void Keep(Pairs& x, int index) {
#pragma unroll
    for (int i = 0; i < kRowGroups; i++) {
#pragma unroll
      for (int j = 0; j < kBlocks; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const Bits of_row = bits_[i * 2 + half];
          const uint32_t two =
              (uint32_t)(of_row >> j / 4 * 32) >> (j % 4 * 8 + threadIdx.x % 4 * 2);
          if constexpr (sizeof(E) == 2) {
            x[i][j][half] &= (two & 1) * 0xFFFFu | (two & 2) * 0x7FFF8000u;
          } else {
            if (!(two & 1)) x[i][j][half].x = 0.f;
            if (!(two & 2)) x[i][j][half].y = 0.f;
          }
        }
      }
    }
    if (index + 1 < kCount) ReadBits(index + 1);
  }

  // Stores the sums over the columns of those boxes that are in the buffers, from `first` on, by x
  // in the next auxiliary tile. Rows that C has not are zeros. Of float32, deviations of x are
  // added; 16 bits of x are rounded by more than that saves, so that the mean's part leaves their
  // sum.
  __device__ __forceinline__ void StoreSums(int first) {
    constexpr bool kDeviations = sizeof(E) == 4;
    const int col0 = origin_.col + first * kOfBox, col = col0 + OwnChunk() * kWidth;
    const int own_col = col0 + (int)threadIdx.x % 128;
    const float own_mean = !kDeviations && threadIdx.x % 128 < kStaged && own_col < params_.n
                               ? layout_.mean[own_col]
                               : 0.f;
    alignas(16) float mean[kWidth] = {};
#pragma unroll
    for (int c = 0; c < kWidth; c += 4)
      if (kDeviations && col < params_.n)
        *(float4*)(mean + c) = *(const float4*)(layout_.mean + col + c);
    unsigned char* const aux = aux_.Wait();
    const unsigned char* const xs = aux + OwnChunk() / 8 * T::kTileM * 128;
    SyncConsumer();
    float2 sums[kWidth] = {};
    GoDown([&](int row, int e, const unsigned char* staged) {
      const Chunk dy = Read<kWidth>((const E*)staged);
      const Chunk x = Read<kWidth>((const E*)(xs + row * 128 + PlaceOfChunk(e)));
#pragma unroll
      for (int c = 0; c < kWidth; c++)
        sums[c].x = fmaf(dy[c], kDeviations ? x[c] - mean[c] : x[c], sums[c].x), sums[c].y += dy[c];
    });
    float2 sum = AddParts(sums, aux);
    sum.x = fmaf(-own_mean, sum.y, sum.x);
    if (FirstRow() < params_.m) StoreOfGroup(layout_.sums, first, sum);
    LetBulkFollow();
    SyncConsumer();  // before others write to either memory
    aux_.Release();
  }

 private:
  static constexpr int kNbytes = kRowsOfBox * 128, kWarpNbytes = T::kStagingNbytes / 4;

  // Where elements of a column are in the buffers of the consumer's warps, from a row on that is a
  // multiple of 16.
  class Staged {
   public:
    __device__ __forceinline__ Staged(const Boxes& boxes, int col, int row)
        : first_(boxes.buffers_ - threadIdx.x % 128 / 32 * kWarpNbytes +
                 col / (kBlocks * 8) * kRowGroups * kNbytes + col % kOfChunk * (int)sizeof(E)),
          row_(row),
          chunk_(col % (kBlocks * 8) / kOfChunk) {}
    // Row k + e, where k is a multiple of 16 and e below it.
    __device__ __forceinline__ const unsigned char* Row(int k, int e = 0) const {
      k += row_;
      return first_ + k / 64 * kNbytes + k % 64 / 16 * kWarpNbytes + e * 128 +
             (chunk_ ^ e % 8) * 16;
    }

   private:
    static constexpr int kOfChunk = 16 / (int)sizeof(E);
    const unsigned char* first_;
    int row_, chunk_;
  };
  // Of what is staged, a thread goes down a part of the rows in the columns of one chunk.
  static constexpr int kOfBox = kBlocks * 8, kStaged = T::template kStagedN<E>;  // columns
  static constexpr int kWidth = 16 / (int)sizeof(E), kChunks = kStaged / kWidth;
  static constexpr int kParts = 128 / kChunks, kPartRows = T::kRows / kParts;
  using Chunk = Vec<E, kWidth>;
  static __device__ __forceinline__ int OwnChunk() { return (int)threadIdx.x % kChunks; }
  static __device__ __forceinline__ int OwnPart() { return (int)threadIdx.x % 128 / kChunks; }
  // Where this thread's chunk is in row e of eight.
  static __device__ __forceinline__ int PlaceOfChunk(int e) {
    return e * 128 + (OwnChunk() % 8 ^ e) * 16;
  }
  // The buffers of the consumer's warps.
  __device__ __forceinline__ unsigned char* Buffers() const {
    return buffers_ - threadIdx.x % 128 / 32 * kWarpNbytes;
  }
  // The eight rows from `row` on, in the box of this thread's chunk.
  __device__ __forceinline__ const unsigned char* StagedRows(int row) const {
    return Buffers() + (OwnChunk() / 8 * kRowGroups + row / 64) * kNbytes +
           row % 64 / 16 * kWarpNbytes + row % 16 * 128;
  }
  // Calls f with eight rows of this thread's by the first one, a number, and its chunk there.
  template <class F>
  __device__ __forceinline__ void GoDown(F&& f) const {
    static_assert(kPartRows % 8 == 0, "rows of the swizzle");
#pragma unroll 1
    for (int row = OwnPart() * kPartRows; row < (OwnPart() + 1) * kPartRows; row += 8) {
      const unsigned char* const rows = StagedRows(row);
#pragma unroll
      for (int e = 0; e < 8; e++) f(row, e, rows + PlaceOfChunk(e));
    }
  }
  // The sums over all parts of the column of a thread's number, by way of memory that all have
  // read.
  static __device__ __forceinline__ float2 AddParts(const float2 (&sums)[kWidth],
                                                    unsigned char* memory) {
    float* const first = (float*)memory;  // (kParts, kStaged)
    float* const second = first + kParts * kStaged;
    SyncConsumer();
#pragma unroll
    for (int c = 0; c < kWidth; c += 4) {
      const int at = OwnPart() * kStaged + OwnChunk() * kWidth + c;
      *(float4*)(first + at) = make_float4(sums[c].x, sums[c + 1].x, sums[c + 2].x, sums[c + 3].x);
      *(float4*)(second + at) = make_float4(sums[c].y, sums[c + 1].y, sums[c + 2].y, sums[c + 3].y);
    }
    SyncConsumer();
    const int column = (int)threadIdx.x % 128;
    float2 sum = {};
#pragma unroll
    for (int part = 0; column < kStaged && part < kParts; part++)
      sum.x += first[part * kStaged + column], sum.y += second[part * kStaged + column];
    return sum;
  }
  // Stores what a thread has of the column of its number, of those from box `first` on, as that of
  // the consumer's rows.
  __device__ __forceinline__ void StoreOfGroup(float2* to, int first, float2 value) const {
    const int column = (int)threadIdx.x % 128, col = origin_.col + first * kOfBox + column;
    if (column < kStaged && col < params_.n)
      to[(int64_t)(FirstRow() / T::kRows) * params_.n + col] = value;
  }

  // Where box `index` is staged, once that may be overwritten.
  __device__ __forceinline__ unsigned char* NextBuffer(int index) {
    const int buffer = SideIsStaged() ? index : next_;
    next_ = next_ + 1 == T::kBuffers ? 0 : next_ + 1;
    if (!SideIsStaged() && threadIdx.x % 32 == 0) WaitForStoresReads<T::kBuffers - 1>();
    __syncwarp();
    return BufferOf(buffer);
  }
  __device__ __forceinline__ void StoreStaged(const unsigned char* staged, const CUtensorMap* map,
                                              int index) const {
    LetBulkFollow();
    __syncwarp();
    if (threadIdx.x % 32) return;
    const int col = origin_.col + index * kBlocks * 8;
#pragma unroll
    for (int i = 0; i < kRowGroups; i++)
      Source::Store(layout_, map, SharedAddress(staged) + i * kNbytes, of_warp_.row + i * 64, col,
                    origin_.z);
    CloseStores();
  }
  // Writes blocks j and j + 1 of 16 bits, of the rows of group i, to a buffer.
  static __device__ __forceinline__ void StageBlocks(unsigned char* to, int i, int j,
                                                     const uint32_t (&x)[4]) {
    const int l = threadIdx.x % 32;
    StoreMatrices(SharedAddress(to) + i * kNbytes + l % 16 * 128 + ((j + l / 16) ^ l % 8) * 16, x);
  }
  // Stores box `index` of C by way of the second buffer; the first one holds the slopes of both.
  template <class Make>
  __device__ __forceinline__ void StoreBesideSlopes(const CUtensorMap* map, int index,
                                                    Make&& make) {
    if (threadIdx.x % 32 == 0) WaitForStoresReads();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowGroups; i++) {
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
          x[k] = make(i, j + k / 2, k % 2,
                      *(uint16_t*)(BufferOf(0) + PlaceOfSlopes(index, i, j + k / 2, k % 2)));
        StageBlocks(BufferOf(1), i, j, x);
      }
    }
    StoreStaged(BufferOf(1), map, index);
  }
  // Writes a box to a buffer.
  __device__ __forceinline__ void Stage(const Pairs& x, unsigned char* to) const {
    if constexpr (sizeof(E) == 2) {
#pragma unroll
      for (int i = 0; i < kRowGroups; i++) {
#pragma unroll
        for (int j = 0; j < kBlocks; j += 2)
          StageBlocks(to, i, j, {x[i][j][0], x[i][j][1], x[i][j + 1][0], x[i][j + 1][1]});
      }
    } else {
      ForPairs([&](int i, int j, int half, int at) { *(Pair<E>*)(to + at) = x[i][j][half]; });
    }
  }
  // The first row of the consumer's part of the tile.
  __device__ __forceinline__ int FirstRow() const { return origin_.row; }
  static __device__ __forceinline__ void SyncConsumer() {
    SyncThreads(1 + (int)threadIdx.x / 128, 128);
  }

  // Reads the bits of this thread's rows of box `index`: those of a whole tile would be registers
  // enough for others to be spilled.
  __device__ __forceinline__ void ReadBits(int index) {
    const int col = origin_.col + index * kBlocks * 8;
#pragma unroll
    for (int k = 0; k < kBits; k++) {
      const int row = of_warp_.row + threadIdx.x % 32 / 4 + k / 2 * 64 + k % 2 * 8;
      bits_[k] = row < params_.m && col < params_.n
                     ? *(const Bits*)(layout_.bits + (RowOfC(row) * params_.n + col) / 8)
                     : 0;
    }
  }

  __device__ __forceinline__ int64_t RowOfC(int row) const {
    return T::kHasHalo ? Source::RowOf(params_, layout_, row, origin_.z) : row;
  }

  // Lets a side that is not staged come into the L2 cache.
  __device__ __forceinline__ void PrefetchSide() const {
    constexpr int kRows = kTransposed<Source> ? T::kTileN : T::kRows;
    constexpr int kCols = kTransposed<Source> ? T::kRows : T::kTileN, kOfLine = 128 / sizeof(E);
    constexpr int kLines = kCols / kOfLine;  // of a row
    const int row0 = kTransposed<Source> ? origin_.col : origin_.row;
    const int col0 = kTransposed<Source> ? origin_.row : origin_.col;
    for (int k = threadIdx.x % 128; k < kRows * kLines; k += 128) {
      const int row = row0 + k / kLines, col = col0 + k % kLines * kOfLine;
      if (row < params_.m && col < params_.n)
        PrefetchToL2((const E*)params_.side +
                     Source::RowOf(params_, layout_, row, origin_.z) * params_.n + col);
    }
  }

  // The side of box `index` where it is not staged.
  __device__ __forceinline__ void ReadSideOfColumns(int index, Pairs& side) const {
    ForPlaces(index, [&](int i, int j, int half, bool exists, int64_t at) {
      side[i][j][half] = exists ? *(const Pair<E>*)((const E*)params_.side + at) : Pair<E>{};
    });
  }

  __device__ __forceinline__ bool SideIsStaged() const { return kStagesSide && params_.side; }
  __device__ __forceinline__ bool SideIsQuantized() const {
    return kHasSlopes && params_.gradient == GradientCode::kMulQuantized;
  }
  __device__ __forceinline__ uint32_t BarrierOf(int buffer) const { return barriers_ + buffer * 8; }
  __device__ __forceinline__ unsigned char* BufferOf(int buffer) const {
    return buffers_ + buffer * kRowGroups * kNbytes;
  }
  __device__ __forceinline__ void Load(const CUtensorMap* map_side, int index) {
    const int buffer = index % T::kBuffers, col = origin_.col + index * kBlocks * 8;
    const uint32_t barrier = BarrierOf(buffer);
    ArriveExpecting(barrier, kRowGroups * kNbytes);
#pragma unroll
    for (int i = 0; i < kRowGroups; i++) {
      const uint32_t to = SharedAddress(BufferOf(buffer)) + i * kNbytes;
      if constexpr (T::kHasHalo)
        layout_.LoadLines(to, map_side, barrier, of_warp_.row + i * 64, col);
      else
        LoadBox<false>(to, map_side, barrier, col, of_warp_.row + i * 64, origin_.z);
    }
  }
  // Where a pair of accumulators is in a buffer.
  static __device__ __forceinline__ int PlaceOf(int i, int j, int half) {
    const int l = threadIdx.x % 32;
    const int row = l / 4 + half * 8, byte = (j * 8 + l % 4 * 2) * (int)sizeof(E);
    return i * kNbytes + row * 128 + (byte / 16 ^ row % 8) * 16 + byte % 16;
  }
  // Where the slopes of a pair of box `index` are in their buffer, a byte each.
  static __device__ __forceinline__ int PlaceOfSlopes(int index, int i, int j, int half) {
    const int l = threadIdx.x % 32;
    const int row = l / 4 + half * 8, byte = (index * kBlocks + j) * 8 + l % 4 * 2;
    return i * kNbytes + row * 128 + (byte / 16 ^ row % 8) * 16 + byte % 16;
  }
  // Calls f with each pair's place among accumulators and in a buffer.
  template <class F>
  __device__ __forceinline__ void ForPairs(F&& f) const {
#pragma unroll
    for (int i = 0; i < kRowGroups; i++) {
#pragma unroll
      for (int j = 0; j < kBlocks; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) f(i, j, half, PlaceOf(i, j, half));
      }
    }
  }

  // Calls f with each pair of box `index`, whether C has it, and where it is in an array of C's
  // shape.
  template <class F>
  __device__ __forceinline__ void ForPlaces(int index, F&& f) const {
    constexpr int kRows = 2 * (kTransposed<Source> ? kBlocks : kRowGroups);
    const PlaceInC first = PlaceOfPair<Source>(origin_, threadIdx.x % 128, 0, index * kBlocks, 0);
#pragma unroll
    for (int k = 0; k < kRows; k++) {
      const int half = k % 2;
      const int row =
          first.row + (kTransposed<Source> ? k / 2 * 8 + half : k / 2 * 64 + half * kBelow<Source>);
      const int64_t of_row = Source::RowOf(params_, layout_, row, origin_.z) * params_.n;
      if constexpr (kTransposed<Source>) {
#pragma unroll
        for (int i = 0; i < kRowGroups; i++) {
          const int col = first.col + i * 64;
          f(i, k / 2, half, row < params_.m && col < params_.n, of_row + col);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kBlocks; j++) {
          const int col = first.col + j * 8;
          f(k / 2, j, half, row < params_.m && col < params_.n, of_row + col);
        }
      }
    }
  }

  const Params& params_;
  const typename Source::Layout& layout_;
  unsigned char* const buffers_;
  const uint32_t barriers_;
  AuxTiles<E, T> aux_;
  TileOrigin origin_, of_warp_;  // of the consumer's part, and of the warp's 16 rows
  RingPosition<(kCount < T::kBuffers ? kCount : T::kBuffers)> loaded_;
  int next_ = 0;
  using Bits = std::conditional_t<sizeof(E) == 2, uint64_t, uint32_t>;  // of a row of a box
  static constexpr int kBits = kGradientSums ? kRowGroups * 2 : 1;
  Bits bits_[kBits];  // of a box, by row group and half
};

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
