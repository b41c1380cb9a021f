// GEMM by wgmma and TMA, for sm_90a: bfloat16, float16, and float32 as tf32 or 3xtf32.
//
// Warp specialization: one thread of a producer warpgroup copies operand panels by TMA into a ring
// of stages in shared memory, two consumer warpgroups multiply them into accumulators in registers.
// The consumers halve a tile (cooperative), or take tiles in turn, so that one stores while the
// other multiplies (ping-pong). Blocks are persistent, one a multiprocessor; two of a cluster share
// the panels of B by multicast. Tiles that would not fill a wave of blocks are cut along K
// (split-K); at the end the blocks that made the parts of a tile add them together, each a slice of
// it, in the order of K: results are deterministic. 3xtf32 runs over K three times, over the upper
// and lower parts of both operands (Ootomo and Yokota 2022, doi:10.1177/10943420221090256).
// Epilogues of few instructions, of 16 bits GELU and SiLU among them (fast_functions.cuh), are done
// in registers, the others through shared memory.
//
// Operands lie along K or, of 16 bits, along M or N; C is row-major and overlaps nothing. Large
// shapes are limited by the tensor cores' power, K below about 1,000 by the stores of C.
#pragma once
#include "cuda/gemm/fast_functions.cuh"
#include "cuda/runtime/hopper.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ring.cuh"
#include "math/epilogue.h"

namespace dlsys {
namespace cuda {
namespace hopper {

// A tile of 64 WarpgroupM or, where consumers cooperate, twice as many rows, and TileN columns. Of
// C, StagingN columns of a consumer are on their way to global memory at a time.
template <int WarpgroupM, int TileN, bool PingPong, int Cluster, int Stages, int StagingN>
struct Tiling {
  static constexpr int kWarpgroupM = WarpgroupM, kTileN = TileN, kCluster = Cluster;
  static constexpr bool kPingPong = PingPong;
  static constexpr int kStages = Stages, kStagingN = StagingN;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;
  static constexpr int kRows = WarpgroupM * 64;  // of a consumer
  static constexpr int kTileM = PingPong ? kRows : kConsumers * kRows;
  static constexpr int kBlocks = TileN / 8;                 // of eight columns
  static constexpr int kQuads = WarpgroupM * kBlocks;       // of accumulators of a thread
  static constexpr int kParts = PingPong ? 1 : kConsumers;  // of a tile, by consumer
  static constexpr int kRowNbytes = 128;                    // of a panel in shared memory, swizzled
  static constexpr int kPanelA = kTileM * kRowNbytes, kPanelB = TileN * kRowNbytes;
  static constexpr int kStageNbytes = kPanelA + kPanelB;
  static constexpr int kStagingNbytes = kRows * StagingN * 2;
  static constexpr int kAlignment = 1024;  // of the swizzle
  static constexpr int kSharedNbytes =
      kAlignment + Stages * kStageNbytes + kConsumers * kStagingNbytes;
  static_assert(kSharedNbytes <= 231 << 10, "227 KB a block, and a few barriers");
};

// A GEMM, batched, as the kernel sees it; C of batch z is at c + z m n.
struct Params {
  int m, n, batch;
  int k_panels, passes;            // panels along K, and how often it runs over them
  int row_tiles, col_tiles, band;  // row tiles count clusters; a band of them shares columns in L2
  int split_tiles, splits;         // the first tiles are cut into parts along K
  float4* partial;                 // of the parts
  unsigned* arrivals;              // zeros, by tile, block of the cluster and consumer
  void* c;
  void* before;             // of C's shape: C before its activation, or null
  const void *bias, *side;  // (n), and of C's shape; or null
  int activation, gradient;
  bool in_registers;  // the epilogue is nothing, or of few instructions, and C is stored at once
  bool aligned;       // rows of C, bias and side are at multiples of four elements
};

// Where a cluster works: panels [begin, end) of a tile, as one of its splits.
struct Segment {
  int tile, begin, end, split;
};

// The segments of a cluster: every so-many-th of those of all tiles. Clusters that run together
// work at the same K, and so share panels in L2.
template <class T>
class Segments {
 public:
  __device__ __forceinline__ explicit Segments(const Params& params)
      : params_(params), index_(blockIdx.x / T::kCluster) {}

  __device__ __forceinline__ bool Next(Segment& segment) {
    const int panels = params_.k_panels * params_.passes;
    const int split_segments = params_.split_tiles * params_.splits;
    const int index = index_;
    index_ += gridDim.x / T::kCluster;
    if (index < split_segments) {
      const int split = index / params_.split_tiles;
      segment = {index - split * params_.split_tiles, panels * split / params_.splits,
                 panels * (split + 1) / params_.splits, split};
      return true;
    }
    segment = {index - split_segments + params_.split_tiles, 0, panels, 0};
    return segment.tile < params_.row_tiles * params_.col_tiles * params_.batch;
  }

