// GEMM by wgmma and TMA, for sm_90a: bfloat16, float16, and float32 as tf32 or 3xtf32.
//
// Warp specialization: one thread of a producer warpgroup copies operand panels by TMA into a ring
// of stages in shared memory, two consumer warpgroups multiply them into accumulators in registers.
// The consumers halve a tile (cooperative), or take tiles in turn, so that one stores while the
// other multiplies (ping-pong). Blocks are persistent, one a multiprocessor; two of a cluster share
// the panels of B by multicast. Tiles that would not fill a wave of blocks are laid one behind the
// other along K and shared equally (stream-K); parts of a tile are added in the order of K: results
// are deterministic. 3xtf32 makes three products, of the upper and lower parts of both operands
// (Ootomo and Yokota 2022, doi:10.1177/10943420221090256). A consumer's warp makes the epilogue of
// its own rows; their side comes by TMA while the tile is multiplied.
//
// Operands lie along K or, of 16 bits, along M or N. A of float32 may lie along M, and is read into
// registers then (MultiplyFragments). B of float32 that lies along N takes the place of A, and
// tiles are those of C's transpose, or it is turned in shared memory (TurnPanels). C is row-major
// and overlaps nothing but its side, each element of which is read before that of C is stored.
// Large shapes are limited by the tensor cores' power, K below about 1,000 by the stores of C.
#pragma once
#include "cuda/gemm/fast_functions.cuh"
#include "cuda/gemm/hopper/fragments.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/ring.cuh"
#include "cuda/pointwise/vector.cuh"
#include "cuda/reduce/group.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "operators/epilogue.h"

namespace dlsys {
namespace cuda {
namespace hopper {

// A tile of 64 WarpgroupM or, where consumers cooperate, twice as many rows, and TileN columns.
// What a consumer's epilogue reads and writes goes through StagingN columns of 16 bits in shared
// memory, and there is room for as much of the auxiliary operand in AuxTiles places. Tiles of a
// fitted tiling have fewer columns where that makes their work alike.
template <int WarpgroupM, int TileN, bool PingPong, int Cluster, int Stages, int StagingN,
          int AuxTiles = 0, bool Fitted = false>
struct Tiling {
  static constexpr int kWarpgroupM = WarpgroupM, kTileN = TileN, kCluster = Cluster;
  static constexpr int kStages = Stages, kStagingN = StagingN, kAuxTiles = AuxTiles;
  static constexpr bool kPingPong = PingPong, kFitted = Fitted;
  // The compiler would let one product wait for the next where those of ping-pong are many.
  static constexpr bool kMakesSums = !PingPong;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kRows = WarpgroupM * 64;  // of a consumer
  static constexpr int kTileM = PingPong ? kRows : kConsumers * kRows;
  static constexpr int kBlocks = TileN / 8;                 // of eight columns
  static constexpr int kQuads = WarpgroupM * kBlocks;       // of accumulators of a thread
  static constexpr int kParts = PingPong ? 1 : kConsumers;  // of a tile, by consumer
  static constexpr int kRowNbytes = 128;                    // of a panel in shared memory, swizzled
  static constexpr int kPanelA = kTileM * kRowNbytes, kPanelB = TileN * kRowNbytes;
  static constexpr bool kBothParts = false, kHasHalo = false;
  static constexpr int kStageNbytes = kPanelA + kPanelB, kCopiedNbytes = kStageNbytes;
  static constexpr int kBuffers = StagingN / 64;  // for boxes of 128 bytes of the consumer's rows
  // Of 16 bits, a tile has two boxes of results and one of codes, which take a buffer each.
  static constexpr bool kHasCodes = TileN == 128 && kBuffers == 2;
  static constexpr int kStagingNbytes = kRows * kBuffers * kRowNbytes;
  // Columns that are staged, and rows of one that a thread of a consumer reads.
  template <class E>
  static constexpr int kStagedN = StagingN * 2 / (int)sizeof(E);
  template <class E>
  static constexpr int kMomentsRows = kRows * kStagedN<E> / 128;
  static constexpr int kWarps = kConsumers * 4;
  static constexpr int kAlignment = 1024;  // of the swizzle
  static constexpr int kAuxAt = Stages * kStageNbytes + kConsumers * kStagingNbytes;
  static constexpr int kAuxNbytes = kTileM * StagingN * 2;  // of an auxiliary tile
  // Eight rows of ones lie behind all: B of the products that sum rows of A.
  static constexpr int kOnesAt = kAuxAt + AuxTiles * kAuxNbytes;
  static constexpr int kOnesNbytes = 8 * kRowNbytes;
  static constexpr int kSharedNbytes = kAlignment + kOnesAt + kOnesNbytes;
  static_assert(kSharedNbytes <= 226 << 10, "227 KB a block, and a few barriers");
  static_assert(!AuxTiles || PingPong, "consumers take auxiliary tiles in turn");
  static_assert(!Fitted || (WarpgroupM == 1 && Cluster == 1), "quads follow each other by columns");

  // Barriers of the block: for each stage that it is full and that it is empty, for each buffer of
  // a warp that it is full, for each auxiliary tile that it is full, by consumer, and empty, and
  // for each stage that its panel of B is turned.
  static constexpr int kBoxBarriersAt = 2 * Stages;
  static constexpr int kAuxBarriersAt = kBoxBarriersAt + kWarps * kBuffers;
  static constexpr int kTurnedAt = kAuxBarriersAt + (kConsumers + 1) * AuxTiles;
  static constexpr int kBarriers = kTurnedAt + Stages;
};

// The same with 128 columns of auxiliary tiles in the place of stages.
template <class T, int kAuxTiles = 128 / T::kTileN>
using WithAux =
    Tiling<T::kWarpgroupM, T::kTileN, T::kPingPong, T::kCluster,
           T::kStages - (kAuxTiles * T::kAuxNbytes + T::kStageNbytes - 1) / T::kStageNbytes,
           T::kStagingN, kAuxTiles>;

// The same for 3xtf32: stages, as many as there is room for, have the upper parts of B's elements
// and behind them the lower ones.
template <class T>
struct WithBothParts : T {
  static constexpr bool kBothParts = true;
  static constexpr int kPanelB = 2 * T::kPanelB, kStageNbytes = T::kPanelA + kPanelB;
  static constexpr int kCopiedNbytes = kStageNbytes;
  static constexpr int kStages = T::kStages * T::kStageNbytes / kStageNbytes;
  static_assert(kStages * kStageNbytes == T::kStages * T::kStageNbytes, "the rest lies as it did");
};

// A GEMM, batched, as the kernel sees it; C of batch z is at c + z m n.
struct Params {
  int m, n, batch;
  int k_panels;                    // panels along K
  int row_tiles, col_tiles, band;  // row tiles count clusters; a band of them shares columns in L2
  Divisor by_tiles, by_tiles_of_band, by_band, by_last_band;  // tiles of a batch; rows of a band
  int step;                                                   // columns from one tile to the next
  // The first tiles, one behind the other along K, are cut into as many equal shares as there are
  // workers: so many of the clusters. Where a worker begins repeats every so many tiles, by groups.
  int split_tiles, workers, groups;
  float4* partial;     // of the parts of tiles
  unsigned* arrivals;  // zeros, by tile, block of the cluster and consumer
  void* c;
  void* before;             // of C's shape: C before its activation or, with `slope`, the
  bool slope;               // derivative of that, coded in uint8; or null
  const void *bias, *side;  // (n), and of C's shape, of 16 bits uint8 where it is codes; or null
  int activation, gradient;
  fast::Gate gate;  // of the activation or gradient, where it is one
  bool aligned;     // rows of C, before, bias and side are at multiples of four elements
  bool in_boxes;    // and, of 16 bits, those of results where TMA can write them
  // The sums of A over K in parts (col_tiles, sum_parts, m), of which a tile of C has as many as it
  // may have splits; or null.
  float* sums;
  int sum_parts;
};

// Where a cluster works: panels [begin, end) of a tile, as one of its splits, which is at `slot` in
// the memory of parts.
struct Segment {
  int tile, begin, end, split, splits, slot;
};

// Of so few splits the first gets the sums of the others, of more each makes a slice.
constexpr int kMostOwned = 4;
// True where the cluster that makes the segment stores its tile from registers.
__device__ __forceinline__ bool IsInBoxes(const Params& params, const Segment& segment) {
  return params.in_boxes && segment.split == 0 && segment.splits <= kMostOwned;
}

// The segments of a cluster: its share of the tiles that are split, then every so-many-th of those
// that are not. Clusters that run together work at the same K, or at as few as may be, and so share
// panels in L2.
template <class T>
class Segments {
 public:
  __device__ __forceinline__ explicit Segments(const Params& params)
      : params_(params),
        panels_(params.k_panels),
        cluster_(blockIdx.x / T::kCluster),
        whole_(params.split_tiles + cluster_),
        at_(ShareOf(cluster_)),
        end_(ShareOf(cluster_ + 1)) {}

