// GEMM of floats of 8 bits by wgmma and TMA: C = unit_a unit_b A Bᵀ, A (m, k) and B (n, k) codes of
// e4m3 or e5m2, C of a storage type. A producer thread copies panels into a ring of stages, and two
// consumer warpgroups have 64 rows each of a tile of 128 x 192 or 128 x 256. Blocks are persistent.
//
// Tensor cores add such products with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3). So
// each panel of 128 of K is summed from zero, and then added in float32 while the other warpgroup
// multiplies. Tiles too few for all multiprocessors are cut along K, and another kernel adds the
// parts in their order. Large products are limited by the tensor cores' power, small ones by
// latency and the stores of C.
#include <algorithm>
#include <optional>

#include "cuda/gemm/hopper/fp8.cuh"
#include "cuda/instructions/fp8.cuh"
#include "cuda/instructions/ring.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {
namespace hopper {
namespace {

constexpr int kConsumers = 2, kFp8Threads = (kConsumers + 1) * 128;
constexpr int kFp8PanelK = 128, kFp8TileM = kConsumers * 64;
constexpr int kFp8Alignment = 1024;  // of the swizzle
constexpr int kBand = 16;            // row tiles whose panels stay in L2
constexpr int kMostSplits = 16;

// A consumer's rows are summed in Parts of so many columns, one after the other.
template <int Parts, int PartN, int Stages>
struct Fp8Tiling {
  static constexpr int kParts = Parts, kPartN = PartN, kTileN = Parts * PartN, kStages = Stages;
  static constexpr int kPanelA = kFp8TileM * kFp8PanelK;
  static constexpr int kStageNbytes = kPanelA + kTileN * kFp8PanelK;
  static constexpr int kSharedNbytes = kFp8Alignment + kStages * kStageNbytes;
};
using Tile192 = Fp8Tiling<1, 192, 5>;
using Tile256 = Fp8Tiling<2, 128, 4>;

struct Fp8Params {
  const float *unit_a, *unit_b;
  Output c;
  float* parts;  // (splits, m, n) where tiles are cut along K
  int m, n;
  int panels, row_tiles, col_tiles, splits;
  bool aligned;  // eight elements of C, or two of float32, are one access
};

// A tile's first row and column, its split and the panels of that.
struct Fp8Tile {
  int row, col, split, begin, end;
};
template <class T>
__device__ __forceinline__ Fp8Tile TileAt(const Fp8Params& p, int index) {
  const int tiles = p.row_tiles * p.col_tiles, split = index / tiles, at = index % tiles;
  const int band = at / (kBand * p.col_tiles), in_band = at % (kBand * p.col_tiles);
  const int rows = min(kBand, p.row_tiles - band * kBand);
  return {(band * kBand + in_band % rows) * kFp8TileM, in_band / rows * T::kTileN, split,
          (int)((int64_t)p.panels * split / p.splits),
          (int)((int64_t)p.panels * (split + 1) / p.splits)};
}

// The words of a row that four adjacent lanes hold, word i of each being of group i: then lane t
// has group t, by lanes.
__device__ __forceinline__ void ExchangeWords(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  (odd ? w[0] : w[1]) = a, (odd ? w[2] : w[3]) = b;
  const uint32_t c = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2);
  const uint32_t d = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
  (upper ? w[0] : w[2]) = c, (upper ? w[1] : w[3]) = d;
}

// Stores 64 rows of C, of the accumulators of a warpgroup, times `unit`.
template <class R, int kBlocks>
__device__ __forceinline__ void StoreRows(const Fp8Params& p, R* c, const float (&d)[kBlocks][4],
                                          float unit, int row0, int col0) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = row0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
    R* const to = c + (int64_t)row * p.n;
#pragma unroll
    for (int j = 0; j < kBlocks; j += 4) {
      const auto value = [&](int i, int e) { return unit * d[j + i][half * 2 + e]; };
      if constexpr (sizeof(R) == 2) {
        if (p.aligned) {
          uint32_t w[4];
#pragma unroll
          for (int i = 0; i < 4; i++) w[i] = Packed<R>(value(i, 0), value(i, 1));
          ExchangeWords(w);
          const int col = col0 + (j + t) * 8;
          if (row < p.m && col < p.n)
            *(int4*)(to + col) = {(int)w[0], (int)w[1], (int)w[2], (int)w[3]};
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int col = col0 + (j + i) * 8 + t * 2;
        if (row >= p.m || col >= p.n) continue;
        if (sizeof(R) == 4 && p.aligned) {
          *(float2*)(to + col) = make_float2(value(i, 0), value(i, 1));
        } else {
          to[col] = R(value(i, 0));
          if (col + 1 < p.n) to[col + 1] = R(value(i, 1));
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void ProduceFp8(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                           const Fp8Params& p, uint32_t memory, uint32_t full,
                                           uint32_t empty) {
  const int tiles = p.row_tiles * p.col_tiles * p.splits;
  RingPosition<T::kStages> at;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Fp8Tile tile = TileAt<T>(p, index);
    for (int panel = tile.begin; panel < tile.end; panel++, at.Advance()) {
      const uint32_t a = memory + at.stage * T::kStageNbytes, barrier = full + at.stage * 8;
      WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      ArriveExpecting(barrier, T::kStageNbytes);
      LoadBox<false>(a, map_a, barrier, panel * kFp8PanelK, tile.row, 0);
      LoadBox<false>(a + T::kPanelA, map_b, barrier, panel * kFp8PanelK, tile.col, 0);
    }
  }
}

template <class A, class B, class T>
__device__ __forceinline__ void ConsumeFp8(const Fp8Params& p, uint32_t memory, uint32_t full,
                                           uint32_t empty) {
  constexpr int kBlocks = T::kPartN / 8;
  const int tiles = p.row_tiles * p.col_tiles * p.splits, first_row = threadIdx.x / 128 * 64;
  const float unit = p.splits > 1 ? 1.f : *p.unit_a * *p.unit_b;
  RingPosition<T::kStages> at;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Fp8Tile tile = TileAt<T>(p, index);
    float sums[T::kParts][kBlocks][4] = {}, of_panel[kBlocks][4];
    for (int panel = tile.begin; panel < tile.end; panel++, at.Advance()) {
      const uint32_t stage = memory + at.stage * T::kStageNbytes;
      const uint32_t a = stage + first_row * kFp8PanelK, b = stage + T::kPanelA;
      WaitForPhase(full + at.stage * 8, at.parity);
#pragma unroll
      for (int part = 0; part < T::kParts; part++) {
        BeginProducts();
#pragma unroll
        for (int k = 0; k < kFp8PanelK; k += 32)
          MultiplyAdd8Bit<A, B>(of_panel, Descriptor(a + k, 16, 1024),
                                Descriptor(b + part * T::kPartN * kFp8PanelK + k, 16, 1024), k > 0);
        CloseProducts();
        WaitForProducts<0>();
        if (part + 1 == T::kParts && threadIdx.x % 128 == 0) Arrive(empty + at.stage * 8);
#pragma unroll
        for (int q = 0; q < kBlocks * 4; q++) sums[part][q / 4][q % 4] += of_panel[q / 4][q % 4];
      }
    }
#pragma unroll
    for (int part = 0; part < T::kParts; part++) {
      const auto store = [&](auto* c) {
        StoreRows(p, c, sums[part], unit, tile.row + first_row, tile.col + part * T::kPartN);
      };
      if (p.splits > 1)
        store(p.parts + (int64_t)tile.split * p.m * p.n);
      else if (p.c.dtype == DL_FLOAT32)
        store((float*)p.c.data);
      else if (p.c.dtype == DL_BFLOAT16)
        store((bfloat16*)p.c.data);
      else
        store((float16*)p.c.data);
    }
  }
}

template <class A, class B, class T>
__global__ __launch_bounds__(kFp8Threads,
                             1) void Fp8Kernel(const __grid_constant__ CUtensorMap map_a,
                                               const __grid_constant__ CUtensorMap map_b,
                                               const Fp8Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[2 * T::kStages];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (kFp8Alignment - 1);
  const uint32_t full = SharedAddress(barriers), empty = full + T::kStages * 8;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      InitBarrier(full + stage * 8, 1);
      InitBarrier(empty + stage * 8, kConsumers);
    }
    PublishBarriers();
  }
  __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == kConsumers) {
    ReduceRegisters<40>();
    if (threadIdx.x == kConsumers * 128)
      ProduceFp8<T>(&map_a, &map_b, p, SharedAddress(shared), full, empty);
  } else {
    RaiseRegisters<232>();
    ConsumeFp8<A, B, T>(p, SharedAddress(shared), full, empty);
  }
  TriggerProgrammaticLaunch();
#endif
}

