// Launches of the GEMM by FFMA and TMA (ffma.cuh), and the copies that it needs: of operands that
// do not lie (k, mn), or whose rows TMA cannot read, to rows of a multiple of 16 bytes in planned
// workspace. C overlaps no operand. Memory bandwidth limits the copies.
#include "cuda/gemm/rungs/ffma.cuh"

#include <optional>

#include "cuda/instructions/tensor_map.cuh"

namespace dlsys {
namespace cuda {
namespace {

constexpr int kPackMn = 64, kPackK = 64;

// Copies an operand to (k, pitch): element (mn, k) is at x[mn * of_mn + k * of_k]. kInQuads: it
// lies along K, in rows of whole quads, so that eight lanes read a line of 128 bytes.
template <bool kInQuads>
__global__ void __launch_bounds__(kThreads)
    PackKernel(Operand x, int64_t extent, int64_t k_extent, int64_t pitch, float* packed) {
  __shared__ float tile[kPackK][kPackMn + 1];
  const bool along_k = x.of_k == 1;
  const int64_t k_tiles = CeilDiv(k_extent, kPackK);
  const int64_t mn0 = blockIdx.x / k_tiles * kPackMn, k0 = blockIdx.x % k_tiles * kPackK;
  const int mn_valid = (int)min((int64_t)kPackMn, extent - mn0);
  const int k_valid = (int)min((int64_t)kPackK, k_extent - k0);
  const float* const from = x.data + mn0 * x.of_mn + k0 * x.of_k;
  if constexpr (kInQuads) {
    constexpr int kInRow = kPackK / 4, kStep = kThreads / kInRow;
    const int k = (int)threadIdx.x % kInRow * 4;
#pragma unroll
    for (int mn = (int)threadIdx.x / kInRow; mn < kPackMn; mn += kStep) {
      const bool exists = mn < mn_valid && k < k_valid;
      const float4 v = exists ? *(const float4*)(from + mn * x.of_mn + k) : make_float4(0, 0, 0, 0);
      tile[k][mn] = v.x, tile[k + 1][mn] = v.y, tile[k + 2][mn] = v.z, tile[k + 3][mn] = v.w;
    }
  } else {
#pragma unroll 8
    for (int i = threadIdx.x; i < kPackMn * kPackK; i += kThreads) {
      const int mn = along_k ? i / kPackK : i % kPackMn, k = along_k ? i % kPackK : i / kPackMn;
      tile[k][mn] = mn < mn_valid && k < k_valid ? from[mn * x.of_mn + k * x.of_k] : 0.f;
    }
  }
  __syncthreads();
  const int mn = (int)threadIdx.x % kPackMn;
  float* const to = packed + k0 * pitch + mn0 + mn;
  if (mn0 + mn >= pitch) return;
#pragma unroll
  for (int k = (int)threadIdx.x / kPackMn; k < kPackK; k += kThreads / kPackMn)
    if (k < k_valid) to[k * pitch] = tile[k][mn];
}

// Adds the parts of tiles that blocks shared, and applies the epilogue. A quad is summed by kParts
// threads, which take equal shares of its parts.
template <class T, int kParts>
__global__ void __launch_bounds__(kThreads)
    FfmaSumKernel(const GemmParams params, const FfmaShares shares) {
  constexpr int kQuads = kThreads / kParts, kInRow = T::kTileN / 4, kOfTile = T::kTileM * kInRow;
  static_assert(kOfTile % kQuads == 0);
  __shared__ float4 sums[kParts][kQuads];
  const Gemm& gemm = params.gemm;
  const int part = (int)threadIdx.x / kQuads, at = (int)threadIdx.x % kQuads;
  GridDependencySynchronize();
  for (int64_t first = blockIdx.x * (int64_t)kQuads; first < (int64_t)shares.split_tiles * kOfTile;
       first += gridDim.x * (int64_t)kQuads) {
    const int tile = (int)(first / kOfTile), q = (int)(first % kOfTile) + at;
    const int panel = tile * shares.panels, slot = shares.BlockAt(panel) + tile;
    const int parts = shares.BlockAt(panel + shares.panels - 1) + tile - slot + 1;
    if (parts == 1) continue;  // in C already
    const TileCoord coord = TileCoordOf(params, tile);
    Quad quad = {(int64_t)coord.row * T::kTileM + q / kInRow,
                 (int64_t)coord.col * T::kTileN + q % kInRow * 4, {}, {}};
    if (part == 0) ReadSide(gemm, params.aligned_out, quad);
    const int share = CeilDiv32(parts, kParts);
    const int begin = min(part * share, parts), end = min(begin + share, parts);
    const float4* from = (const float4*)shares.parts + (int64_t)(slot + begin) * kOfTile + q;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int k = begin; k < end; k++, from += kOfTile) sum = Sum(sum, *from);
    if constexpr (kParts > 1) {
      sums[part][at] = sum;
      __syncthreads();
#pragma unroll
      for (int other = 1; other < kParts; other++)
        if (part == 0) sum = Sum(sum, sums[other][at]);
      __syncthreads();
    }
    quad.x[0] = sum.x, quad.x[1] = sum.y, quad.x[2] = sum.z, quad.x[3] = sum.w;
    if (part == 0)
      WriteQuad(gemm, params.aligned_out, ReadBias(gemm, quad.col, params.aligned_out), quad);
  }
}

bool IsPacked(const Operand& x) { return x.of_mn != 1 || x.of_k % 4 || !Aligned16(x.data); }

// Whether the kernel transposes an operand that lies along K: in rows that TMA can read, and in
// tiles that leave registers and memory for it.
template <class T>
bool IsTransposed(const Operand& x) {
  return T::kResident == 1 && x.of_k == 1 && x.of_mn % 4 == 0 && Aligned16(x.data);
}

// An operand as the kernel reads it, in scratch where it has to be copied.
template <class T>
class FfmaOperand {
 public:
  FfmaOperand(const char* op, const Gemm& p, Operand x, int64_t extent, int box, DLStream stream)
      : transposed(IsTransposed<T>(x)) {
    if (transposed) {
      map = BoxMap(op, DL_FLOAT32, x.data, p.k, extent, x.of_mn, 1, box, false);
      return;
    }
    if (IsPacked(x)) {
      const int64_t pitch = CeilDiv(extent, 4) * 4;
      packed_.emplace(p.ctx, pitch * p.k * (int64_t)sizeof(float), stream);
      const int64_t tiles = CeilDiv(extent, kPackMn) * CeilDiv(p.k, kPackK);
      const bool in_quads = x.of_k == 1 && x.of_mn % 4 == 0 && Aligned16(x.data);
      Launch(op, in_quads ? PackKernel<true> : PackKernel<false>, (unsigned)tiles, kThreads, 0,
             stream, x, extent, p.k, pitch, packed_->floats());
      x = {packed_->floats(), 1, pitch};
    }
    map = PlainMap(op, x.data, extent, p.k, x.of_k, box, T::kTileK);
  }