  __device__ __forceinline__ bool Next(Segment& segment) {
    if (at_ < end_) {
      const int position = at_ / panels_, in_chain = params_.split_tiles / params_.groups;
      const int first_panel = position * panels_;
      const int begin = at_ - first_panel;
      const int end = min(panels_, begin + end_ - at_);
      const int first = WorkerAt(first_panel), last = WorkerAt(first_panel + panels_ - 1);
      segment = {position % in_chain * params_.groups + position / in_chain,
                 begin,
                 end,
                 cluster_ - first,
                 last - first + 1,
                 cluster_ + position};
      at_ += end - begin;
      return true;
    }
    segment = {whole_, 0, panels_, 0, 1, params_.workers + params_.split_tiles + cluster_};
    whole_ += gridDim.x / T::kCluster;
    return segment.tile < params_.row_tiles * params_.col_tiles * params_.batch;
  }

 private:
  __device__ __forceinline__ int ShareOf(int cluster) const {
    const int panels = params_.split_tiles * panels_;
    return cluster < params_.workers ? panels * cluster / params_.workers : panels;
  }
  __device__ __forceinline__ int WorkerAt(int panel) const {
    return ((panel + 1) * params_.workers - 1) / (params_.split_tiles * panels_);
  }

  const Params& params_;
  int panels_, cluster_, whole_;
  int at_, end_;
};

template <class T>
__device__ __forceinline__ uint32_t ClusterRankOf() {
  return T::kCluster > 1 ? ClusterRank() : 0;
}

// The first row and column of this block's tile, and its batch. Tiles go down the rows of a band,
// then to the next column.
struct TileOrigin {
  int row, col, z;
};
template <class T>
__device__ __forceinline__ TileOrigin OriginOf(const Params& params, int tile, uint32_t rank) {
  const int z = tile / params.by_tiles, in_batch = tile - z * (int)params.by_tiles.value;
  const int band = in_batch / params.by_tiles_of_band;
  const int in_band = in_batch - band * (int)params.by_tiles_of_band.value;
  const bool is_last = (band + 1) * params.band >= params.row_tiles;
  const Divisor by_rows = is_last ? params.by_last_band : params.by_band;
  const int col = in_band / by_rows, row = in_band - col * (int)by_rows.value;
  return {((band * params.band + row) * T::kCluster + (int)rank) * T::kTileM, col * params.step, z};
}

// Columns of a tile: the last one has what is left.
template <class T>
__device__ __forceinline__ int WidthOf(const Params& params, const TileOrigin& origin,
                                       bool of_columns) {
  const int left = (of_columns ? params.m : params.n) - origin.col;
  return left <= T::kTileN ? left : params.step;
}

// ---- the producer ----

// A `Source` says how the panels of both operands are copied and where boxes of C go; its Layout is
// what it needs beside the tensor maps. It begins at a tile. Without kHasEpilogue there is a bias
// at most. With two producers, one copies A and one B. This one reads matrices, or batches of them;
// those of convolutions are in conv/channels_last/sources.cuh.

// Where wgmma reads A: in shared memory, or of float32 in registers, as it must be where A lies
// along M; kRegistersOfColumns where the rows of A are the columns of C.
enum class ReadsA { kShared, kRegisters, kRegistersOfColumns };

// True where tiles are those of C's transpose.
template <class Source>
constexpr bool kTransposed = Source::kReadsA == ReadsA::kRegistersOfColumns;
// True where a thread has the rows of RowAcross.
template <class Source>
constexpr bool kHasRowsAcross = Source::kReadsA != ReadsA::kShared && Source::kAlongM;
// The first row of a consumer's 64 that a thread has accumulators of, and how far below is the
// other.
template <class Source>
constexpr int kBelow = kHasRowsAcross<Source> ? 1 : 8;
template <class Source>
__device__ __forceinline__ int RowOfThread(int thread) {
  return kHasRowsAcross<Source> ? RowAcross(thread) : thread / 32 * 16 + thread % 32 / 4;
}

// What a source has made of the columns of C as it is stored, in boxes; then there is no bias.
enum class OfColumns {
  kNothing,
  // Layout::moments, (groups of kMomentsRows rows, n): means and sums of squared deviations from
  // them.
  kMoments,
  // C is relu's gradient of C + side, by Layout::bits: 0 where an element's bit is not set. Of it
  // Layout::sums, (groups of kRows rows, n): Σ c (x - mean) and Σ c, by Layout::mean, (n), and x,
  // the auxiliary operand, of C's shape: Layout::map_aux reads kTileM rows of 128 bytes. n is a
  // multiple of 64.
  kGradientSums,
  // C is what Source::Map makes of the accumulators; all tiles are stored from registers.
  kMapped
};

// Copies a panel's rows [0, kRows) to shared memory: one box along K, else boxes of 128 bytes along
// M or N.
template <class E, bool kAcross, bool kMulticast, int kRows>
__device__ __forceinline__ void LoadPanel(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                          int row, int k, int z) {
  constexpr int kTileK = 128 / (int)sizeof(E);
  if constexpr (!kAcross) {
    LoadBox<kMulticast>(to, map, barrier, k, row, z);
  } else {
#pragma unroll
    for (int first = 0; first < kRows; first += kTileK)
      LoadBox<kMulticast>(to + first * 128, map, barrier, row + first, k, z);
  }
}

template <class E, class T, bool kAlongM_, bool kAlongN_, ReadsA kReadsA_ = ReadsA::kShared>
class Matrices {
 public:
  struct Layout {};
  static constexpr bool kAlongM = kAlongM_, kAlongN = kAlongN_, kHasEpilogue = true;
  static constexpr ReadsA kReadsA = kReadsA_;
  static constexpr bool kSumsA = kAlongM_;  // where asked to
  static constexpr bool kTurnsB = sizeof(E) == 4 && kAlongN_;
  static constexpr OfColumns kOfColumns = OfColumns::kNothing;
  static constexpr bool kFloatResult = sizeof(E) == 4;
  static constexpr int kProducers = 1;