 private:
  const Params& params_;
  int index_;
};

// The first row and column of this block's tile, and its batch. Tiles go down the rows of a band,
// then to the next column.
struct TileOrigin {
  int row, col, z;
};
template <class T>
__device__ __forceinline__ TileOrigin OriginOf(const Params& params, int tile, uint32_t rank) {
  const int of_batch = params.row_tiles * params.col_tiles, in_batch = tile % of_batch;
  const int of_band = params.band * params.col_tiles;
  const int band = in_batch / of_band, in_band = in_batch % of_band;
  const int height = min(params.band, params.row_tiles - band * params.band);
  const int row_tile = (band * params.band + in_band % height) * T::kCluster + (int)rank;
  return {row_tile * T::kTileM, in_band / height * T::kTileN, tile / of_batch};
}

// ---- the producer ----

// A `Source` says how the panels of both operands are copied and where boxes of C go; its Layout is
// what it needs beside the tensor maps. It begins at a tile. Without kHasEpilogue there is a bias
// at most. With two producers, one copies A and one B. This one reads matrices, or batches of them;
// those of convolutions are in conv/channels_last_sources.cuh.

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

template <class E, class T, bool kAlongM_, bool kAlongN_>
class Matrices {
 public:
  struct Layout {};
  static constexpr bool kAlongM = kAlongM_, kAlongN = kAlongN_, kHasEpilogue = true;
  static constexpr bool kFloatResult = sizeof(E) == 4;
  static constexpr int kProducers = 1;

  // `first` of a tile's rows of B are copied by another block.
  __device__ __forceinline__ Matrices(const Params& params, const Layout&, const TileOrigin& origin,
                                      int first)
      : params_(params), origin_(origin), col_(origin.col + first) {}

  // Copies a panel to `a` and `b`, or to one of them.
  template <bool kOfA, bool kOfB>
  __device__ __forceinline__ void Load(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                       int panel, uint32_t a, uint32_t b, uint32_t barrier) const {
    constexpr int kTileK = 128 / (int)sizeof(E);
    // The passes of 3xtf32: lower A by upper B, upper A by lower B, upper A by upper B.
    const int pass = panel / params_.k_panels, k = (panel - pass * params_.k_panels) * kTileK;
    const int z_a = params_.passes > 1 ? pass == 0 : origin_.z;
    const int z_b = params_.passes > 1 ? pass == 1 : origin_.z;
    if (kOfA) LoadPanel<E, kAlongM, false, T::kTileM>(a, map_a, barrier, origin_.row, k, z_a);
    if (kOfB)
      LoadPanel<E, kAlongN, (T::kCluster > 1), T::kTileN / T::kCluster>(b, map_b, barrier, col_, k,
                                                                        z_b);
  }

  static __device__ __forceinline__ void Store(const Layout&, const CUtensorMap* map, uint32_t from,
                                               int row, int col, int z) {
    StoreBox(map, from, col, row, z);
  }

