// Tiled GEMM with fused epilogue; gemm.cuh has the contract, tile.cuh the register level.
//
// A block computes one tile of C in a multi-stage cp.async mainloop over K and writes it through
// shared memory in coalesced rows. Where C has too few tiles to fill the chip, K is split over
// blocks (split-K): from sm_90 on over a thread-block cluster that reduces through distributed
// shared memory, before into a workspace that a second kernel reduces. Both orders of summation are
// fixed, so results are deterministic. Large shapes are limited by FFMA or mma issue, small ones by
// the latency of the first panels; a launch may overlap its predecessor's tail (PDL).
#pragma once
#include <cuda.h>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/runtime/launch.cuh"

namespace dlsys {
namespace cuda {

constexpr int kMaxSplits = kPortableCluster;

struct GemmParams {
  Gemm gemm;
  int row_tiles, col_tiles, splits;
  int64_t k_slice;            // K of one split, a multiple of four
  bool aligned_a, aligned_b;  // base address and rows allow 16-byte copies
  bool aligned_out;           // the same of C and of the epilogue's operands
  float* partial;             // (splits, m, n), then (splits, sums); null: a cluster reduces
  bool allow_pdl;             // may launch while its predecessor drains
  int first_tile = 0, tiles;  // those of this launch
};

struct TileCoord {
  int row, col, split;  // counting tiles
};

// The tile of a block (threadblock swizzle): the splits of a tile are adjacent, as a cluster's
// blocks are, and tiles are rasterized in bands of eight tile rows, so that concurrent blocks share
// panels in L2.
__device__ __forceinline__ TileCoord TileCoordOf(const GemmParams& params, int block) {
  constexpr int kGroup = 8;
  const int split = block % params.splits;
  const int tile = params.first_tile + block / params.splits;
  const int group = tile / (kGroup * params.col_tiles);
  const int in_group = tile % (kGroup * params.col_tiles);
  const int height = min(kGroup, params.row_tiles - group * kGroup);
  return {group * kGroup + in_group % height, in_group / height, split};
}

// This thread's part of the sum over K of a panel: one row or column, kShare of its kTileK.
template <class T, class P, int kExtent>
__device__ __forceinline__ float SumOverK(const float* panel) {
  constexpr int kShare = T::kTileK / (T::kThreads / kExtent);
  const int mn = threadIdx.x % kExtent, k0 = threadIdx.x / kExtent * kShare;
  float sums[4] = {};
#pragma unroll
  for (int k = 0; k < kShare; k++) sums[k % 4] += P::At(panel, mn, k0 + k);
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

// The operand whose sums over K this block contributes to: blocks of the first tile column (or
// row).
struct OperandSums {
  bool a, b;
  __device__ __forceinline__ OperandSums(const Gemm& gemm, const TileCoord& coord)
      : a(gemm.sums && gemm.sums_of_a && coord.col == 0),
        b(gemm.sums && !gemm.sums_of_a && coord.row == 0) {}
};

// The index within the tile of the operand sum that a thread finishes; counted from the last
// thread, for the first ones may have elements of C to write.
template <class T>
__device__ __forceinline__ int OperandSumIndex() {
  return T::kThreads - 1 - (int)threadIdx.x;
}

// Reduces the threads' operand sums to one per row (or column), at the front of `thread_sums`.
template <class T>
__device__ __forceinline__ void ReduceOperandSums(OperandSums operand_sums, float* thread_sums) {
  const int w = OperandSumIndex<T>();
  const auto add = [&](auto extent) {
    constexpr int kExtent = decltype(extent)::value;
    if (w >= kExtent) return;
    float sum = 0.f;
#pragma unroll
    for (int first = 0; first < T::kThreads; first += kExtent) sum += thread_sums[first + w];
    thread_sums[w] = sum;
  };
  if (operand_sums.a) add(std::integral_constant<int, T::kTileM>());
  if (operand_sums.b) add(std::integral_constant<int, T::kTileN>());
}

// Calls write(index, sum) for each operand sum of this block's tile, reduced over the cluster.
template <class T, class F>
__device__ __forceinline__ void StoreOperandSums(const GemmParams& params, const TileCoord& coord,
                                                 OperandSums operand_sums, const float* thread_sums,
                                                 int splits, F&& write) {
  const int w = OperandSumIndex<T>();
  const int64_t at =
      operand_sums.a ? (int64_t)coord.row * T::kTileM + w : (int64_t)coord.col * T::kTileN + w;
  if (!(operand_sums.a && w < T::kTileM && at < params.gemm.m) &&
      !(operand_sums.b && w < T::kTileN && at < params.gemm.n))
    return;
  float of[kMaxSplits], sum = 0.f;
#pragma unroll
  for (int k = 0; k < kMaxSplits; k++)
    of[k] = k >= splits ? 0.f : splits > 1 ? OfPeer(thread_sums, k)[w] : thread_sums[w];
#pragma unroll
  for (int k = 0; k < kMaxSplits; k++) sum += of[k];
  write(at, sum);
}

// Sum of the block's slice tiles at one quad.
template <class T>
__device__ __forceinline__ float4 SumSlices(const float* tile) {
  float4 v = *(const float4*)tile;
#pragma unroll
  for (int k = 1; k < T::kSliceTiles; k++) v = Sum(v, *(const float4*)(tile + k * T::kTileNumel));
  return v;
}
// Sum over the cluster of kCount quads, `step` apart, of which `count` exist (the last is
// repeated). Distributed shared memory has long latency, so all loads are issued before the
// additions.
template <int kCount>
__device__ __forceinline__ void SumCluster(const float* tile, int step, int count, int splits,
                                           float4 (&sums)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k++) sums[k] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
  for (int peer = 0; peer < splits; peer++) {
    const float* from = splits > 1 ? OfPeer(tile, peer) : tile;
    float4 v[kCount];
#pragma unroll
    for (int k = 0; k < kCount; k++) v[k] = *(const float4*)(from + min(k, count - 1) * step);
#pragma unroll
    for (int k = 0; k < kCount; k++) sums[k] = Sum(sums[k], v[k]);
  }
}

// The quads of a tile that a block writes: all, or its share within the cluster.
template <class T>
struct QuadRange {
  static constexpr int kInRow = T::kTileN / 4, kQuads = T::kTileM * kInRow;
  static_assert(T::kThreads % kInRow == 0, "a thread keeps to its columns");
  int begin, end;
  __device__ __forceinline__ QuadRange(int splits, int split) {
    const int share = splits > 1 ? CeilDiv32(kQuads / kInRow, splits) * kInRow : kQuads;
    begin = split * share;
    end = min(begin + share, kQuads);
  }
  static __device__ __forceinline__ int At(int q) {
    return q / kInRow * T::kTilePitch + q % kInRow * 4;
  }
  static constexpr int kStep = T::kThreads / kInRow * T::kTilePitch;  // to the thread's next
};

// Reduces the slice tiles of the block into the first.
template <class T>
__device__ __forceinline__ void ReduceSlices(float* tile) {
  if (T::kSliceTiles > 1)
    for (int q = threadIdx.x; q < QuadRange<T>::kQuads; q += T::kThreads)
      *(float4*)(tile + QuadRange<T>::At(q)) = SumSlices<T>(tile + QuadRange<T>::At(q));
}

// Reduces slices and, with split-K, the cluster; applies the epilogue and writes C.
template <class T>
__device__ __forceinline__ void WriteTile(const GemmParams& params, const TileCoord& coord,
                                          float* tile) {
  constexpr int kInRow = QuadRange<T>::kInRow, kBatch = 2;
  const bool cluster = params.splits > 1 && !params.partial;
  Gemm gemm = params.gemm;
  if (params.partial) {
    gemm.c = params.partial + coord.split * gemm.m * gemm.n;
    gemm.epilogue = Epilogue{};
  }
  const QuadRange<T> range(cluster ? params.splits : 1, cluster ? coord.split : 0);
  const int begin = range.begin, end = range.end;
  const int64_t row = (int64_t)coord.row * T::kTileM;
  const int64_t col = (int64_t)coord.col * T::kTileN + (begin + threadIdx.x) % kInRow * 4;
  const float4 bias = ReadBias(gemm, col, params.aligned_out);
  if (cluster) {
    ReduceSlices<T>(tile);
    MeetCluster();
  }
  for (int first = begin + threadIdx.x; first < end; first += kBatch * T::kThreads) {
    Quad quads[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      const int q = first + k * T::kThreads;
      quads[k].col = col;
      quads[k].row = q < end ? row + q / kInRow : gemm.m;
      ReadSide(gemm, params.aligned_out, quads[k]);
    }
    const float* from = tile + QuadRange<T>::At(first);
    const int count = (end - first + T::kThreads - 1) / T::kThreads;
    float4 sums[kBatch];
    if (cluster) {
      SumCluster<kBatch>(from, QuadRange<T>::kStep, count, params.splits, sums);
    } else {
#pragma unroll
      for (int k = 0; k < kBatch; k++)
        sums[k] = SumSlices<T>(from + min(k, count - 1) * QuadRange<T>::kStep);
    }
#pragma unroll
    for (int k = 0; k < kBatch; k++)
      quads[k].x[0] = sums[k].x, quads[k].x[1] = sums[k].y, quads[k].x[2] = sums[k].z,
      quads[k].x[3] = sums[k].w;
#pragma unroll
    for (int k = 0; k < kBatch; k++) WriteQuad(gemm, params.aligned_out, bias, quads[k]);
  }
}

// The mainloop: multi-stage copies of operand panels, overlapped with the multiplication.
template <class T, template <class, bool, bool> class Accumulator, bool kTransA, bool kTransB>
class Mainloop {
  using PanelA = typename Accumulator<T, kTransA, kTransB>::PanelA;
  using PanelB = typename Accumulator<T, kTransA, kTransB>::PanelB;
  static constexpr int kStageNumel = PanelA::kNumel + PanelB::kNumel;