  // `first` of a tile's rows of B are copied by another block.
  __device__ __forceinline__ Matrices(const Params& params, const Layout&, const TileOrigin& origin,
                                      int first)
      : origin_(origin),
        col_(origin.col + first),
        width_(WidthOf<T>(params, origin, kTransposed<Matrices>)) {}

  // What a panel of a fitted tile brings to a stage.
  __device__ __forceinline__ uint32_t Nbytes() const {
    constexpr int kOfBox = 128 / (int)sizeof(E);
    return T::kPanelA + (width_ + kOfBox - 1) / kOfBox * kOfBox * T::kRowNbytes;
  }

  // Copies a panel to `a` and `b`, or to one of them.
  template <bool kOfA, bool kOfB>
  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, uint32_t a, uint32_t b, uint32_t barrier) const {
    constexpr int kTileK = 128 / (int)sizeof(E);
    const int k = panel * kTileK, z = origin_.z;
    if (kOfA) LoadPanel<E, kAlongM, false, T::kTileM>(a, map_a, barrier, origin_.row, k, z);
    const auto load_b = [&](uint32_t to, int of) {
      LoadPanel<E, kAlongN, (T::kCluster > 1), T::kTileN / T::kCluster>(to, map_b, barrier, col_, k,
                                                                        of);
    };
    if constexpr (T::kFitted) {
      for (int first = 0; first < width_; first += kTileK)
        LoadBox<false>(b + first * T::kRowNbytes, map_b, barrier, col_ + first, k, z);
      return;
    }
    if (kOfB) load_b(b, z);
    if (kOfB && T::kBothParts) load_b(b + T::kPanelB / 2, z + 1);
  }

  static __device__ __forceinline__ void Store(const Layout&, const CUtensorMap* map, uint32_t from,
                                               int row, int col, int z) {
    StoreBox(map, from, col, row, z);
  }
  // The row of C, among those of all batches, that a row of the product is stored in.
  static __device__ __forceinline__ int64_t RowOf(const Params& params, const Layout&, int row,
                                                  int z) {
    return (int64_t)z * params.m + row;
  }

 private:
  const TileOrigin& origin_;
  const int col_, width_;
};

template <class T, class Source, bool kOfA, bool kOfB>
__device__ __forceinline__ void Produce(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                        const Params& params, const typename Source::Layout& layout,
                                        uint32_t memory, uint32_t full, uint32_t empty) {
  const uint32_t rank = ClusterRankOf<T>();
  const int first = (int)rank * (T::kTileN / T::kCluster);
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  if constexpr (T::kHasHalo)
    Source::LoadFilter(map_b, layout, memory + T::kFilterAt, full + T::kFilterBarrierAt * 8);
  for (Segment segment; segments.Next(segment);) {
    const TileOrigin origin = OriginOf<T>(params, segment.tile, rank);
    const Source source(params, layout, origin, first);
    for (int panel = segment.begin; panel < segment.end; panel++, at.Advance()) {
      const uint32_t a = memory + at.stage * T::kStageNbytes, barrier = full + at.stage * 8;
      WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      if constexpr (T::kFitted)
        ArriveExpecting(barrier, source.Nbytes());
      else if (kOfA)
        ArriveExpecting(barrier, T::kCopiedNbytes);
      source.template Load<kOfA, kOfB>(map_a, map_b, panel, a,
                                       a + T::kPanelA + first * T::kRowNbytes, barrier);
    }
  }
}

// ---- panels of float32 across ----
// wgmma reads B of tf32 along K alone. Where B lies along N, the producer's other warps turn its
// boxes, each to where it was.

constexpr int kTurningWarps = 3;

// Transposes a box of 32 rows of 128 bytes, swizzled before and after, as a warp. A lane takes four
// rows by four columns at a time, such that those of a quarter of the warp lie in banks of their
// own both ways.
__device__ __forceinline__ void TurnBox(unsigned char* box) {
  const int lane = threadIdx.x % 32, row4 = lane % 8;
  const int first = (row4 / 2 + lane / 8) % 4;  // of its columns, by fours
  float4 v[2][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int col4 = first + half * 4;
#pragma unroll
    for (int e = 0; e < 4; e++)
      v[half][e] = *(const float4*)(box + (row4 * 4 + e) * 128 + (col4 ^ (row4 % 2 * 4 + e)) * 16);
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4(&x)[4] = v[half];
    const int col4 = first + half * 4;
    const auto write = [&](int e, float a, float b, float c, float d) {
      *(float4*)(box + (col4 * 4 + e) * 128 + (row4 ^ (col4 % 2 * 4 + e)) * 16) =
          make_float4(a, b, c, d);
    };
    write(0, x[0].x, x[1].x, x[2].x, x[3].x);
    write(1, x[0].y, x[1].y, x[2].y, x[3].y);
    write(2, x[0].z, x[1].z, x[2].z, x[3].z);
    write(3, x[0].w, x[1].w, x[2].w, x[3].w);
  }
}

// Turns the panels of B of all tiles, as one of the warps that do.
template <class T, class Source>
__device__ __forceinline__ void TurnPanels(const Params& params, unsigned char* shared,
                                           uint32_t full, uint32_t turned, int warp) {
  constexpr int kOfBox = 32;
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  for (Segment segment; segments.Next(segment);) {
    const TileOrigin origin = OriginOf<T>(params, segment.tile, 0);
    const int width = WidthOf<T>(params, origin, kTransposed<Source>);
    for (int panel = segment.begin; panel < segment.end; panel++, at.Advance()) {
      unsigned char* const b = shared + at.stage * T::kStageNbytes + T::kPanelA;
      WaitForPhase(full + at.stage * 8, at.parity);
      for (int col = warp * kOfBox; col < width; col += kTurningWarps * kOfBox)
        TurnBox(b + col * T::kRowNbytes);
      LetBulkFollow();  // wgmma reads by way of the same proxy
      Arrive(turned + at.stage * 8);
    }
  }
}

// ---- the auxiliary operand ----
// Columns of C are summed with it. It comes to memory of its own: a stage of the ring that is held
// through an epilogue would hold up the panels behind it.

// The auxiliary tiles that a tile of E takes, one behind the other.
template <class E, class T>
constexpr int kAuxOfTile = T::kTileN / T::template kStagedN<E>;

// Copies those of all tiles to `memory` as it becomes empty.
template <class E, class T, class Layout>
__device__ __forceinline__ void ProduceAux(const Params& params, const Layout& layout,
                                           uint32_t memory, uint32_t barriers) {
  constexpr int kColumns = 128 / (int)sizeof(E);  // of a box
  const uint32_t empty = barriers + T::kConsumers * T::kAuxTiles * 8;
  RingPosition<T::kAuxTiles> at;
  Segments<T> segments(params);
  Segment segment;
  for (int turn = 0; segments.Next(segment); turn++) {
    if (!IsInBoxes(params, segment)) continue;
    const TileOrigin origin = OriginOf<T>(params, segment.tile, 0);
    for (int k = 0; k < kAuxOfTile<E, T>; k++, at.Advance()) {
      const uint32_t full = barriers + (turn % T::kConsumers * T::kAuxTiles + at.stage) * 8;
      WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      ArriveExpecting(full, T::kAuxNbytes);
#pragma unroll
      for (int box = 0; box < T::kBuffers; box++) {
        const uint32_t to = memory + at.stage * T::kAuxNbytes + box * T::kTileM * 128;
        const int col = origin.col + (k * T::kBuffers + box) * kColumns;
        if constexpr (T::kHasHalo)
          layout.template LoadBlocks<T::kTileM>(to, &layout.map_aux, full, origin.row, col);
        else
          LoadBox<false>(to, &layout.map_aux, full, col, origin.row, 0);
      }
    }
  }
}

// A consumer's way through the auxiliary tiles. Each consumer has barriers of its own, so that none
// waits for the phase after the next.
template <class E, class T>
class AuxTiles {
 public:
  __device__ __forceinline__ AuxTiles(unsigned char* memory, uint32_t barriers)
      : memory_(memory),
        full_(barriers + threadIdx.x / 128 * T::kAuxTiles * 8),
        empty_(barriers + T::kConsumers * T::kAuxTiles * 8) {}