 private:
  const Params& params_;
  const TileOrigin& origin_;
  const int col_;
};

template <class T, class Source, bool kOfA, bool kOfB>
__device__ __forceinline__ void Produce(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                        const Params& params, const typename Source::Layout& layout,
                                        uint32_t memory, uint32_t full, uint32_t empty) {
  const uint32_t rank = T::kCluster > 1 ? ClusterRank() : 0;
  const int first = (int)rank * (T::kTileN / T::kCluster);
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  for (Segment segment; segments.Next(segment);) {
    const TileOrigin origin = OriginOf<T>(params, segment.tile, rank);
    const Source source(params, layout, origin, first);
    for (int panel = segment.begin; panel < segment.end; panel++, at.Advance()) {
      const uint32_t a = memory + at.stage * T::kStageNbytes, barrier = full + at.stage * 8;
      WaitForPhase(empty + at.stage * 8, at.parity ^ 1);
      if (kOfA) ArriveExpecting(barrier, T::kStageNbytes);
      source.template Load<kOfA, kOfB>(map_a, map_b, panel, a,
                                       a + T::kPanelA + first * T::kRowNbytes, barrier);
    }
  }
}

// ---- consumers ----

template <class T>
using Accumulators = float[T::kWarpgroupM][T::kBlocks][4];

// Adds the products of `count` panels, first into zeros. Each stage is released as soon as the
// products that read it are done.
template <class E, class T, bool kAlongM, bool kAlongN, class Release>
__device__ __forceinline__ void MultiplyPanels(Accumulators<T>& d, int count, uint32_t memory,
                                               uint32_t full, int first_row,
                                               RingPosition<T::kStages>& at, Release&& release) {
  constexpr int kAcross = 128 / (int)sizeof(E) * T::kRowNbytes;  // a column of boxes
  int previous = 0;
  for (int panel = 0; panel < count; panel++, at.Advance()) {
    const uint32_t a = memory + at.stage * T::kStageNbytes + first_row * T::kRowNbytes;
    const uint32_t b = memory + at.stage * T::kStageNbytes + T::kPanelA;
    WaitForPhase(full + at.stage * 8, at.parity);
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 bytes of K, or 16 rows of it
      const uint64_t of_b =
          kAlongN ? Descriptor(b + k * 2048, kAcross, 1024) : Descriptor(b + k * 32, 16, 1024);
#pragma unroll
      for (int i = 0; i < T::kWarpgroupM; i++) {
        const uint32_t rows = a + i * 64 * T::kRowNbytes;
        const uint64_t of_a = kAlongM ? Descriptor(rows + k * 2048, kAcross, 1024)
                                      : Descriptor(rows + k * 32, 16, 1024);
        MultiplyAdd<E, kAlongM, kAlongN>(d[i], of_a, of_b, panel + k > 0);
      }
    }
    CloseProducts();
    WaitForProducts<1>();
    if (panel > 0) release(previous);
    previous = at.stage;
  }
  WaitForProducts<0>();
  release(previous);
}

// The same, more exactly: tensor cores cut off what an addition does not hold, so that their error
// grows with K. A few panels' sums at a time are added by ordinary, rounded additions.
template <class E, class T, class Release>
__device__ __forceinline__ void MultiplyPanelsExactly(Accumulators<T>& sums, int count,
                                                      uint32_t memory, uint32_t full, int first_row,
                                                      RingPosition<T::kStages>& at,
                                                      Release&& release) {
  constexpr int kPanels = 8;
#pragma unroll
  for (int q = 0; q < T::kWarpgroupM * T::kBlocks; q++) {
    float (&x)[4] = sums[q / T::kBlocks][q % T::kBlocks];
    x[0] = x[1] = x[2] = x[3] = 0.f;
  }
  for (int panel = 0; panel < count; panel += kPanels) {
    Accumulators<T> d;
    MultiplyPanels<E, T, false, false>(d, min(kPanels, count - panel), memory, full, first_row, at,
                                       release);
#pragma unroll
    for (int q = 0; q < T::kWarpgroupM * T::kBlocks; q++) {
      float (&x)[4] = sums[q / T::kBlocks][q % T::kBlocks];
#pragma unroll
      for (int e = 0; e < 4; e++) x[e] += d[q / T::kBlocks][q % T::kBlocks][e];
    }
  }
}

// Stores a consumer's part of a tile of C as it is: through shared memory, in boxes of 64 columns.
template <class E, class T, class Source>
__device__ __forceinline__ void StoreBoxes(const Accumulators<T>& d, const CUtensorMap* map_c,
                                           const typename Source::Layout& layout, uint32_t staging,
                                           int row, int col, int z, int consumer) {
  const int thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const int r = thread / 32 * 16 + l % 16;  // of the row whose address this lane gives
#pragma unroll
  for (int first = 0; first < T::kBlocks; first += T::kStagingN / 8) {
    if (thread == 0) WaitForStoresReads();
    SyncThreads(1 + consumer, 128);
#pragma unroll
    for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
      for (int j = first; j < first + T::kStagingN / 8; j += 2) {
        const float (&x)[4] = d[i][j], (&y)[4] = d[i][j + 1];
        const int chunk = j - first + l / 16, box = chunk / 8 * T::kWarpgroupM + i;
        StoreMatrices(
            staging + box * 64 * T::kRowNbytes + r * T::kRowNbytes + ((chunk % 8 ^ r % 8) * 16),
            {Packed<E>(x[0], x[1]), Packed<E>(x[2], x[3]), Packed<E>(y[0], y[1]),
             Packed<E>(y[2], y[3])});
      }
    }
    LetBulkFollow();
    SyncThreads(1 + consumer, 128);
    if (thread == 0) {
#pragma unroll
      for (int box = 0; box < T::kStagingN / 64; box++)
        Source::Store(layout, map_c, staging + box * T::kRows * T::kRowNbytes, row,
                      col + (first + box * 8) * 8, z);
      CloseStores();
    }
  }
}

// Calls f with the epilogue's function of an element of side and one of C. All code is inlined, for
// a call would make the compiler wait after each wgmma, so f is a loop and no loop body.
template <class F>
__device__ __forceinline__ void WithFunction(const Params& params, F&& f) {
#define DLSYS_CASE(code, F)                       \
  case code:                                      \
    f([](float, float x) { return fn::F{}(x); }); \
    return;
  switch (params.activation) { DLSYS_ACTIVATIONS(DLSYS_CASE) }
#undef DLSYS_CASE
#define DLSYS_CASE(code, F)                                  \
  case code:                                                 \
    f([](float side, float x) { return fn::F{}(side, x); }); \
    return;
  switch (params.gradient) { DLSYS_ACTIVATION_GRADIENTS(DLSYS_CASE) }
#undef DLSYS_CASE
  f([](float, float x) { return x; });
}

// kCount elements of a row, read and written at once.
template <class E, int kCount>
struct alignas(kCount * sizeof(E)) Pack {
  E x[kCount];
};

template <int kCount, class E>
__device__ __forceinline__ void Read(const E* from, bool at_once, int valid, float (&to)[kCount]) {
  Pack<E, kCount> pack = {};
  if (at_once)
    pack = *(const Pack<E, kCount>*)from;
  else
#pragma unroll
    for (int e = 0; e < kCount; e++)
      if (e < valid) pack.x[e] = from[e];
#pragma unroll
  for (int e = 0; e < kCount; e++) to[e] = (float)pack.x[e];
}

template <int kCount, class E>
__device__ __forceinline__ void Write(const float (&from)[kCount], bool at_once, int valid, E* to) {
  Pack<E, kCount> pack;
#pragma unroll
  for (int e = 0; e < kCount; e++) pack.x[e] = (E)from[e];
  if (at_once)
    *(Pack<E, kCount>*)to = pack;
  else
#pragma unroll
    for (int e = 0; e < kCount; e++)
      if (e < valid) to[e] = pack.x[e];
}

// Stores a consumer's part of a tile of float32 as it is: eight bytes a thread, 32 of a row.
template <class T>
__device__ __forceinline__ void StorePairs(const Accumulators<T>& d, const Params& params,
                                           const TileOrigin& origin) {
  const int thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const int row0 = origin.row + thread / 32 * 16 + l / 4, col0 = origin.col + l % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * T::kWarpgroupM; i++) {
    const int row = row0 + i / 2 * 64 + i % 2 * 8;
    if (row >= params.m) continue;
    float* to = (float*)params.c + ((int64_t)origin.z * params.m + row) * params.n + col0;
#pragma unroll
    for (int j = 0; j < T::kBlocks; j++, to += 8) {
      const float x = d[i / 2][j][i % 2 * 2], y = d[i / 2][j][i % 2 * 2 + 1];
      const int valid = params.n - col0 - j * 8;
      if (params.aligned && valid >= 2) {
        *(float2*)to = make_float2(x, y);
      } else {
        if (valid > 0) to[0] = x;
        if (valid > 1) to[1] = y;
      }
    }
  }
}

