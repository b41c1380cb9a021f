// What launches of hopper_kernel.cuh share: how tiles are cut along K, by a cost model, and the
// launch itself with the scratch memory of the parts. GEMM (hopper_launch.cu) and convolution
// (conv/channels_last_hopper.cuh) launch through here.
#pragma once
#include <algorithm>
#include <optional>

#include "cuda/gemm/hopper_kernel.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {

// A product of (m, panels of 128 bytes) by (panels, n), so many times.
struct Extents {
  int64_t m, n, panels, batch;
};

// Microseconds on an H200 of a tile: of a panel, of what a tile costs besides, and of its epilogue.
struct TileTime {
  int tile_m, tile_n, cluster;
  bool ping_pong;
  double panel_us, tile_us, epilogue_us;
};

// How many tiles are cut along K and into how many parts, and what everything takes.
struct Config {
  int index, split_tiles, splits;
  double us;
};

// The time with every tile in one piece, or with those that do not fill a wave of clusters cut
// along K into the best number of splits.
inline Config Estimated(const TileTime& time, const Extents& of, int multiprocessors, int index,
                        bool may_split = true) {
  constexpr int kMostSplits = 132;
  constexpr double kSplitUs = 6, kPartialNbytesUs = 3e6;  // bytes of parts, written and read, a us
  const int64_t clusters = multiprocessors / time.cluster;
  const int64_t tiles =
      CeilDiv(CeilDiv(of.m, time.tile_m), time.cluster) * CeilDiv(of.n, time.tile_n) * of.batch;
  const int64_t left = tiles % clusters;
  // Of a tile; under ping-pong one consumer's epilogue and the other's products go on together.
  const auto tile_us = [&](double of_panels) {
    const double main_us = of_panels * time.panel_us + time.tile_us;
    if (!time.ping_pong) return main_us + time.epilogue_us;
    return std::max(main_us, (main_us + time.epilogue_us) / 2);
  };
  const auto waves_us = [&](int64_t segments, int64_t of_panels) {
    return (double)CeilDiv(segments, clusters) * tile_us((double)of_panels);
  };
  Config best{index, 0, 1, waves_us(tiles, of.panels)};
  if (!left || !may_split) return best;
  for (int64_t splits = 2; splits <= std::min<int64_t>(of.panels / 2, kMostSplits); splits++) {
    const double nbytes = (double)(left * splits * time.cluster * time.tile_m * time.tile_n) * 8;
    const double us = waves_us(tiles - left, of.panels) +
                      waves_us(left * splits, CeilDiv(of.panels, splits)) + kSplitUs +
                      nbytes / kPartialNbytesUs;
    if (us < best.us) best = {index, (int)left, (int)splits, us};
  }
  return best;
}

static __global__ void ZeroKernel(unsigned* counters, int count) {
  for (int64_t i = FirstItem(); i < count; i += ItemStep()) counters[i] = 0;
}

struct Maps {
  CUtensorMap a, b, c, before;
};

// Launches a GEMM of `params`, of which this fills in how tiles are distributed.
template <class E, class T, class Source, bool kExact>
void LaunchTiles(const char* op, DLContext ctx, const Config& config, const Maps& maps,
                 Params params, const typename Source::Layout& layout, DLStream stream) {
  constexpr int kBand = 16;  // row tiles: their panels of A and a wave's of B stay in L2
  constexpr int kParts = T::kCluster * T::kParts;
  params.row_tiles = (int)CeilDiv(CeilDiv(params.m, T::kTileM), T::kCluster);
  params.col_tiles = (int)CeilDiv(params.n, T::kTileN);
  params.band = kBand / T::kCluster;
  params.split_tiles = config.split_tiles, params.splits = config.splits;
  const int64_t tiles = (int64_t)params.row_tiles * params.col_tiles * params.batch;
  const int64_t split_segments = (int64_t)config.split_tiles * config.splits;
  const int64_t clusters = std::min<int64_t>(Multiprocessors(ctx.device_id) / T::kCluster,
                                             split_segments + tiles - config.split_tiles);
  std::optional<Scratch> partial, arrivals;
  if (split_segments) {
    const int64_t counters = (int64_t)config.split_tiles * kParts;
    const int64_t nbytes = split_segments * kParts * T::kQuads * 128 * (int64_t)sizeof(float4);
    partial.emplace(ctx, nbytes, stream);
    arrivals.emplace(ctx, counters * (int64_t)sizeof(unsigned), stream);
    params.partial = (float4*)partial->data(), params.arrivals = (unsigned*)arrivals->data();
    Launch(op, ZeroKernel, Blocks(counters), kThreads, 0, stream, params.arrivals, (int)counters);
  }
  LaunchClusters(op, GemmKernel<E, T, Source, kExact>, (unsigned)(clusters * T::kCluster),
                 T::kCluster, T::kThreads, T::kSharedNbytes, true, stream, maps.a, maps.b, maps.c,
                 maps.before, params, layout);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
