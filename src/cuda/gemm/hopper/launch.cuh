// What launches of hopper/kernel.cuh share: how tiles are cut along K, by a cost model, and the
// launch itself with the scratch memory of the parts. GEMM (hopper/launch.cu) and convolution
// (conv/channels_last/hopper.cuh) launch through here.
#pragma once
#include <algorithm>
#include <numeric>
#include <optional>

#include "cuda/gemm/hopper/kernel.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/runtime/zeroed.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// A product of (m, panels of 128 bytes) by (panels, n), so many times. The bytes of its operands
// where they lie in memory as they are read, else 0: then what they cost is not known.
struct Extents {
  int64_t m, n, panels, batch;
  double nbytes = 0;
};

// Microseconds on an H200 of a tile: of a panel, of what a tile costs besides, and of its epilogue.
struct TileTime {
  int tile_m, tile_n, cluster;
  bool ping_pong;
  double panel_us, tile_us, epilogue_us;
};

// How many tiles are cut along K and among how many clusters, and what everything takes.
struct Config {
  int index, split_tiles, workers;
  double us;
};

// The time with every tile in one piece, or with those that do not fill a wave of clusters shared
// by all clusters, or by as many as let each tile have the same number of them. Then all work at
// the same K, so that tiles read operands that are larger than the L2 cache together. Products of
// few tiles or a short K may take as long as their operands: from memory, or through the cache.
inline Config Estimated(const TileTime& time, const Extents& of, int multiprocessors, int index,
                        bool may_split = true) {
  // Bytes a microsecond: of parts, written and read; of panels; of operands from memory.
  constexpr double kPartialNbytesUs = 3e6, kPanelNbytesUs = 7e6, kMemoryNbytesUs = 3.3e6;
  constexpr double kSplitUs = 6, kCacheNbytes = 40e6, kApart = 1.15;
  const int64_t clusters = multiprocessors / time.cluster;
  const int64_t row_tiles = CeilDiv(CeilDiv(of.m, time.tile_m), time.cluster);
  const int64_t col_tiles = CeilDiv(of.n, time.tile_n), tiles = row_tiles * col_tiles * of.batch;
  const int64_t left = tiles % clusters, waves = tiles / clusters;
  // Of a tile; under ping-pong one consumer's epilogue and the other's products go on together.
  const auto tile_us = [&](int64_t panels) {
    const double main_us = (double)panels * time.panel_us + time.tile_us;
    if (!time.ping_pong) return main_us + time.epilogue_us;
    return std::max(main_us, (main_us + time.epilogue_us) / 2);
  };
  const bool is_large = of.nbytes > kCacheNbytes;
  const double panel_nbytes =
      128. * (double)(of.panels * of.batch * (of.m * col_tiles + of.n * row_tiles));
  const double read_us = std::max(of.nbytes > 0 ? panel_nbytes / kPanelNbytesUs : 0,
                                  is_large ? of.nbytes / kMemoryNbytesUs : 0);
  Config best{index, 0, 0, std::max(read_us, (double)(waves + (left > 0)) * tile_us(of.panels))};
  if (!left || !may_split || left * of.panels * clusters > INT32_MAX) return best;
  const auto consider = [&](int64_t workers) {
    const int64_t share = CeilDiv(left * of.panels, workers), parts = left + workers;
    if (workers == left || left * of.panels / workers < 2) return;
    const double nbytes = (double)(parts * time.cluster * time.tile_m * time.tile_n) * 8;
    const double main_us = std::max(read_us, (double)waves * tile_us(of.panels) + tile_us(share));
    const double us =
        main_us * (is_large && workers % left ? kApart : 1) + kSplitUs + nbytes / kPartialNbytesUs;
    if (us < best.us) best = {index, (int)left, (int)workers, us};
  };
  consider(clusters);
  consider(clusters / left * left);
  // Where K is too short for all clusters to have two panels, fewer share the tiles of a product.
  const bool is_short = of.nbytes > 0 && left * of.panels < 2 * clusters;
  for (int64_t splits = of.panels / 2; is_short && splits > 1; splits /= 2) consider(left * splits);
  return best;
}