// Applies a fast function of side and accumulators to accumulators, kStep blocks of columns of each
// group of kGroup at a time. The loop is rolled, so that there is code for one step, and the
// accumulators of a group go round in their registers. The side of the next step is on its way
// meanwhile, in pairs of 16 bits.
template <bool kSide, class E, class T, class F>
__device__ __forceinline__ void ApplyFunction(Accumulators<T>& d, const Params& params,
                                              const TileOrigin& origin, const F& function) {
  constexpr int kStep = 4, kGroup = T::kBlocks < 16 ? T::kBlocks : 16;
  constexpr int kInRow = T::kBlocks / kGroup, kGroups = T::kWarpgroupM * kInRow;
  const int thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const int row0 = origin.row + thread / 32 * 16 + l / 4, col0 = origin.col + l % 4 * 2;
  const E* from = (const E*)params.side + ((int64_t)origin.z * params.m + row0) * params.n + col0;
  Pack<E, 2> pairs[kGroups][kStep][2] = {};
  const auto read = [&](int first) {
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = g / kInRow * 64 + half * 8;
#pragma unroll
        for (int j = 0; j < kStep; j++) {
          const int col = (g % kInRow * kGroup + first + j) * 8;
          if (row0 + row < params.m && col0 + col < params.n)
            pairs[g][j][half] = *(const Pack<E, 2>*)(from + (int64_t)row * params.n + col);
        }
      }
    }
  };
  if (kSide) read(0);