  // The next one, once it is there.
  __device__ __forceinline__ unsigned char* Wait() {
    WaitForPhase(full_ + at_.stage * 8, parities_ >> at_.stage & 1);
    parities_ ^= 1u << at_.stage;
    return memory_ + at_.stage * T::kAuxNbytes;
  }
  // Goes on from it, after all threads of the consumer are done with it.
  __device__ __forceinline__ void Release() {
    if (threadIdx.x % 128 == 0) Arrive(empty_ + at_.stage * 8);
    at_.Advance();
  }
  // Goes past those of a tile of the other consumer.
  __device__ __forceinline__ void Skip() { at_.Advance(kAuxOfTile<E, T>); }

 private:
  unsigned char* const memory_;
  const uint32_t full_, empty_;
  RingPosition<(T::kAuxTiles > 0 ? T::kAuxTiles : 1)> at_;
  uint32_t parities_ = 0;  // by place, of this consumer's next wait
};

// ---- consumers ----

template <class T>
using Accumulators = float[T::kWarpgroupM][T::kBlocks][4];

// The sums over K of a consumer's rows of A, as products with ones, or of fragments in float32. The
// tiles of C that read the same rows take their panels in turn, so that all are equally long.
template <class E, class T, class Source>
class RowSums {
 public:
  static constexpr bool kOfFragments = Source::kReadsA != ReadsA::kShared;
  static constexpr bool kMade = Source::kSumsA && (kOfFragments || T::kMakesSums);
  static constexpr bool kByProducts = kMade && !kOfFragments;

  __device__ __forceinline__ RowSums(const Params& params, uint32_t memory) : params_(params) {
    if (kByProducts) ones_ = Descriptor(memory + T::kOnesAt, 16, 1024);
  }
  __device__ __forceinline__ void Begin(const Segment& segment, int col) {
    if (!kMade) return;
    const int tiles = params_.col_tiles;
    col_tile_ = col / params_.step;
    wait_ = params_.sums ? (col_tile_ - segment.begin % tiles + tiles) % tiles : INT32_MAX;
#pragma unroll
    for (int q = 0; q < 4 * T::kWarpgroupM; q++) d_[q / 4][0][q % 4] = 0.f;
  }
  __device__ __forceinline__ bool AreWanted() const { return params_.sums; }
  // True where the next panel falls to this tile.
  __device__ __forceinline__ bool TakesNext() {
    if (wait_-- > 0) return false;
    wait_ = params_.col_tiles - 1;
    return true;
  }
  __device__ __forceinline__ void Add(int i, uint64_t of_a) {
    if constexpr (kByProducts) MultiplyAdd<E, Source::kAlongM, false>(d_[i], of_a, ones_, true);
  }
  __device__ __forceinline__ void Add(int i, const uint32_t (&of_a)[4]) {
    if constexpr (kMade) {
      d_[i][0][0] += __uint_as_float(of_a[0]) + __uint_as_float(of_a[2]);
      d_[i][0][2] += __uint_as_float(of_a[1]) + __uint_as_float(of_a[3]);
    }
  }
  // Stores the part of a segment; the last split of a tile clears the parts that it does not have.
  __device__ __forceinline__ void Store(const Segment& segment, int first_row) {
    if (!kMade || !params_.sums) return;
    if constexpr (kOfFragments) {
#pragma unroll
      for (int q = 0; q < 2 * T::kWarpgroupM; q++) {
        float& sum = d_[q / 2][0][q % 2 * 2];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      }
    }
    if (threadIdx.x % 4) return;
    const int end = segment.split + 1 < segment.splits ? segment.split + 1 : params_.sum_parts;
    const int row0 = first_row + RowOfThread<Source>(threadIdx.x % 128);
    const int rows = kTransposed<Source> ? params_.n : params_.m;
#pragma unroll 1
    for (int part = segment.split; part < end; part++) {
      float* const to =
          params_.sums + ((int64_t)col_tile_ * params_.sum_parts + part) * rows + row0;
#pragma unroll
      for (int i = 0; i < 2 * T::kWarpgroupM; i++) {
        const int row = i / 2 * 64 + i % 2 * kBelow<Source>;
        if (row0 + row < rows) to[row] = part == segment.split ? d_[i / 2][0][i % 2 * 2] : 0.f;
      }
    }
  }

 private:
  const Params& params_;
  uint64_t ones_;
  float d_[T::kWarpgroupM][1][4];
  int col_tile_, wait_;
};

// Adds the products of `count` panels, first into zeros. Each stage is released as soon as the
// products that read it are done; `issued` is called when all are under way.
template <class E, class T, bool kAlongM, bool kAlongN, class Sums, class Release, class Issued>
__device__ __forceinline__ void MultiplyPanels(Accumulators<T>& d, Sums& sums, int count,
                                               uint32_t memory, uint32_t full, int first_row,
                                               RingPosition<T::kStages>& at, Release&& release,
                                               Issued&& issued) {
  constexpr int kAcross = 128 / (int)sizeof(E) * T::kRowNbytes;  // a column of boxes
  int previous = 0;
  for (int panel = 0; panel < count; panel++, at.Advance()) {
    const uint32_t a = memory + at.stage * T::kStageNbytes + first_row * T::kRowNbytes;
    const uint32_t b = memory + at.stage * T::kStageNbytes + T::kPanelA;
    const auto of_a = [&](int i, int k) {
      const uint32_t rows = a + i * 64 * T::kRowNbytes;
      return kAlongM ? Descriptor(rows + k * 2048, kAcross, 1024)
                     : Descriptor(rows + k * 32, 16, 1024);
    };
    WaitForPhase(full + at.stage * 8, at.parity);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 bytes of K, or 16 rows of it
      const uint64_t of_b =
          kAlongN ? Descriptor(b + k * 2048, kAcross, 1024) : Descriptor(b + k * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++)
        MultiplyAdd<E, kAlongM, kAlongN>(d[i], of_a(i, k), of_b, panel + k > 0);
    }
    if (Sums::kByProducts && sums.TakesNext()) {
      BeginProducts();
#pragma unroll
      for (int q = 0; q < 4 * T::kWarpgroupM; q++) sums.Add(q / 4, of_a(q / 4, q % 4));
    }
    CloseProducts();
    WaitForProducts<1>();
    if (panel > 0) release(previous);
    previous = at.stage;
  }
  issued();
  WaitForProducts<0>();
  release(previous);
}

// The same of a tile whose B stays in memory, and whose A is one stage: the pixels of blocks of
// positions, which products at other kernel offsets read shifted.
template <class E, class T, class Release, class Issued>
__device__ __forceinline__ void MultiplyShifted(Accumulators<T>& d, uint32_t memory, uint32_t full,
                                                RingPosition<T::kStages>& at, Release&& release,
                                                Issued&& issued) {
  const uint32_t a = memory + at.stage * T::kStageNbytes, b = memory + T::kFilterAt;
  WaitForPhase(full + T::kFilterBarrierAt * 8, 0);
  WaitForPhase(full + at.stage * 8, at.parity);
  BeginProducts();
#pragma unroll
  for (int offset = 0; offset < T::kOffsets; offset++) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint64_t of_b = Descriptor(b + offset * T::kPanelB + k * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++)
        MultiplyAdd<E, false, false>(
            d[i],
            Descriptor(a + i * T::kBlockNbytes + T::ShiftOf(offset) + k * 32, 16, T::kLineNbytes),
            of_b, offset + k > 0);
    }
  }
  CloseProducts();
  issued();
  WaitForProducts<0>();
  release(at.stage);
  at.Advance();
}