// True where all tiles, of so many panels, are stored from the registers of one cluster.
inline bool AllInBoxes(const Config& config, int64_t panels) {
  const auto worker_at = [&](int64_t panel) {
    return ((panel + 1) * config.workers - 1) / (config.split_tiles * panels);
  };
  for (int64_t tile = 0; tile < config.split_tiles; tile++) {
    const int64_t first = tile * panels;
    if (worker_at(first + panels - 1) - worker_at(first) >= kMostOwned) return false;
  }
  return true;
}

struct Maps {
  CUtensorMap a, b, c, other;  // those of C, and of its side or C before its activation, of 16 rows
};

// Columns from one tile to the next. The tiles of a fitted tiling are about as wide as each other,
// in whole boxes of 128 bytes; the last one has the rest.
template <class E, class T>
int StepOf(int cols, int tiles) {
  constexpr int kOfBox = 128 / (int)sizeof(E);
  if (!T::kFitted || tiles == 1) return T::kTileN;
  const int even = (cols / tiles + kOfBox / 2) / kOfBox * kOfBox;
  const int least = CeilDiv32(cols - T::kTileN, (tiles - 1) * kOfBox) * kOfBox;
  return std::min(T::kTileN, std::max(least, even));
}

// Launches a GEMM of `params`, of which this fills in how tiles are distributed.
template <class E, class T, class Source, bool kExact>
void LaunchTiles(const char* op, DLContext ctx, const Config& config, const Maps& maps,
                 Params params, const typename Source::Layout& layout, DLStream stream) {
  constexpr int kBand = 16;  // row tiles: their panels of A and a wave's of B stay in L2
  constexpr bool kTurned = kTransposed<Source>;
  const int rows = kTurned ? params.n : params.m, cols = kTurned ? params.m : params.n;
  params.row_tiles = (int)CeilDiv(CeilDiv(rows, T::kTileM), T::kCluster);
  params.col_tiles = (int)CeilDiv(cols, T::kTileN);
  params.step = StepOf<E, T>(cols, params.col_tiles);
  params.band = kBand / T::kCluster;
  params.by_tiles = Divisor((int64_t)params.row_tiles * params.col_tiles);
  params.by_tiles_of_band = Divisor((int64_t)params.band * params.col_tiles);
  params.by_band = Divisor(params.band);
  params.by_last_band = Divisor((params.row_tiles - 1) % params.band + 1);
  params.split_tiles = config.split_tiles, params.workers = config.workers;
  params.groups = std::max(1, std::gcd(config.split_tiles, config.workers));
  const int64_t tiles = (int64_t)params.row_tiles * params.col_tiles * params.batch;
  const int most = Multiprocessors(ctx.device_id) / T::kCluster;
  const int clusters = params.split_tiles ? most : (int)std::min<int64_t>(most, tiles);
  std::optional<Scratch> partial;
  const int64_t parts = params.split_tiles + params.workers + (params.in_boxes ? 0 : clusters);
  if (parts) {
    const int64_t of_part = T::kCluster * T::kParts * T::kQuads * 128 * (int64_t)sizeof(float4);
    partial.emplace(ctx, parts * of_part, stream);
    params.partial = (float4*)partial->data();
  }
  if (params.split_tiles)
    params.arrivals =
        ZeroedCounters(op, ctx.device_id, params.split_tiles * T::kCluster * T::kParts, stream);
  LaunchClusters(op, GemmKernel<E, T, Source, kExact>, (unsigned)(clusters * T::kCluster),
                 T::kCluster, T::kThreads, T::kSharedNbytes, true, stream, maps.a, maps.b, maps.c,
                 maps.other, params, layout);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