 public:
  __device__ __forceinline__ Mainloop(const GemmParams& params, const TileCoord& coord,
                                      float* memory)
      : params_(params),
        memory_(memory),
        k_begin_(coord.split * params.k_slice),
        k_((int)min(params.k_slice, params.gemm.k - k_begin_)),
        k_tiles_((k_ + T::kTileK - 1) / T::kTileK),
        a_(params.gemm.a, params.gemm.m, kTransA ? params.gemm.m : params.gemm.k,
           (int64_t)coord.row * T::kTileM, k_begin_),
        b_(params.gemm.b, params.gemm.n, kTransB ? params.gemm.k : params.gemm.n,
           (int64_t)coord.col * T::kTileN, k_begin_) {}

  // Issues the copies of the first kStages - 1 panels.
  __device__ __forceinline__ void Begin() {
#pragma unroll 1
    for (int k_tile = 0; k_tile < T::kStages - 1; k_tile++) Copy(k_tile);
  }

  // Leaves the slices' sums in kSliceTiles tiles at the front of the memory, and the block's
  // operand sums at the front of `thread_sums`. Calls overlap() while copies are in flight.
  template <class F>
  __device__ __forceinline__ void Run(OperandSums operand_sums, float* thread_sums, F&& overlap) {
    const int slice = threadIdx.x / T::kSliceThreads;
    Accumulator<T, kTransA, kTransB> accumulator(params_.gemm);
    float sum = 0.f;
    for (int k_tile = 0; k_tile < k_tiles_; k_tile++) {
      WaitForCopies<T::kStages - 2>();
      MeetSlice(slice);
      const float* from = memory_ + k_tile % T::kStages * kStageNumel;
      accumulator.Add(from, from + PanelA::kNumel, slice * T::kSliceK, [&] {
        Copy(k_tile + T::kStages - 1);
        if (k_tile == 0) overlap();
      });
      if constexpr (PanelA::kHasSums)
        if (operand_sums.a) sum += SumOverK<T, PanelA, T::kTileM>(from);
      if constexpr (PanelB::kHasSums)
        if (operand_sums.b) sum += SumOverK<T, PanelB, T::kTileN>(from + PanelA::kNumel);
    }
    if (k_tiles_ == 0) overlap();
    WaitForCopies<0>();
    __syncthreads();
    TriggerProgrammaticLaunch();
    thread_sums[threadIdx.x] = sum;
#pragma unroll
    for (int first = 0; first < T::kSlices; first += T::kSliceTiles) {
      if (slice / T::kSliceTiles * T::kSliceTiles == first)
        accumulator.Store(memory_ + slice % T::kSliceTiles * T::kTileNumel, first > 0);
      __syncthreads();
    }
    ReduceOperandSums<T>(operand_sums, thread_sums);
  }