#pragma unroll 1
  for (int first = 0; first < kGroup; first += kStep) {
    float side[kGroups][kStep][4];
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
#pragma unroll
      for (int j = 0; j < kStep; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) side[g][j][e] = (float)pairs[g][j][e / 2].x[e % 2];
      }
    }
    if (kSide && first + kStep < kGroup) read(first + kStep);
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const auto at = [&](int j) -> float (&)[4] { return d[g / kInRow][g % kInRow * kGroup + j]; };
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float made[kStep];
#pragma unroll
        for (int j = 0; j < kStep; j++) made[j] = function(side[g][j][e], at(j)[e]);
#pragma unroll
        for (int j = 0; j + kStep < kGroup; j++) at(j)[e] = at(j + kStep)[e];
#pragma unroll
        for (int j = 0; j < kStep; j++) at(kGroup - kStep + j)[e] = made[j];
      }
    }
  }
}

// The functions of fast_functions.cuh, which results of 16 bits take.
template <class E, class T>
__device__ __forceinline__ void ApplyFast(Accumulators<T>& d, const Params& params,
                                          const TileOrigin& origin) {
#define DLSYS_CASE(code, F) \
  case code:                \
    return ApplyFunction<false, E, T>(d, params, origin, fast::F{});
  switch (params.activation) { DLSYS_FAST_ACTIVATIONS(DLSYS_CASE) }
#undef DLSYS_CASE
#define DLSYS_CASE(code, F) \
  case code:                \
    return ApplyFunction<true, E, T>(d, params, origin, fast::F{});
  switch (params.gradient) { DLSYS_FAST_GRADIENTS(DLSYS_CASE) }
#undef DLSYS_CASE
}

// Adds the bias to accumulators: a thread reads pairs of it where it holds them.
template <class E, class T>
__device__ __forceinline__ void AddBias(Accumulators<T>& d, const Params& params,
                                        const TileOrigin& origin) {
  const int col0 = origin.col + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < T::kBlocks; j++) {
    const int col = col0 + j * 8, valid = params.n - col;
    float bias[2];
    Read((const E*)params.bias + col, params.aligned && valid >= 2, valid, bias);
#pragma unroll
    for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++) d[i][j][e] += bias[e % 2];
    }
  }
}

// Applies relu or its gradient, or a fast function, to accumulators; pairs of side are read as
// those of the bias.
template <class E, class T>
__device__ __forceinline__ void ApplyInRegisters(Accumulators<T>& d, const Params& params,
                                                 const TileOrigin& origin) {
  const int thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const int row0 = origin.row + thread / 32 * 16 + l / 4, col0 = origin.col + l % 4 * 2;
  if constexpr (sizeof(E) == 2)
    if (params.activation > 1 || params.gradient > 1) ApplyFast<E, T>(d, params, origin);
  if (params.activation == 1) {
#pragma unroll
    for (int q = 0; q < T::kQuads; q++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& x = d[q / T::kBlocks][q % T::kBlocks][e];
        x = fn::Relu{}(x);
      }
    }
  }
  if (params.gradient == 1) {
#pragma unroll
    for (int i = 0; i < 2 * T::kWarpgroupM; i++) {
      const int row = row0 + i / 2 * 64 + i % 2 * 8;
      if (row >= params.m) continue;
      const E* from =
          (const E*)params.side + ((int64_t)origin.z * params.m + row) * params.n + col0;
#pragma unroll
      for (int j = 0; j < T::kBlocks; j++) {
        const int valid = params.n - col0 - j * 8;
        float side[2];
        Read(from + j * 8, params.aligned && valid >= 2, valid, side);
        float &x = d[i / 2][j][i % 2 * 2], &y = d[i / 2][j][i % 2 * 2 + 1];
        x = fn::ReluGradient{}(side[0], x), y = fn::ReluGradient{}(side[1], y);
      }
    }
  }
}

// Of the side of a consumer's part of a tile, asks L2 to have it when the tile is stored.
template <class E, class T>
__device__ __forceinline__ void PrefetchSide(const Params& params, const TileOrigin& origin) {
  constexpr int kLine = 128 / (int)sizeof(E), kInRow = T::kTileN / kLine;
  for (int item = threadIdx.x % 128; item < T::kRows * kInRow; item += 128) {
    const int row = origin.row + item / kInRow, col = origin.col + item % kInRow * kLine;
    if (row < params.m && col < params.n)
      PrefetchToL2((const E*)params.side + ((int64_t)origin.z * params.m + row) * params.n + col);
  }
}