// ---- the epilogue ----

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
struct PairOfBoth {
  uint32_t c, codes;
};
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
  static constexpr bool kHasCodes = sizeof(E) == 2 && T::kHasCodes;
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
      const int boxes = SideIsCoded() ? 1 : min(kCount, T::kBuffers);
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

  // Stores box `index` of C and, behind the second one, the box of codes: make(i, j, half) gives a
  // pair of each.
  template <class Make>
  __device__ __forceinline__ void StoreWithCodes(const CUtensorMap* map,
                                                 const CUtensorMap* map_codes, int index,
                                                 Make&& make) {
    if (threadIdx.x % 32 == 0) WaitForStoresReads();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowGroups; i++) {
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const PairOfBoth both = make(i, j + k / 2, k % 2);
          x[k] = both.c;
          *(uint16_t*)(BufferOf(0) + PlaceOfCodes(index, i, j + k / 2, k % 2)) =
              (uint16_t)both.codes;
        }
        StageBlocks(BufferOf(1), i, j, x);
      }
    }
    StoreStaged(BufferOf(1), map, index);
    if (index == 1) StoreStaged(BufferOf(0), map_codes, 0);
  }

  // Stores box `index` of C: make(i, j, half, codes) is a pair of them by those of the side.
  template <class Make>
  __device__ __forceinline__ void StoreByCodes(const CUtensorMap* map, int index, Make&& make) {
    if (index == 0) WaitForPhase(BarrierOf(0), loaded_.parity);
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
                      *(const uint16_t*)(BufferOf(0) + PlaceOfCodes(index, i, j + k / 2, k % 2)));
        StageBlocks(BufferOf(1), i, j, x);
      }
    }
    StoreStaged(BufferOf(1), map, index);
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
  __device__ __forceinline__ bool SideIsCoded() const {
    return kHasCodes && params_.gradient == GradientCode::kMulCoded;
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
  // Where the codes of a pair of box `index` are in their buffer, a byte each.
  static __device__ __forceinline__ int PlaceOfCodes(int index, int i, int j, int half) {
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

// The codes of two derivatives, the first in the lower byte; by the last bits of 1.5 * 2^23 and
// more, which the addition rounds to.
__device__ __forceinline__ uint32_t CodesOf(float left, float right) {
  constexpr float kLast = 12582912.f;
  const auto bits = [](float slope) {
    return __float_as_uint(fmaf(slope, kCodesOfOne, kLast + kCodeOfZero));
  };
  return __byte_perm(bits(left), bits(right), 0x0040);
}

// Functions of the epilogue that can give their derivative as well.
struct GeluOfC {
  __device__ __forceinline__ float operator()(float, float x) const { return fast::Gelu(x); }
  __device__ __forceinline__ fast::WithSlope Both(float x) const { return fast::GeluBoth(x); }
};
struct GateOfC {
  fast::Gate gate;
  __device__ __forceinline__ float operator()(float, float x) const { return gate.Of(x); }
  __device__ __forceinline__ fast::WithSlope Both(float x) const { return gate.Both(x); }
};
template <class F>
constexpr bool kHasSlope =
    std::is_same_v<std::decay_t<F>, GeluOfC> || std::is_same_v<std::decay_t<F>, GateOfC>;

// Calls f with the epilogue's function of an element of side and one of C, and with its code as a
// type, below 0 that of a gradient. All code is inlined, for a call would make the compiler wait
// after each wgmma.
template <class F>
__device__ __forceinline__ void WithFunction(const Params& params, F&& f) {
  const auto gate = params.gate;
  switch (params.activation) {
    case 1:
      return f([](float, float x) { return fn::Relu{}(x); }, Code<1>());
    case 2:
      return f([](float, float x) { return fast::Logistic(x); }, Code<2>());
    case 5:
      return f(GeluOfC{}, Code<5>());
    case 4:
    case 6:
      return f(GateOfC{gate}, Code<6>());
  }
  switch (params.gradient) {
    case 1:
      return f([](float side, float x) { return fn::ReluGradient{}(side, x); }, Code<-1>());
    case 3:
      return f([](float side, float x) { return fast::GeluGradient(side, x); }, Code<-3>());
    case 2:
    case 4:
      return f([gate](float side, float x) { return gate.Gradient(side, x); }, Code<-4>());
    case GradientCode::kMulCoded:
      return f([](float side, float x) { return fn::MulCoded{}(side, x); },
               Code<-GradientCode::kMulCoded>());
  }
}

// The bias of a tile's columns, in pairs as a thread holds a row of accumulators, or a column.
template <class T, class Source>
constexpr int kBiasPairs = kTransposed<Source> ? T::kWarpgroupM : T::kBlocks;
template <class E, class T, class Source>
__device__ __forceinline__ void ReadBias(Pair<E> (&bias)[kBiasPairs<T, Source>],
                                         const Params& params, const TileOrigin& origin) {
  constexpr int kStep = kTransposed<Source> ? 64 : 8;
  const int col = PlaceOfPair<Source>(origin, threadIdx.x % 128, 0, 0, 0).col;
#pragma unroll
  for (int k = 0; k < kBiasPairs<T, Source>; k++)
    if (col + k * kStep < params.n)
      bias[k] = *(const Pair<E>*)((const E*)params.bias + col + k * kStep);
}

// Stores a consumer's part of a tile with its epilogue. The loop over boxes is rolled where there
// is a function, so that there is code for two; accumulators move down to the registers that it
// reads.
template <class E, class T, class Source, bool kSide, bool kBefore, bool kRolled,
          bool kCoded = false, class F>
__device__ __forceinline__ void StoreBoxes(Accumulators<T>& d,
                                           Pair<E> (&bias)[kBiasPairs<T, Source>],
                                           Boxes<E, T, Source>& boxes, const Params& params,
                                           const CUtensorMap* map_c, const CUtensorMap* map_other,
                                           F&& function) {
  constexpr int kBlocks = Boxes<E, T, Source>::kBlocks, kCount = Boxes<E, T, Source>::kCount;
  constexpr int kAtOnce = !kRolled ? kCount : kCount < 2 ? 1 : 2;
  constexpr bool kInPieces =
      kRolled && (sizeof(E) == 2 || (kSide && Boxes<E, T, Source>::kStagesSide));
#pragma unroll 1
  for (int first = 0; first < kCount; first += kAtOnce) {
#pragma unroll
    for (int box = 0; box < kAtOnce; box++) {
      if (Source::kOfColumns == OfColumns::kNothing && params.bias) {
#pragma unroll
        for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
          for (int j = 0; j < kBlocks; j++) {
            float (&v)[4] = d[i][box * kBlocks + j];
            const Pair<E>& added = bias[kTransposed<Source> ? i : box * kBlocks + j];
            const float even = ElementOf<0, E>(added), odd = ElementOf<1, E>(added);
#pragma unroll
            for (int half = 0; half < 2; half++)
              v[OfPair<Source>(half, 0)] += even, v[OfPair<Source>(half, 1)] += odd;
          }
        }
      }
      const auto pair_of = [&](int i, int j, int half, const Pair<E>& side, auto&& f) {
        const float (&v)[4] = d[i][box * kBlocks + j];
        return RoundedPair<E>(f(ElementOf<0, E>(side), v[OfPair<Source>(half, 0)]),
                              f(ElementOf<1, E>(side), v[OfPair<Source>(half, 1)]));
      };
      if constexpr (kInPieces && kCoded) {
        boxes.StoreByCodes(map_c, first + box, [&](int i, int j, int half, uint32_t codes) {
          const float (&v)[4] = d[i][box * kBlocks + j];
          return RoundedPair<E>(function(ByteToFloat(codes, 0), v[2 * half]),
                                function(ByteToFloat(codes, 1), v[2 * half + 1]));
        });
      } else if constexpr (kInPieces) {
        if constexpr (kBefore && kHasSlope<F> && Boxes<E, T, Source>::kHasCodes)
          if (params.slope) {
            boxes.StoreWithCodes(map_c, map_other, first + box, [&](int i, int j, int half) {
              const float (&v)[4] = d[i][box * kBlocks + j];
              const fast::WithSlope left = function.Both(v[2 * half]),
                                    right = function.Both(v[2 * half + 1]);
              return PairOfBoth{RoundedPair<E>(left.value, right.value),
                                CodesOf(left.slope, right.slope)};
            });
            continue;
          }
        if (kBefore && params.before)
          boxes.template StorePieces<false>(
              map_other, nullptr, first + box, [&](int i, int j, int half, const Pair<E>& side) {
                return pair_of(i, j, half, side, [](float, float v) { return v; });
              });
        boxes.template StorePieces<kSide>(map_c, map_other, first + box,
                                          [&](int i, int j, int half, const Pair<E>& side) {
                                            return pair_of(i, j, half, side, function);
                                          });
      } else {
        typename Boxes<E, T, Source>::Pairs side = {}, x;
        if constexpr (kSide) boxes.ReadSide(map_other, first + box, side);
#pragma unroll
        for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
          for (int j = 0; j < kBlocks; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
              x[i][j][half] = pair_of(i, j, half, side[i][j][half], function);
          }
        }
        if constexpr (Source::kOfColumns == OfColumns::kGradientSums) boxes.Keep(x, box);
        boxes.template Store<kSide>(x, map_c, params.c, first + box);
        if ((box + 1) % T::kBuffers == 0) {
          if constexpr (Source::kOfColumns == OfColumns::kMoments)
            boxes.StoreMoments(box + 1 - T::kBuffers);
          if constexpr (Source::kOfColumns == OfColumns::kGradientSums)
            boxes.StoreSums(box + 1 - T::kBuffers);
        }
      }
    }
#pragma unroll
    for (int j = 0; j + kAtOnce * kBlocks < T::kBlocks; j++) {
      if constexpr (!kTransposed<Source>) bias[j] = bias[j + kAtOnce * kBlocks];
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) d[i][j][e] = d[i][j + kAtOnce * kBlocks][e];
      }
    }
  }
}