 private:
  // Waits for the threads that copied what this one reads.
  static __device__ __forceinline__ void MeetSlice(int slice) {
    if constexpr (T::kApart > 1)
      hopper::SyncThreads(1 + slice, T::kSliceThreads);
    else
      __syncthreads();
  }

  __device__ __forceinline__ void Copy(int k_tile) {
    if (k_tile < k_tiles_) {
      float* to = memory_ + k_tile % T::kStages * kStageNumel;
      a_.Copy(to, k_ - k_tile * T::kTileK, params_.aligned_a);
      b_.Copy(to + PanelA::kNumel, k_ - k_tile * T::kTileK, params_.aligned_b);
    }
    CloseCopies();
  }

  const GemmParams& params_;
  float* const memory_;
  const int64_t k_begin_;
  const int k_, k_tiles_;
  PanelA a_;
  PanelB b_;
};

template <class T, template <class, bool, bool> class Accumulator, bool kTransA, bool kTransB>
__global__ __launch_bounds__(T::kThreads, T::kResident) void GemmKernel(const GemmParams params) {
  float* const memory = DynamicShared<float>();
  __shared__ float thread_sums[T::kThreads];
  const Gemm& gemm = params.gemm;
  const TileCoord coord = TileCoordOf(params, blockIdx.x);
  const OperandSums operand_sums(gemm, coord);
  Mainloop<T, Accumulator, kTransA, kTransB> mainloop(params, coord, memory);
  GridDependencySynchronize();
  mainloop.Begin();
  mainloop.Run(operand_sums, thread_sums, [] {});
  WriteTile<T>(params, coord, memory);
  const bool cluster = params.splits > 1 && !params.partial;
  if ((operand_sums.a || operand_sums.b) && !(cluster && coord.split > 0)) {
    float* to = gemm.sums;
    if (params.partial)
      to = params.partial + params.splits * gemm.m * gemm.n +
           coord.split * (operand_sums.a ? gemm.m : gemm.n);
    StoreOperandSums<T>(params, coord, operand_sums, thread_sums, cluster ? params.splits : 1,
                        [&](int64_t at, float sum) { to[at] = sum; });
  }
  if (cluster) LeaveCluster();  // its shared memory outlives the peers' reads
}

// Shared memory of a block: operand panels, then reused for slice tiles.
template <class T, class Accumulator>
constexpr size_t MemoryNbytes() {
  using PanelA = typename Accumulator::PanelA;
  using PanelB = typename Accumulator::PanelB;
  constexpr int kPanels = T::kStages * (PanelA::kNumel + PanelB::kNumel);
  constexpr int kSliceTiles = T::kSliceTiles * T::kTileNumel;
  return (kPanels > kSliceTiles ? kPanels : kSliceTiles) * sizeof(float);
}

// kNeverTransA compiles no kernels for a transposed A.
template <class T, template <class, bool, bool> class Accumulator, bool kNeverTransA = false>
void LaunchTiles(const char* op, const GemmParams& params, DLStream stream) {
  const Gemm& p = params.gemm;
  const unsigned blocks = (unsigned)(params.tiles * params.splits);
  const unsigned cluster = params.partial ? 1 : (unsigned)params.splits;
  const auto launch = [&](auto trans_a, auto trans_b) {
    LaunchSmall(op, GemmKernel<T, Accumulator, trans_a, trans_b>, blocks, cluster, T::kThreads,
                MemoryNbytes<T, Accumulator<T, trans_a, trans_b>>(), params.allow_pdl, stream,
                params);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if constexpr (!kNeverTransA)
    if (p.trans_a) return p.trans_b ? launch(Yes(), Yes()) : launch(Yes(), No());
  p.trans_b ? launch(No(), Yes()) : launch(No(), No());
}

// Families of kernels, each of one accumulator and its tilings. A tiling index means the same tile
// size in all that are not large.
enum class KernelFamily {
  kFp32,
  kTf32,
  k3xTf32,
  kU8,
  kLargeFp32,
  kLargeTf32,
  kLarge3xTf32,
  kFfma,
  kSlim
};
constexpr int kTiledFamilies = 7;  // those before kFfma
KernelFamily FamilyOf(const Gemm& gemm);

struct TileSize {
  int m, n;
};

// A tiling index of a family and a number of splits, with the estimated time.
struct TileConfig {
  KernelFamily family;
  int tiling, splits;
  double us;
  // The last tiles, which are a launch of their own, and the splits of their K; 0 where there is
  // one launch.
  int rest = 0, rest_splits = 1;
};
// The heuristic: the fastest configuration for GEMMs in one launch that fits shared memory.
TileConfig BestTileConfig(KernelFamily family, const Gemm* gemms, int count, int max_splits);
// The same for GEMMs of which some are of bytes, at fp32: one of MixedTilings.
struct MixedConfig {
  int mixed, splits;
  TileSize of_floats, of_u8_a, of_u8_b;
  const TileSize& Of(U8Operand u8) const {
    return u8 == U8Operand::kNone ? of_floats : u8 == U8Operand::kA ? of_u8_a : of_u8_b;
  }
};
MixedConfig BestMixedConfig(const Gemm* gemms, int count, int max_splits);
// The heuristic for one GEMM, in a family or that of large tiles.
TileConfig BestTileConfig(KernelFamily family, const Gemm& gemm);
void RunTiledGemm(const char* op, const Gemm& gemm, TileConfig config, DLStream stream);

// The variants of a rung: every tiling of a family, and of that of large tiles, with every split-K;
// or kHeuristic.
std::vector<std::string> TiledVariants(KernelFamily family);
TileConfig VariantConfig(KernelFamily family, const Gemm& gemm, int variant);
bool FitsTiled(KernelFamily family, const Gemm& gemm, int variant);
// Kernel parameters, with K cut into slices.
GemmParams MakeParams(const char* op, const Gemm& gemm, const TileSize& tile, int splits);
GemmParams MakeParams(const char* op, const Gemm& gemm, const TileConfig& config);

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>()) for the tiling of that index.
template <class Tilings, int kIndex = 0, class F>
void WithTiling(int tiling, F&& f) {
  if constexpr (kIndex < std::tuple_size_v<Tilings>) {
    if (tiling > kIndex) return WithTiling<Tilings, kIndex + 1>(tiling, f);
    f(Type<std::tuple_element_t<kIndex, Tilings>>());
  } else {
    Fail("matmul: there is no tiling %d", tiling);
  }
}

void LaunchFp32(const char* op, int tiling, const GemmParams& params, DLStream stream);
void LaunchLargeFp32(const char* op, int tiling, const GemmParams& params, DLStream stream);
void LaunchTf32(const char* op, int tiling, const GemmParams& params, DLStream stream);
void Launch3xTf32(const char* op, int tiling, const GemmParams& params, DLStream stream);
void LaunchLargeTf32(const char* op, int tiling, const GemmParams& params, DLStream stream);
void LaunchLarge3xTf32(const char* op, int tiling, const GemmParams& params, DLStream stream);
// The family kFfma (rungs/ffma.cuh): its tilings, what one would take in microseconds, and a
// product by it.
const std::vector<std::string>& FfmaTilingNames();
bool FfmaFits(const Gemm& gemm);
double FfmaUs(const Gemm& gemm, int tiling);
void RunFfma(const char* op, const Gemm& gemm, int tiling, DLStream stream);
// The family kSlim (rungs/slim.cu), of C with at most 16 rows or columns. True where the operand
// along the larger extent of C lies along it in whole quads; what one would take in microseconds,
// infinite where it does not fit; and a product by it, of floats of any size.
bool SlimFits(const Gemm& gemm);
double SlimUs(const Gemm& gemm);
void RunSlim(const char* op, const Gemm& gemm, DLStream stream);
// A strip of C: its rows from `first` on, or its columns, which are at most 16; `width` of the
// other extent. `wide` is the operand along that, as it lies or packed: (k, pitch). Of float32,
// without operand sums.
struct SlimStrip {
  bool of_rows;
  int64_t first, width;
  const float* wide;
  int64_t pitch;
};
double SlimUs(const Gemm& gemm, const SlimStrip& strip);
void RunSlim(const char* op, const Gemm& gemm, const SlimStrip& strip, DLStream stream);
// A is uint8 and not transposed.
void LaunchU8(const char* op, int tiling, const GemmParams& params, DLStream stream);

}  // namespace cuda
}  // namespace dlsys