// Stores a consumer's part of a tile of C with its epilogue, some columns at a time: accumulators
// and side meet in shared memory, so that rows are read and written in one piece. The loop is
// rolled; accumulators move down to the registers that it reads. The side of the next columns is on
// its way meanwhile.
template <class E, class T>
__device__ __forceinline__ void StoreQuads(Accumulators<T>& d, const Params& params,
                                           unsigned char* staging, const TileOrigin& origin,
                                           int consumer) {
  constexpr int kFit = T::kStagingNbytes / T::kRows / (int)(sizeof(float) + 2 * sizeof(E));
  constexpr int kCols = kFit >= 32 ? 32 : kFit >= 16 ? 16 : 8, kInRow = kCols / 4;
  static_assert(kCols <= kFit, "the staging area holds quads and two sets of sides");
  constexpr int kItems = T::kRows * kInRow / 128, kRowStep = 128 / kInRow;
  constexpr int kSpread = kInRow < 8 ? kInRow : 8;  // of rows over the banks
  const int thread = threadIdx.x % 128, l = threadIdx.x % 32;
  const int row0 = thread / kInRow, q = thread % kInRow;  // a thread keeps to its columns
  const int row_left = params.m - origin.row - row0, col0 = origin.col + q * 4;
  const int64_t at0 = ((int64_t)origin.z * params.m + origin.row + row0) * params.n + col0;
  const int64_t step = (int64_t)kRowStep * params.n;
  float4* const quads = (float4*)staging;
  Pack<E, 4>* const sides = (Pack<E, 4>*)(quads + T::kRows * kInRow) + thread;  // its own
  const auto side_of = [&](int first, int item) {
    return sides + (first / kCols % 2 * kItems + item) * 128;
  };
  const auto begin_sides = [&](int first) {
    const int valid = params.n - col0 - first;
    if (params.side && first < T::kTileN && valid > 0) {
#pragma unroll
      for (int item = 0; item < kItems; item++) {
        if (item * kRowStep >= row_left) continue;
        const E* from = (const E*)params.side + at0 + first + item * step;
        if (params.aligned && valid >= 4)
          CopyAsync<sizeof(Pack<E, 4>)>(side_of(first, item), from);
        else
          for (int e = 0; e < 4 && e < valid; e++) side_of(first, item)->x[e] = from[e];
      }
    }
    CloseCopies();
  };
  begin_sides(0);
#pragma unroll 1
  for (int first = 0; first < T::kTileN; first += kCols) {
    begin_sides(first + kCols);
    SyncThreads(1 + consumer, 128);  // the quads have been read
#pragma unroll
    for (int i = 0; i < T::kWarpgroupM; i++) {
#pragma unroll
      for (int j = 0; j < kCols / 8; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int r = i * 64 + thread / 32 * 16 + l / 4 + half * 8;
          const int to = r * kInRow + ((j * 2 + l % 4 / 2) ^ (r % kSpread));
          *((float2*)(quads + to) + l % 2) = make_float2(d[i][j][2 * half], d[i][j][2 * half + 1]);
        }
      }
#pragma unroll
      for (int j = 0; j + kCols / 8 < T::kBlocks; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) d[i][j][e] = d[i][j + kCols / 8][e];
      }
    }
    WaitForCopies<1>();
    SyncThreads(1 + consumer, 128);
    const int valid = params.n - col0 - first;
    const bool at_once = params.aligned && valid >= 4;
    if (valid <= 0) continue;
    float bias[4] = {};
    if (params.bias) Read((const E*)params.bias + col0 + first, at_once, valid, bias);
    WithFunction(params, [&](auto&& function) {
#pragma unroll 2
      for (int item = 0; item < kItems; item++) {
        const int r = row0 + item * kRowStep;
        if (item * kRowStep >= row_left) continue;
        const float4 v = quads[r * kInRow + (q ^ (r % kSpread))];
        float x[4] = {v.x + bias[0], v.y + bias[1], v.z + bias[2], v.w + bias[3]}, side[4] = {};
        if (params.side) Read(side_of(first, item)->x, true, 4, side);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = function(side[e], x[e]);
        Write(x, at_once, valid, (E*)params.c + at0 + first + item * step);
      }
    });
  }
  SyncThreads(1 + consumer, 128);
}

// ---- split-K ----

// Where a split of a consumer's part of a tile lies: quads of accumulators, by thread.
template <class T>
__device__ __forceinline__ float4* PartialOf(const Params& params, const Segment& segment,
                                             int split, uint32_t rank, int part) {
  const int64_t tile = (int64_t)split * params.split_tiles + segment.tile;
  return params.partial + ((tile * T::kCluster + rank) * T::kParts + part) * T::kQuads * 128;
}
template <class T>
__device__ __forceinline__ unsigned* ArrivalsOf(const Params& params, const Segment& segment,
                                                uint32_t rank, int part) {
  return params.arrivals + (segment.tile * T::kCluster + (int)rank) * T::kParts + part;
}