template <class E, class T, class Source>
__device__ __forceinline__ void StoreTile(Accumulators<T>& d,
                                          Pair<E> (&bias)[kBiasPairs<T, Source>],
                                          Boxes<E, T, Source>& boxes, const Params& params,
                                          const CUtensorMap* map_c, const CUtensorMap* map_other) {
  constexpr bool kHasGradients = sizeof(E) == 4 || Boxes<E, T, Source>::kCount <= T::kBuffers;
  if constexpr (Source::kOfColumns == OfColumns::kGradientSums && kHasGradients)
    if (params.side)
      return StoreBoxes<E, T, Source, true, false, false>(
          d, bias, boxes, params, map_c, map_other, [](float side, float x) { return side + x; });
  if (!Source::kHasEpilogue || (!params.activation && !params.gradient))
    return StoreBoxes<E, T, Source, false, false, false>(d, bias, boxes, params, map_c, map_other,
                                                         [](float, float x) { return x; });
  if constexpr (Source::kHasEpilogue)
    WithFunction(params, [&](auto&& function, auto code) {
      constexpr bool kActivation = code.value > 0;
      if constexpr (kActivation)
        StoreBoxes<E, T, Source, false, sizeof(E) == 2, true>(d, bias, boxes, params, map_c,
                                                              map_other, function);
      else if constexpr (sizeof(E) == 2 && code.value == -GradientCode::kMulCoded) {
        if constexpr (Boxes<E, T, Source>::kHasCodes)
          StoreBoxes<E, T, Source, true, false, true, true>(d, bias, boxes, params, map_c,
                                                            map_other, function);
      } else if constexpr (kHasGradients) {
        StoreBoxes<E, T, Source, true, false, true>(d, bias, boxes, params, map_c, map_other,
                                                    function);
      }
    });
}

// ---- split-K ----

// Where a part of a tile lies, as consumers hold it: quads of accumulators, by thread.
template <class T>
__device__ __forceinline__ float4* PartialOf(const Params& params, int slot, uint32_t rank,
                                             int part) {
  const int64_t at = ((int64_t)slot * T::kCluster + rank) * T::kParts + part;
  return params.partial + at * T::kQuads * 128;
}
template <class T>
__device__ __forceinline__ unsigned* ArrivalsOf(const Params& params, const Segment& segment,
                                                uint32_t rank, int part) {
  return params.arrivals + (segment.tile * T::kCluster + (int)rank) * T::kParts + part;
}

// The quads of a thread that hold columns of a tile.
template <class T>
__device__ __forceinline__ int QuadsOf(int width) {
  return T::kFitted ? (width + 7) / 8 : T::kQuads;
}

template <class T>
__device__ __forceinline__ void WritePartial(const Accumulators<T>& d, const Params& params,
                                             const Segment& segment, int width, uint32_t rank,
                                             int part, int consumer) {
  const int thread = threadIdx.x % 128;
  float4* to = PartialOf<T>(params, segment.slot, rank, part) + thread;
  const int quads = QuadsOf<T>(width);
#pragma unroll
  for (int q = 0; q < T::kQuads; q++) {
    if (q >= quads) break;
    const float (&x)[4] = d[q / T::kBlocks][q % T::kBlocks];
    to[q * 128] = make_float4(x[0], x[1], x[2], x[3]);
  }
  __threadfence();
  SyncThreads(1 + consumer, 128);
  if (thread == 0 && segment.splits > 1) CountUp(ArrivalsOf<T>(params, segment, rank, part));
}