// C of parts (splits, m n), in their order.
__global__ void AddPartsKernel(const float* parts, int splits, int64_t numel, const float* unit_a,
                               const float* unit_b, Output c) {
  const float unit = *unit_a * *unit_b;
  for (int64_t i = FirstItem(); i < numel; i += ItemStep()) {
    float sum = parts[i];
    for (int split = 1; split < splits; split++) sum += parts[split * numel + i];
    c.Store(i, unit * sum);
  }
}

// The tiling and cuts of the least estimated time, in microseconds on an H200.
struct Fp8Plan {
  bool wide;  // by Tile256
  int splits;
  double us;
};
Fp8Plan PlanOf(const Fp8Gemm& gemm, int multiprocessors) {
  constexpr double kPanelUs = 0.56, kWidePanelUs = 0.775, kTileUs = 2;  // of a tile
  constexpr double kPartsUs = 4, kPartsNbytesUs = 3e6;                  // of adding parts
  const int64_t panels = CeilDiv(gemm.k, kFp8PanelK);
  Fp8Plan best = {false, 1, 1e300};
  for (const bool wide : {false, true}) {
    const int64_t tiles =
        CeilDiv(gemm.m, kFp8TileM) * CeilDiv(gemm.n, wide ? Tile256::kTileN : Tile192::kTileN);
    for (int splits = 1; splits <= std::min<int64_t>(kMostSplits, panels); splits++) {
      const double of_tile =
          kTileUs + (double)CeilDiv(panels, splits) * (wide ? kWidePanelUs : kPanelUs);
      double us = (double)CeilDiv(tiles * splits, multiprocessors) * of_tile;
      const double nbytes = 4. * (double)(gemm.m * gemm.n) * (2 * splits + 1);
      if (splits > 1) us += kPartsUs + nbytes / kPartsNbytesUs;
      if (us < best.us) best = {wide, splits, us};
    }
  }
  return best;
}