template <class T>
__device__ __forceinline__ void WritePartial(const Accumulators<T>& d, const Params& params,
                                             const Segment& segment, uint32_t rank, int part,
                                             int consumer) {
  const int thread = threadIdx.x % 128;
  float4* to = PartialOf<T>(params, segment, segment.split, rank, part) + thread;
#pragma unroll
  for (int q = 0; q < T::kQuads; q++) {
    const float (&x)[4] = d[q / T::kBlocks][q % T::kBlocks];
    to[q * 128] = make_float4(x[0], x[1], x[2], x[3]);
  }
  __threadfence();
  SyncThreads(1 + consumer, 128);
  if (thread == 0) CountUp(ArrivalsOf<T>(params, segment, rank, part));
}

// Waits for all splits of a tile, adds one of as many slices of them, and stores it. The sums go
// through the thread's own part of `staging`.
template <class E, class T, bool kHasEpilogue>
__device__ __forceinline__ void StoreSlice(const Params& params, const Segment& segment,
                                           const TileOrigin& origin, unsigned char* staging,
                                           uint32_t rank, int part, int consumer) {
  constexpr int kBatch = 4, kItems = T::kQuads * 128;
  const int thread = threadIdx.x % 128;
  const unsigned* arrivals = ArrivalsOf<T>(params, segment, rank, part);
  if (thread == 0)
    while (LoadAcquire(arrivals) < (unsigned)params.splits) __nanosleep(64);
  SyncThreads(1 + consumer, 128);
  const int begin = kItems * segment.split / params.splits;
  const int end = kItems * (segment.split + 1) / params.splits;
#pragma unroll 1
  for (int first = begin + thread; first < end; first += kBatch * 128) {
    float4 sums[kBatch] = {};
#pragma unroll 4
    for (int split = 0; split < params.splits; split++) {
      const float4* from = PartialOf<T>(params, segment, split, rank, part);
#pragma unroll
      for (int b = 0; b < kBatch; b++) {
        const float4 v = from[min(first + b * 128, end - 1)];
        sums[b].x += v.x, sums[b].y += v.y, sums[b].z += v.z, sums[b].w += v.w;
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; b++) ((float4*)staging)[b * 128 + thread] = sums[b];
    const auto store = [&](auto&& function) {
#pragma unroll 1
      for (int b = 0; b < 2 * kBatch && first + b / 2 * 128 < end; b++) {
        const int item = first + b / 2 * 128, q = item / 128;
        const float2 sum = ((const float2*)staging)[(b / 2 * 128 + thread) * 2 + b % 2];
        const int row =
            origin.row + q / T::kBlocks * 64 + item % 128 / 32 * 16 + item % 32 / 4 + b % 2 * 8;
        const int col = origin.col + q % T::kBlocks * 8 + item % 4 * 2, valid = params.n - col;
        if (valid <= 0 || row >= params.m) continue;
        const bool at_once = params.aligned && valid >= 2;
        const int64_t at = ((int64_t)origin.z * params.m + row) * params.n + col;
        float bias[2] = {}, side[2] = {};
        if (params.bias) Read((const E*)params.bias + col, at_once, valid, bias);
        if (params.side) Read((const E*)params.side + at, at_once, valid, side);
        const float before[2] = {sum.x + bias[0], sum.y + bias[1]};
        if (params.before) Write(before, at_once, valid, (E*)params.before + at);
        const float x[2] = {function(side[0], before[0]), function(side[1], before[1])};
        Write(x, at_once, valid, (E*)params.c + at);
      }
    };
    if constexpr (kHasEpilogue)
      WithFunction(params, store);
    else
      store([](float, float x) { return x; });
  }
}

template <class E, class T, class Source, bool kExact>
__device__ __forceinline__ void Consume(const CUtensorMap* map_c, const CUtensorMap* map_before,
                                        const Params& params, const typename Source::Layout& layout,
                                        unsigned char* shared, uint32_t full, uint32_t empty) {
  const int consumer = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int part = T::kPingPong ? 0 : consumer, first_row = part * T::kRows;  // of a tile
  const uint32_t rank = T::kCluster > 1 ? ClusterRank() : 0, memory = SharedAddress(shared);
  unsigned char* const staging =
      shared + T::kStages * T::kStageNbytes + consumer * T::kStagingNbytes;
  const auto release = [&](int stage) {
    if (thread < T::kCluster) ArriveAt(empty + stage * 8, thread);
  };
  const auto origin_of = [&](const Segment& segment) {
    TileOrigin origin = OriginOf<T>(params, segment.tile, rank);
    origin.row += first_row;
    return origin;
  };
  // Under ping-pong a consumer waits for its turn: it may not be two phases of a stage ahead.
  constexpr int kTurn = 1 + T::kConsumers;
  if (T::kPingPong && consumer == 1) ArriveThreads(kTurn, 256);
  Accumulators<T> d;
  RingPosition<T::kStages> at;
  Segments<T> segments(params);
  Segment segment, next;
  bool more = segments.Next(next);
  for (int turn = 0; more; turn++) {
    segment = next;
    more = segments.Next(next);
    const int count = segment.end - segment.begin;
    if (T::kPingPong && turn % 2 != consumer) {
      at.Advance(count);
      continue;
    }
    const TileOrigin origin = origin_of(segment);
    if (Source::kHasEpilogue && params.side) PrefetchSide<E, T>(params, origin);
    if (T::kPingPong) SyncThreads(kTurn + consumer, 256);
    if constexpr (kExact)
      MultiplyPanelsExactly<E, T>(d, count, memory, full, first_row, at, release);
    else
      MultiplyPanels<E, T, Source::kAlongM, Source::kAlongN>(d, count, memory, full, first_row, at,
                                                             release);
    if (T::kPingPong && more) ArriveThreads(kTurn + 1 - consumer, 256);
    if (segment.tile < params.split_tiles) {
      WritePartial<T>(d, params, segment, rank, part, consumer);
    } else if (!Source::kHasEpilogue || params.in_registers) {
      const auto store = [&](const CUtensorMap* map) {
        if constexpr (!Source::kFloatResult)
          StoreBoxes<E, T, Source>(d, map, layout, SharedAddress(staging), origin.row, origin.col,
                                   origin.z, consumer);
        else
          StorePairs<T>(d, params, origin);
      };
      if (params.bias) AddBias<E, T>(d, params, origin);
      if constexpr (Source::kHasEpilogue) {
        if constexpr (sizeof(E) == 2)
          if (params.before) store(map_before);
        ApplyInRegisters<E, T>(d, params, origin);
      }
      store(map_c);
    } else if constexpr (Source::kHasEpilogue) {
      StoreQuads<E, T>(d, params, staging, origin, consumer);
    }
  }
  if (thread == 0) WaitForStores();  // the staging area is free
  // All splits are written before any is waited for: no block waits for one that waits.
  Segments<T> again(params);
  for (int turn = 0; again.Next(segment) && segment.tile < params.split_tiles; turn++)
    if (!T::kPingPong || turn % 2 == consumer)
      StoreSlice<E, T, Source::kHasEpilogue>(params, segment, origin_of(segment), staging, rank,
                                             part, consumer);
}

template <class E, class T, class Source, bool kExact>
__global__ __launch_bounds__(T::kThreads, 1) void GemmKernel(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ CUtensorMap map_c, const __grid_constant__ CUtensorMap map_before,
    const Params params, const __grid_constant__ typename Source::Layout layout) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[2 * T::kStages];
  unsigned char* shared = DynamicShared<unsigned char>();
  shared += -SharedAddress(shared) & (T::kAlignment - 1);
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * T::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; stage++) {
      InitBarrier(full + stage * 8, 1);
      InitBarrier(empty + stage * 8, (T::kPingPong ? 1 : T::kConsumers) * T::kCluster);
    }
    PublishBarriers();
  }
  if (T::kCluster > 1)
    MeetCluster();
  else
    __syncthreads();
  GridDependencySynchronize();
  if (threadIdx.x / 128 == T::kConsumers) {
    ReduceRegisters<40>();
    const auto produce = [&](auto of_a, auto of_b) {
      Produce<T, Source, decltype(of_a)::value, decltype(of_b)::value>(
          &map_a, &map_b, params, layout, SharedAddress(shared), full, empty);
    };
    if constexpr (Source::kProducers == 1) {
      if (threadIdx.x == T::kConsumers * 128) produce(std::true_type(), std::true_type());
    } else {
      if (threadIdx.x == T::kConsumers * 128) produce(std::true_type(), std::false_type());
      if (threadIdx.x == T::kConsumers * 128 + 32) produce(std::false_type(), std::true_type());
    }
  } else {
    RaiseRegisters<232>();
    Consume<E, T, Source, kExact>(&map_c, &map_before, params, layout, shared, full, empty);
  }
  TriggerProgrammaticLaunch();
  if (T::kCluster > 1) LeaveCluster();  // peers may still copy to its memory and arrive there
#endif
}

}  // namespace hopper
}  // namespace cuda
}  // namespace dlsys