// Waits until `count` splits of a tile are written.
__device__ __forceinline__ void WaitForSplits(const unsigned* arrivals, int count, int consumer) {
  if (threadIdx.x % 128 == 0)
    while (LoadAcquire(arrivals) < (unsigned)count) __nanosleep(64);
  SyncThreads(1 + consumer, 128);
}

// Adds the other splits of a tile to the first, which accumulators hold.
template <class T>
__device__ __forceinline__ void AddPartials(Accumulators<T>& d, const Params& params,
                                            const Segment& segment, uint32_t rank, int part,
                                            int consumer) {
  constexpr int kAtOnce = 8;
  WaitForSplits(ArrivalsOf<T>(params, segment, rank, part), segment.splits - 1, consumer);
#pragma unroll 1
  for (int split = 1; split < segment.splits; split++) {
    const float4* from = PartialOf<T>(params, segment.slot + split, rank, part) + threadIdx.x % 128;
#pragma unroll
    for (int first = 0; first < T::kQuads; first += kAtOnce) {
      float4 v[kAtOnce];
#pragma unroll
      for (int q = 0; q < kAtOnce; q++) v[q] = from[(first + q) * 128];
#pragma unroll
      for (int q = 0; q < kAtOnce; q++) {
        float (&x)[4] = d[(first + q) / T::kBlocks][(first + q) % T::kBlocks];
        x[0] += v[q].x, x[1] += v[q].y, x[2] += v[q].z, x[3] += v[q].w;
      }
    }
  }
}

