// Tiles of a GEMM and which cluster computes what of them: the tiling, in types; what the kernel is
// told of a product; and the segments of a cluster, its share of the tiles that are split along K
// (stream-K) and then whole ones.
#pragma once
#include "cuda/gemm/fast_functions.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/runtime/divisor.cuh"

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
  // Of 16 bits, a tile has two boxes of results and one of slopes, which take a buffer each.
  static constexpr bool kHasSlopes = TileN == 128 && kBuffers == 2;
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
  unsigned* arrivals;  // zeros, by tile, block of the cluster and consumer, and so again
  void* c;
  void* before;  // of C's shape: C before its activation or, with `slope`, the
  bool slope;    // derivative of that, quantized to uint8; or null
  const void *bias,
      *side;  // (n), and of C's shape, of 16 bits uint8 where it is quantized; or null
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
// True where one cluster stores the tile of the segment from registers, and that which makes it.
__device__ __forceinline__ bool IsOwned(const Params& params, const Segment& segment) {
  return params.in_boxes && segment.splits <= kMostOwned;
}
__device__ __forceinline__ bool IsInBoxes(const Params& params, const Segment& segment) {
  return IsOwned(params, segment) && segment.split == 0;
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
        worker_(WorkerOf(params, blockIdx.x / T::kCluster)),
        whole_(params.split_tiles + blockIdx.x / T::kCluster),
        at_(ShareOf(worker_)),
        end_(ShareOf(worker_ + 1)) {}

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
                 worker_ - first,
                 last - first + 1,
                 worker_ + position};
      at_ += end - begin;
      return true;
    }
    segment = {whole_, 0, panels_, 0, 1, params_.workers + params_.split_tiles + worker_};
    whole_ += gridDim.x / T::kCluster;
    return segment.tile < params_.row_tiles * params_.col_tiles * params_.batch;
  }

 private:
  // Neighbors are workers at the same K, one of each group: they ask for the same panels at once.
  static __device__ __forceinline__ int WorkerOf(const Params& params, int cluster) {
    if (cluster >= params.workers) return cluster;
    const int turn = cluster / params.groups, group = cluster - turn * params.groups;
    return group * (params.workers / params.groups) + turn;
  }
  __device__ __forceinline__ int ShareOf(int worker) const {
    const int panels = params_.split_tiles * panels_;
    return worker < params_.workers ? panels * worker / params_.workers : panels;
  }
  __device__ __forceinline__ int WorkerAt(int panel) const {
    return ((panel + 1) * params_.workers - 1) / (params_.split_tiles * panels_);
  }

  const Params& params_;
  int panels_, worker_, whole_;
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

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