  const bool transposed;
  CUtensorMap map;

 private:
  std::optional<Scratch> packed_;
};

// Cost of a tiling, measured on an H200: of a launch, of a panel on each of the blocks that run
// together, of what a tile costs besides; and of adding parts, a launch and bytes a microsecond.
struct FfmaCost {
  const char* name;
  double us, panel_us, tile_us;
};
constexpr FfmaCost kCosts[] = {{"64x128 TMA", 4, 5.0, 2}, {"128x128 TMA", 4, 5.0, 2}, {"256x128 TMA", 4, 4.95, 4}};
constexpr double kSumUs = 3.5, kPartNbytesUs = 4e6;

// Tiles that would not fill a wave of blocks are shared by all, where each then has a few panels.
template <class T>
FfmaShares SharesOf(const Gemm& p) {
  constexpr int64_t kLeastPanels = 2;
  const int64_t blocks = (int64_t)Multiprocessors(p.ctx.device_id) * T::kResident;
  const int64_t panels = CeilDiv(p.k, T::kTileK);
  const int64_t tiles = CeilDiv(p.m, T::kTileM) * CeilDiv(p.n, T::kTileN), left = tiles % blocks;
  const bool split = left * panels >= blocks * kLeastPanels && left * panels < INT32_MAX;
  return {(int)panels, (int)tiles, split ? (int)left : 0,
          (int)(split ? blocks : std::min(blocks, tiles)), nullptr};
}

// The slots of parts.
int64_t SlotsOf(const FfmaShares& shares) {
  return shares.split_tiles ? shares.split_tiles + shares.blocks : 0;
}

double PackUs(const Operand& x, const Gemm& p, int64_t extent) {
  constexpr double kLaunchUs = 2, kNbytesUs = 2.8e6;
  return IsPacked(x) ? kLaunchUs + 8. * (double)extent * (double)p.k / kNbytesUs : 0;
}

template <class T>
double EstimatedUs(const Gemm& p, const FfmaCost& cost) {
  const FfmaShares shares = SharesOf<T>(p);
  const auto pack_us = [&](const Operand& x, int64_t extent) {
    return IsTransposed<T>(x) ? 0 : PackUs(x, p, extent);
  };
  const double whole = (double)CeilDiv(shares.tiles - shares.split_tiles, shares.blocks);
  const double shared = (double)shares.split_tiles * shares.panels / shares.blocks;
  const double part_nbytes = 8. * T::kTileM * T::kTileN * (double)SlotsOf(shares);
  return cost.us + pack_us(OperandA(p), p.m) + pack_us(OperandB(p), p.n) +
         (whole * shares.panels + shared) * cost.panel_us + whole * cost.tile_us +
         (shares.split_tiles ? cost.tile_us + kSumUs + part_nbytes / kPartNbytesUs : 0);
}

template <class T>
void Run(const char* op, const Gemm& p, DLStream stream) {
  const FfmaOperand<T> a(op, p, OperandA(p), p.m, T::kTileM, stream);
  const FfmaOperand<T> b(op, p, OperandB(p), p.n, T::kTileN, stream);
  const GemmParams params = MakeParams(op, p, {T::kTileM, T::kTileN}, 1);
  FfmaShares shares = SharesOf<T>(p);
  const Scratch parts(p.ctx, SlotsOf(shares) * T::kTileM * T::kTileN * (int64_t)sizeof(float),
                      stream);
  shares.parts = parts.floats();
  const auto launch = [&](auto along_a, auto along_b) {
    using Memory = FfmaMemory<T, along_a, along_b>;
    LaunchClusters(op, FfmaKernel<T, along_a, along_b>, (unsigned)shares.blocks, 1,
                   Memory::kThreads, Memory::kNbytes, params.allow_pdl, stream, a.map, b.map,
                   params, shares);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if constexpr (T::kResident == 1) {
    if (a.transposed) b.transposed ? launch(Yes(), Yes()) : launch(Yes(), No());
    if (!a.transposed && b.transposed) launch(No(), Yes());
  }
  if (!a.transposed && !b.transposed) launch(No(), No());
  constexpr int kMany = 8;
  const bool many = shares.blocks > kMany * shares.split_tiles;
  const int64_t quads = (int64_t)shares.split_tiles * T::kTileM * T::kTileN / 4;
  LaunchClusters(op, many ? FfmaSumKernel<T, kMany> : FfmaSumKernel<T, 1>,
                 Blocks(quads * (many ? kMany : 1)), 1, kThreads, 0, params.allow_pdl, stream,
                 params, shares);
}

}  // namespace

std::vector<std::string> FfmaTilingNames() {
  std::vector<std::string> names;
  for (const FfmaCost& cost : kCosts) names.push_back(cost.name);
  return names;
}

bool FfmaFits(const Gemm& p) {
  constexpr int64_t kMost = int64_t(1) << 30;
  return p.k > 0 && p.m < kMost && p.n < kMost && p.k < kMost && !*WgmmaError(p.ctx.device_id);
}

double FfmaUs(const Gemm& p, int tiling) {
  double us = 0;
  WithTiling<FfmaTilings>(tiling, [&](auto of) {
    us = EstimatedUs<typename decltype(of)::type>(p, kCosts[tiling]);
  });
  return us;
}

void RunFfma(const char* op, const Gemm& p, int tiling, DLStream stream) {
  WithTiling<FfmaTilings>(tiling,
                          [&](auto of) { Run<typename decltype(of)::type>(op, p, stream); });
  if (p.sums) RunOperandSums(op, p, stream);
}

}  // namespace cuda
}  // namespace dlsys