template <class A, class B, class T>
void LaunchFp8(const char* op, const Fp8Gemm& gemm, Fp8Params p, DLStream stream) {
  p.col_tiles = (int)CeilDiv(gemm.n, T::kTileN);
  const auto map_of = [&](const Fp8Operand& x, int64_t rows, int box) {
    return BoxMap(op, DL_UINT8, x.codes, gemm.k, rows, gemm.k, 1, box);
  };
  const unsigned blocks = (unsigned)std::min<int64_t>(
      Multiprocessors(gemm.ctx.device_id), (int64_t)p.row_tiles * p.col_tiles * p.splits);
  LaunchClusters(op, Fp8Kernel<A, B, T>, blocks, 1, kFp8Threads, T::kSharedNbytes, true, stream,
                 map_of(gemm.a, gemm.m, kFp8TileM), map_of(gemm.b, gemm.n, T::kTileN), p);
}

}  // namespace

void RunFp8Gemm(const char* op, const Fp8Gemm& gemm, DLStream stream) {
  const Fp8Plan plan = PlanOf(gemm, Multiprocessors(gemm.ctx.device_id));
  Fp8Params p = {gemm.a.unit, gemm.b.unit, gemm.c, nullptr, (int)gemm.m, (int)gemm.n,
                 0,           0,           0,      1,       false};
  p.panels = (int)CeilDiv(gemm.k, kFp8PanelK), p.row_tiles = (int)CeilDiv(gemm.m, kFp8TileM);
  p.splits = plan.splits;
  std::optional<Scratch> parts;
  if (plan.splits > 1) {
    parts.emplace(gemm.ctx, plan.splits * gemm.m * gemm.n * (int64_t)sizeof(float), stream);
    p.parts = parts->floats();
  }
  const int64_t in_access = gemm.c.dtype == DL_FLOAT32 || p.parts ? 2 : 8;
  p.aligned = gemm.n % in_access == 0 && (p.parts || Aligned16(gemm.c.data));
  const auto launch = [&](auto a, auto b) {
    using A = decltype(a);
    using B = decltype(b);
    plan.wide ? LaunchFp8<A, B, Tile256>(op, gemm, p, stream)
              : LaunchFp8<A, B, Tile192>(op, gemm, p, stream);
  };
  if (gemm.a.wide)
    gemm.b.wide ? launch(e5m2(), e5m2()) : launch(e5m2(), e4m3());
  else
    gemm.b.wide ? launch(e4m3(), e5m2()) : launch(e4m3(), e4m3());
  if (plan.splits > 1)
    Launch(op, AddPartsKernel, Blocks(gemm.m * gemm.n), kThreads, 0, stream, p.parts, p.splits,
           gemm.m * gemm.n, p.unit_a, p.unit_b, p.c);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
