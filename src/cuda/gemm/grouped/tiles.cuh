// Grouped products by the tiles of gemm/kernel.cuh: persistent blocks walk over the tiles of all
// groups, and each tile is one of a GEMM that begins at its group's rows. Limited as that is, by
// FFMA or mma.sync, and by tiles that a group does not fill.
#pragma once
#include <algorithm>

#include "cuda/gemm/grouped/grouped.cuh"
#include "cuda/gemm/kernel.cuh"

namespace dlsys {
namespace cuda {

// The product of the group that `tiles` is at, of whose operands the GEMM has the first addresses.
__device__ __forceinline__ void BeginGroup(const GroupTiles& tiles, const GroupedShape& shape,
                                           GemmParams* params) {
  Gemm& gemm = params->gemm;
  const int64_t begin = tiles.begin(), size = tiles.end() - begin;
  gemm.a += begin * shape.k;
  if (shape.contracts) {
    gemm.b += begin * shape.n;
    gemm.c += tiles.group() * shape.k * shape.n;
    gemm.k = size;
  } else {
    gemm.b += tiles.group() * shape.k * shape.n;
    gemm.c += begin * shape.n;
    gemm.m = size;
    if (tiles.IsRest()) gemm.k = 0;
  }
  params->k_slice = gemm.k;
}

template <class T, template <class, bool, bool> class Accumulator, bool kTransA, bool kTransB>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    GroupedTilesKernel(const Grouped p, const GemmParams of_all) {
  float* const memory = DynamicShared<float>();
  __shared__ float thread_sums[T::kThreads];
  GridDependencySynchronize();
  if (FirstItem() == 0) TellOfSizes(p);
  GroupTiles tiles(p.sizes, p.shape, T::kTileM, T::kTileN);
  // Loop bounds are uniform in the block, as __syncthreads requires.
  for (int64_t tile = blockIdx.x; tiles.GoTo(tile); tile += gridDim.x) {
    GemmParams params = of_all;
    BeginGroup(tiles, p.shape, &params);
    const TileCoord coord{tiles.row(), tiles.col(), 0};
    Mainloop<T, Accumulator, kTransA, kTransB> mainloop(params, coord, memory);
    mainloop.Begin();
    mainloop.Run(OperandSums(params.gemm, coord), thread_sums, [] {});
    WriteTile<T>(params, coord, memory);
    __syncthreads();  // before the next tile's panels
  }
}

template <class T, template <class, bool, bool> class Accumulator>
constexpr size_t kGroupedNbytes = std::max({MemoryNbytes<T, Accumulator<T, false, false>>(),
                                            MemoryNbytes<T, Accumulator<T, false, true>>(),
                                            MemoryNbytes<T, Accumulator<T, true, false>>()});

template <class T, template <class, bool, bool> class Accumulator>
void LaunchGroupedTiles(const char* op, const Grouped& p, DLStream stream) {
  const GroupedShape& shape = p.shape;
  const Gemm gemm{(const float*)p.a, (const float*)p.b, (float*)p.c,   shape.k, shape.n,
                  shape.k,           shape.contracts,   shape.trans_b, p.ctx};
  const GemmParams params = MakeParams(op, gemm, TileSize{T::kTileM, T::kTileN}, 1);
  const int64_t tiles = GroupTiles::MostRowTiles(shape, T::kTileM) * CeilDiv(shape.n, T::kTileN);
  const int64_t most = (int64_t)Multiprocessors(p.ctx.device_id) * std::max(T::kResident, 1);
  const auto launch = [&](auto kernel) {
    LaunchClusters(op, kernel, (unsigned)std::min(tiles, most), 1, T::kThreads,
                   kGroupedNbytes<T, Accumulator>, params.allow_pdl, stream, p, params);
  };
  if (shape.contracts) return launch(GroupedTilesKernel<T, Accumulator, true, false>);
  shape.trans_b ? launch(GroupedTilesKernel<T, Accumulator, false, true>)
                : launch(GroupedTilesKernel<T, Accumulator, false, false>);
}

// By large tiles, or small ones where groups have few rows or shared memory is short.
template <class Large, template <class, bool, bool> class LargeAccumulator, class Small,
          template <class, bool, bool> class SmallAccumulator>
void RunGroupedTiles(const char* op, const Grouped& p, DLStream stream) {
  constexpr size_t kNbytes = kGroupedNbytes<Large, LargeAccumulator>;
  const GroupedShape& shape = p.shape;
  const int64_t rows = shape.contracts ? shape.k : shape.rows / std::max<int64_t>(shape.groups, 1);
  const bool is_small = std::min(rows, shape.n) <= Small::kTileM;
  if (is_small || kNbytes + 4096 > SharedLimit(p.ctx.device_id))
    return LaunchGroupedTiles<Small, SmallAccumulator>(op, p, stream);
  LaunchGroupedTiles<Large, LargeAccumulator>(op, p, stream);
}

}  // namespace cuda
}  // namespace dlsys