__device__ __forceinline__ void Add(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

// Adds to the sums of `quad`, and of those 128 further on, the parts of every `step`-th split from
// `first` on, in that order. Quads from `end` on are left out.
template <class T, int kBatch>
__device__ __forceinline__ void AddSplits(float4 (&sums)[kBatch], const float4* parts, int quad,
                                          int end, int first, int step, int splits) {
  constexpr int64_t kOfSlot = (int64_t)T::kCluster * T::kParts * T::kQuads * 128;
  constexpr int kAtOnce = 24 / kBatch;  // loads that are under way
#pragma unroll 1
  for (int begin = first; begin < splits; begin += kAtOnce * step) {
    float4 v[kAtOnce][kBatch];
#pragma unroll
    for (int s = 0; s < kAtOnce; s++) {
      const int split = begin + s * step;
#pragma unroll
      for (int b = 0; b < kBatch; b++)
        v[s][b] = split < splits && quad + b * 128 < end ? parts[split * kOfSlot + quad + b * 128]
                                                         : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; s++)
#pragma unroll
      for (int b = 0; b < kBatch; b++) Add(sums[b], v[s][b]);
  }
}

// Waits for all splits of a tile, adds one of as many slices of them, and stores it; whole tiles
// come here as well where rows allow no wide access.
template <class E, class T, class Source>
__device__ __forceinline__ void StoreSlice(const Params& params, const Segment& segment,
                                           const TileOrigin& origin, uint32_t rank, int part,
                                           int consumer) {
  constexpr int kBatch = 4, kMostLanes = 8;
  const int width = WidthOf<T>(params, origin, kTransposed<Source>);
  const int items = QuadsOf<T>(width) * 128;
  const int thread = threadIdx.x % 128;
  const unsigned* arrivals = ArrivalsOf<T>(params, segment, rank, part);
  if (segment.splits > 1)
    WaitForSplits(arrivals, segment.splits, consumer);
  else
    SyncThreads(1 + consumer, 128);
  // Under ping-pong both consumers make slices, of whole tiles the one that has multiplied it.
  const int in_split = T::kPingPong && segment.splits > 1 ? T::kConsumers : 1;
  const int slice = segment.split * in_split + (in_split > 1 ? consumer : 0);
  const int begin = items * slice / (segment.splits * in_split);
  const int end = items * (slice + 1) / (segment.splits * in_split);
  const float4* const parts = PartialOf<T>(params, segment.slot - segment.split, rank, part);
  // Where its elements of C end.
  const int rows = kTransposed<Source> ? origin.col + width : params.m;
  const int cols = kTransposed<Source> ? params.n : origin.col + width;
  // Adjacent lanes share the splits of a quad where the slice has few.
  int lanes = 1;
  while (lanes < kMostLanes && 2 * lanes * (end - begin) <= 128) lanes *= 2;
#pragma unroll 1
  for (int base = begin; base < end; base += kBatch * 128) {
    const int first = base + thread / lanes;
    float4 sums[kBatch] = {};
    if (end - begin <= 128) {
      float4 sum[1] = {};
      AddSplits<T>(sum, parts, first, end, thread % lanes, lanes, segment.splits);
#pragma unroll 1
      for (int distance = 1; distance < lanes; distance *= 2)
        Add(sum[0], ShuffleXor(sum[0], distance, 32));
      sums[0] = sum[0];
    } else {
      AddSplits<T>(sums, parts, first, end, 0, 1, segment.splits);
    }
    const int last = thread % lanes ? base : min(end, base + kBatch * 128);
#pragma unroll 1
    for (int item = first; item < last; item += 128) {
      const float4 sum = sums[0];
#pragma unroll
      for (int b = 1; b < kBatch; b++) sums[b - 1] = sums[b];
      const int q = item / 128;
#pragma unroll 1
      for (int half = 0; half < 2; half++) {
        const auto [row, col] =
            PlaceOfPair<Source>(origin, item % 128, q / T::kBlocks, q % T::kBlocks, half);
        const int valid = cols - col;
        if (valid <= 0 || row >= rows) continue;
        const int64_t at = ((int64_t)origin.z * params.m + row) * params.n + col;
        const float left = kTransposed<Source> ? sum.y : sum.z;
        const float right = kTransposed<Source> ? sum.z : sum.y;
        float x = half ? left : sum.x, y = half ? sum.w : right;
        if (params.bias) {
          const Pair<E> bias = ReadPair((const E*)params.bias + col, params.aligned, valid);
          x += ElementOf<0, E>(bias), y += ElementOf<1, E>(bias);
        }
        const auto write = [&](void* to, float a, float b) {
          WritePair((E*)to + at, params.aligned, valid, RoundedPair<E>(a, b));
        };
        if (params.before && !params.slope) write(params.before, x, y);
        const bool coded = sizeof(E) == 2 && params.gradient == GradientCode::kMulCoded;
        float sides[2] = {};
        if (params.side && !coded) {
          const Pair<E> side = ReadPair((const E*)params.side + at, params.aligned, valid);
          sides[0] = ElementOf<0, E>(side), sides[1] = ElementOf<1, E>(side);
        }
        for (int e = 0; e < min(valid, 2) && coded; e++)
          sides[e] = (float)((const uint8_t*)params.side)[at + e];
        if constexpr (Source::kHasEpilogue)
          WithFunction(params, [&](auto&& function, auto) {
            if constexpr (kHasSlope<decltype(function)>)
              if (params.slope) {
                const uint32_t codes = CodesOf(function.Both(x).slope, function.Both(y).slope);
                for (int e = 0; e < min(valid, 2); e++)
                  ((uint8_t*)params.before)[at + e] = (uint8_t)(codes >> 8 * e);
              }
            x = function(sides[0], x), y = function(sides[1], y);
          });
        write(params.c, x, y);
      }
    }
  }
}

// Those of a warp of the consumers.
template <class E, class T, class Source>
__device__ __forceinline__ Boxes<E, T, Source> BoxesOf(const Params& params,
                                                       const typename Source::Layout& layout,
                                                       unsigned char* shared, uint32_t barriers,
                                                       int warp) {
  return Boxes<E, T, Source>(params, layout,
                             shared + T::kStages * T::kStageNbytes + warp * (T::kStagingNbytes / 4),
                             barriers + (T::kBoxBarriersAt + warp * T::kBuffers) * 8,
                             {shared + T::kAuxAt, barriers + T::kAuxBarriersAt * 8});
}

template <class E, class T, class Source, bool kExact>
__device__ __forceinline__ void Consume(const CUtensorMap* map_c, const CUtensorMap* map_other,
                                        const Params& params, const typename Source::Layout& layout,
                                        unsigned char* shared, uint32_t full, uint32_t empty) {
  using R = std::conditional_t<Source::kFloatResult, float, E>;  // of C
  constexpr bool kInBoxes = !T::kFitted;
  const int consumer = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int part = T::kPingPong ? 0 : consumer, first_row = part * T::kRows;  // of a tile
  const uint32_t rank = ClusterRankOf<T>(), memory = SharedAddress(shared);
  const auto origin_of = [&](const Segment& segment) {
    TileOrigin origin = OriginOf<T>(params, segment.tile, rank);
    origin.row += first_row;
    return origin;
  };
  const auto release = [&](int stage) {
    if (thread < T::kCluster) ArriveAt(empty + stage * 8, thread);
  };
  // Under ping-pong a consumer waits for its turn: it may not be two phases of a stage ahead.
  constexpr int kTurn = 1 + T::kConsumers;
  if (T::kPingPong && consumer == 1) ArriveThreads(kTurn, 256);
  Boxes<R, T, Source> boxes = BoxesOf<R, T, Source>(params, layout, shared, full, threadIdx.x / 32);
  Accumulators<T> d;
  RowSums<E, T, Source> sums(params, memory);
  Pair<R> bias[kBiasPairs<T, Source>];
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  Segment segment, next;
  bool more = segments.Next(next);
  for (int turn = 0; more; turn++) {
    segment = next;
    more = segments.Next(next);
    const int count = segment.end - segment.begin;
    const bool in_boxes = kInBoxes && IsInBoxes(params, segment);
    if (T::kPingPong && turn % 2 != consumer) {
      at.Advance(count);
      if (in_boxes) boxes.Skip();
      continue;
    }
    const TileOrigin origin = origin_of(segment);
    if (in_boxes) {
      boxes.Begin(origin, map_other);
      if (Source::kOfColumns == OfColumns::kNothing && params.bias)
        ReadBias<R, T, Source>(bias, params, origin);
    }
    sums.Begin(segment, origin.col);
    if (T::kPingPong) SyncThreads(kTurn + consumer, 256);
    const auto issued = [&] {
      if (T::kPingPong && more) ArriveThreads(kTurn + 1 - consumer, 256);
    };
    if constexpr (kExact)
      MultiplyFragmentsExactly<T, Source::kAlongM>(d, count, shared, full, first_row, at, release);
    else if constexpr (Source::kReadsA != ReadsA::kShared)
      MultiplyFragments<T, Source::kAlongM, Source::kTurnsB>(d, sums, count, shared, full,
                                                             first_row, at, release, issued);
    else if constexpr (T::kHasHalo)
      MultiplyShifted<E, T>(d, memory, full, at, release, issued);
    else
      MultiplyPanels<E, T, Source::kAlongM, Source::kAlongN>(d, sums, count, memory, full,
                                                             first_row, at, release, issued);
    sums.Store(segment, origin.row);
    if (in_boxes) {
      if (segment.splits > 1) AddPartials<T>(d, params, segment, rank, part, consumer);
      if constexpr (Source::kOfColumns == OfColumns::kMapped)
        Source::Map(d, params, layout, origin);
      if constexpr (kInBoxes) StoreTile<R, T, Source>(d, bias, boxes, params, map_c, map_other);
      continue;
    }
    const int width = WidthOf<T>(params, origin, kTransposed<Source>);
    WritePartial<T>(d, params, segment, width, rank, part, consumer);
    if (segment.splits == 1)
      StoreSlice<R, T, Source>(params, segment, origin, rank, part, consumer);
  }
  WaitForStores();
  // A cluster has written its splits before it waits for others': the first split of a tile is the
  // last that it makes.
  Segments<T> again(params);
  while (again.Next(segment) && segment.tile < params.split_tiles)
    if (segment.splits > 1 && !(params.in_boxes && segment.splits <= kMostOwned))
      StoreSlice<R, T, Source>(params, segment, origin_of(segment), rank, part, consumer);
}

template <class E, class T, class Source, bool kExact>
__global__ __launch_bounds__(T::kThreads, 1) void GemmKernel(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ CUtensorMap map_c, const __grid_constant__ CUtensorMap map_other,
    const Params params, const __grid_constant__ typename Source::Layout layout) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[T::kBarriers];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (T::kAlignment - 1);
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * T::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      InitBarrier(full + stage * 8, 1);
      InitBarrier(empty + stage * 8, (T::kPingPong ? 1 : T::kConsumers) * T::kCluster);
    }
    for (int k = T::kBoxBarriersAt; k < T::kBarriers; k++)
      InitBarrier(full + k * 8, Source::kTurnsB && k >= T::kTurnedAt ? kTurningWarps * 32 : 1);
    PublishBarriers();
  }
  if constexpr (RowSums<E, T, Source>::kByProducts) {
    if (threadIdx.x < T::kOnesNbytes / 4)
      ((uint32_t*)(shared + T::kOnesAt))[threadIdx.x] = Packed<E>(1.f, 1.f);
    LetBulkFollow();
  }
  if (T::kCluster > 1)
    MeetCluster();
  else
    __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<Source::kTurnsB ? 72 : 40>();
    const auto produce = [&](auto of_a, auto of_b) {
      Produce<T, Source, decltype(of_a)::value, decltype(of_b)::value>(
          &map_a, &map_b, params, layout, SharedAddress(shared), full, empty);
    };
    const int warp = threadIdx.x / 32 - T::kConsumers * 4, lane = threadIdx.x % 32;
    if constexpr (Source::kProducers == 1) {
      if (warp == 0 && lane == 0) produce(std::true_type(), std::true_type());
    } else {
      if (warp == 0 && lane == 0) produce(std::true_type(), std::false_type());
      if (warp == 1 && lane == 0) produce(std::false_type(), std::true_type());
    }
    if constexpr (Source::kTurnsB)
      if (warp > 0) TurnPanels<T, Source>(params, shared, full, full + T::kTurnedAt * 8, warp - 1);
    if constexpr (Source::kOfColumns == OfColumns::kGradientSums)
      if (warp == 2 && lane == 0)
        ProduceAux<E, T>(params, layout, SharedAddress(shared) + T::kAuxAt,
                         full + T::kAuxBarriersAt * 8);
  } else {
    RaiseRegisters<Source::kTurnsB ? 216 : 232>();
    Consume<E, T, Source, kExact>(&map_c, &map_other, params, layout, shared, full, empty);
  }
  TriggerProgrammaticLaunch();
  if (T::kCluster > 1) LeaveCluster();  // peers may still copy to its memory and arrive there
#endif
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
